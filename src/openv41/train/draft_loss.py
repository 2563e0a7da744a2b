"""What the drafter learns from texts: to say what the target would say. Report §2.4.3.

Behind up to ``anchors`` tokens of each document stands a block. Draft k of an anchor at position a
is compared with the target's distribution at position a + k - 1, teacher-forced on the text, as
are the tokens that the Markov and the confidence head read. The loss of a draft is

    0.1 CE + 0.9 |p_d - p_t|_1 + 1.0 BCE(z, c*)   with   c* = 1 - |p_d - p_t|_1 / 2

times exp(-(k - 1) / decay); sums are divided by the weights of the whole batch. No gradient
reaches the target: neither its features, nor its distribution, nor embedding and head.
"""

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from openv41 import ops
from openv41.config import ModelConfig
from openv41.layers.batch import Batch
from openv41.layers.context import ForwardContext
from openv41.layers.single_pass_mhc import Streams
from openv41.model.causal_encoder_decoder import CausalEncoderDecoder, Output, equal_streams
from openv41.ops.precision import widened
from openv41.train.config import TrainConfig
from openv41.train.packed_batch import PackedBatch
from openv41.train.packing import mix
from openv41.train.placement import whole_value
from openv41.train.processes import Processes

EPSILON = 1e-6  # beside the sum of all weights


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftFigures:
    """Means of a batch; those of single drafts weigh every supervised draft alike."""

    ce: float  # these three before their weights, over the decaying weights
    l1: float
    confidence: float
    acceptance: list[float]  # of draft k, if those before it are the text's
    tau: float  # mean accepted length, bonus token included, if acceptances were independent
    confidence_error: float  # |sigmoid(z) - c*|
    confidence_bias: float  # sigmoid(z) - c*


class FrozenTarget:
    """Embedding and head of a model, which no gradient reaches."""

    def __init__(self, model: CausalEncoderDecoder) -> None:
        self.num_streams = model.config.mhc.num_streams
        self.embed, self.head = whole_value(model.embed.weight), whole_value(model.head.weight)
        is_narrow = model.numerics.compute_dtype == "bfloat16"
        self.dtype = torch.bfloat16 if is_narrow else self.embed.dtype

    def first_streams(self, batch: Batch, ctx: ForwardContext) -> Streams:
        """Embed the rows of blocks."""
        del ctx
        embedded = F.embedding(batch.token_ids, self.embed).to(self.dtype)
        return equal_streams(embedded, self.num_streams)

    def logits(self, hidden: Float[Tensor, "rows D"]) -> Float[Tensor, "rows V"]:
        """Score the vocabulary."""
        return ops.linear(widened(hidden), self.head)


@dataclass(frozen=True, eq=False)
class Slots:
    """Drafts of blocks, a row per anchor."""

    anchors: Int[Tensor, " B"]  # rows of the batch
    rows: Int[Tensor, "B X"]  # that predict the drafted tokens; the anchor's is the first
    labels: Int[Tensor, "B X"]
    previous: Int[Tensor, "B X"]
    counts: Bool[Tensor, "B X"]  # whether a draft is supervised

    @classmethod
    def of(cls, packed: PackedBatch, model: ModelConfig, block_size: int) -> "Slots":
        """Drafts up to the end of the document, or of the run of learned tokens."""
        assert packed.anchors is not None, "draw anchors first"
        anchors = packed.anchors.nonzero()[:, 0]
        ends = torch.tensor(packed.lengths).cumsum(0)
        ends = ends.repeat_interleave(torch.tensor(packed.lengths))[anchors]
        rows = anchors[:, None] + torch.arange(block_size)
        inside = rows + 1 < ends[:, None]
        behind = (rows + 1).clamp(max=len(packed.ids) - 1)
        counts = (inside & learned_tokens(packed, model)[behind]).long().cumprod(dim=1).bool()
        safe = rows.clamp(max=len(packed.ids) - 1)
        ids = packed.ids.long()
        return cls(anchors, safe, ids[behind], ids[safe], counts)

    def weights(self, decay: float) -> Float[Tensor, "B X"]:
        """How much each draft counts."""
        steps = torch.arange(self.counts.shape[1], dtype=torch.float64)
        return torch.where(self.counts, torch.exp(-steps / decay), 0.0)


def learned_tokens(packed: PackedBatch, model: ModelConfig) -> Bool[Tensor, " T"]:
    """Tokens that drafts may learn: text that is learned at all."""
    text = packed.ids != model.image_token_id
    return text if packed.weights is None else text & (packed.weights > 0)


def draw_anchors(
    packed: PackedBatch, model: ModelConfig, train: TrainConfig, step: int
) -> PackedBatch:
    """Mark up to ``draft.anchors`` learned tokens of each document whose next is learned too.

    All are different, and depend on the seed, the step and the place of the document alone. Behind
    a simulated prefill anchors stand where serving would draft: at the prompt's end or later.
    """
    learned, first = learned_tokens(packed, model), 0
    anchors = torch.zeros(len(packed.ids), dtype=torch.bool)
    window, key = model.attention.window_size, mix(mix(train.seed + 1) ^ step)
    floors = packed.replay.floors if packed.replay is not None else (0,) * len(packed.lengths)
    for number, (length, floor) in enumerate(zip(packed.lengths, floors, strict=True)):
        own = learned[first : first + length]
        allowed = own[:-1] & own[1:]
        if floor:
            allowed &= torch.arange(length - 1) >= floor + window
        found = allowed.nonzero()[:, 0]
        generator = torch.Generator().manual_seed(mix(key + number) >> 1)
        chosen = torch.randperm(len(found), generator=generator)[: train.draft.anchors]
        anchors[first + found[chosen]] = True
        first += length
    return replace(packed, anchors=anchors)


class DraftSums:
    """Losses and figures of the drafter on a batch, added up part by part."""

    def __init__(
        self, model: CausalEncoderDecoder, packed: PackedBatch, config: TrainConfig
    ) -> None:
        assert model.drafter is not None, "draft.weight for a model without a drafter"
        self.drafter = model.drafter
        self.target, self.config, self.model = FrozenTarget(model), config.draft, model.config
        size = self.drafter.block_size
        slots = Slots.of(packed, self.model, size)
        self.total_weight = float(slots.weights(self.config.decay).sum()) + EPSILON
        self.num_drafts = int(slots.counts.sum())
        self.losses = torch.zeros(3, dtype=torch.float64)  # CE, L1, BCE, before their weights
        self.by_slot = torch.zeros(4, size, dtype=torch.float64)  # as ``_count`` adds them up
        stages = (stage.moe for stage in self.drafter.all_stages())
        self.loads = {moe.layer: torch.zeros(2, moe.moe.num_experts).long() for moe in stages}

    @property
    def loss(self) -> float:
        """The sum that the drafter learns from, of what was added so far."""
        return float(self.losses @ self._weights())

    def add(
        self, part: PackedBatch, batch: Batch, out: Output, *, share: float = 1.0
    ) -> Float[Tensor, ""]:
        """Loss of a part of the batch, ``share`` of which counts: 1, or 0 for a mere copy."""
        assert out.taps is not None, "the model has no taps"
        slots, device = Slots.of(part, self.model, self.drafter.block_size), out.hidden.device
        if not len(slots.anchors):
            return out.hidden.new_zeros(())
        taps = out.taps.detach()
        blocks = self.drafter(self.target, taps, batch, slots.anchors.to(device))
        for layer, counts in blocks.expert_counts.items():
            self.loads[layer] += int(share) * counts.cpu()
        hidden = blocks.hidden.unflatten(0, (-1, self.drafter.block_size))
        taught, total = out.hidden.detach()[slots.rows.to(device)], hidden.sum() * 0.0
        weights = share * slots.weights(self.config.decay) / self.total_weight
        columns = slots.previous, slots.labels, weights
        for piece in torch.arange(len(hidden)).split(self.config.blocks_at_once):
            others = [column[piece].to(device) for column in columns]
            losses, accept, logits = checkpoint(
                self.compare, hidden[piece], taught[piece], *others, use_reentrant=False
            )
            total = total + losses @ self._weights().to(losses)
            self.losses += losses.detach().double().cpu()
            if share:
                self._count(slots.counts[piece], accept.double().cpu(), logits.double().cpu())
        weighted: Tensor = self.config.weight * total
        return weighted

    def compare(
        self,
        hidden: Float[Tensor, "B X D"],
        taught: Float[Tensor, "B X D"],
        previous: Int[Tensor, "B X"],
        labels: Int[Tensor, "B X"],
        weights: Float[Tensor, "B X"],
    ) -> tuple[Float[Tensor, "3"], Float[Tensor, "B X"], Float[Tensor, "B X"]]:
        """Weighted sums of CE, L1 and BCE; acceptance and confidence logit of each draft."""
        drafter, features = self.drafter, self.drafter.markov.features(previous)
        base = drafter.base_logits(self.target, hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2])
        drafted = (base + drafter.markov(features)).log_softmax(dim=-1)  # log p_d, [B, X, V]
        with torch.no_grad():
            target = self.target.logits(taught.flatten(0, 1)).softmax(dim=-1).view_as(drafted)
        ce = -drafted.gather(-1, labels[..., None])[..., 0]
        l1 = (drafted.exp() - target).abs().sum(dim=-1)
        accept = (1 - l1 / 2).detach()
        read = (hidden, features)
        if self.config.detach_confidence:
            read = hidden.detach(), features.detach()
        logits = drafter.confidence_logits(*read)
        bce = F.binary_cross_entropy_with_logits(logits, accept, reduction="none")
        sums = torch.stack([ce, l1, bce]) * weights.to(l1.dtype)
        return sums.sum(dim=(1, 2)), accept, logits.detach()

    def collect(self, processes: Processes) -> None:
        """Add what the other processes have added."""
        if processes.size == 1:
            return
        figures = torch.cat([self.losses, self.by_slot.flatten()]).to(processes.device)
        loads = torch.stack(list(self.loads.values())).to(processes.device)
        processes.sum_(figures, loads)
        self.loads = dict(zip(self.loads, loads, strict=True))
        self.losses, by_slot = figures.cpu().split([3, self.by_slot.numel()])
        self.by_slot = by_slot.view_as(self.by_slot)

    def figures(self) -> DraftFigures:
        """Means over the batch."""
        counts, accepted, errors, biases = self.by_slot
        acceptance = (accepted / counts.clamp(min=1)).tolist()
        ce, l1, confidence = self.losses.tolist()
        drafts = max(1.0, float(counts.sum()))
        return DraftFigures(
            ce=ce,
            l1=l1,
            confidence=confidence,
            acceptance=acceptance,
            tau=mean_length(acceptance),
            confidence_error=float(errors.sum()) / drafts,
            confidence_bias=float(biases.sum()) / drafts,
        )

    def _weights(self) -> Float[Tensor, "3"]:
        config = self.config
        weights = (config.ce_weight, config.l1_weight, config.confidence_weight)
        return torch.tensor(weights, dtype=torch.float64)

    def _count(self, counts: Tensor, accept: Tensor, logits: Tensor) -> None:
        """Add drafts, acceptances, |sigmoid(z) - c*| and sigmoid(z) - c* of each position."""
        gap = logits.sigmoid() - accept
        figures = torch.stack([torch.ones_like(gap), accept, gap.abs(), gap])
        self.by_slot += (figures * counts).sum(dim=1)


def mean_length(acceptance: list[float]) -> float:
    """1 + sum_k prod_{i <= k} acceptance_i."""
    return 1.0 + math.fsum(math.prod(acceptance[: k + 1]) for k in range(len(acceptance)))
