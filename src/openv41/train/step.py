"""One optimizer step: loss, gradients, clipping, update, load balance. Report §2.5."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from openv41.errors import OpenV41Error
from openv41.layers.objectives import Losses
from openv41.model.causal_encoder_decoder import CausalEncoderDecoder, Output
from openv41.train.balance import KINDS, update_biases
from openv41.train.config import TrainConfig
from openv41.train.distill import Teachers
from openv41.train.draft_loss import DraftFigures, DraftSums, draw_anchors
from openv41.train.freezing import freeze
from openv41.train.optimizer import Optimizers
from openv41.train.packed_batch import PackedBatch, part_bounds
from openv41.train.processes import Processes
from openv41.train.replay_simulation import simulate_replay
from openv41.train.schedule import lr_factor


class DivergedError(OpenV41Error):
    """A loss or gradient that is not finite, or a loss that is too high."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what}; the parameters are those of the step before. Start again with a lower "
            "optimizer.lr or a longer warmup_tokens"
        )
        self.what = what


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What one step measured."""

    loss: float  # nats per target, of the language model alone
    losses: Mapping[str, float]  # the same for "text" and for documents with an "image"
    indexer_loss: float | None  # these two before their weights; None where turned off
    balance_loss: float | None
    distill_loss: float | None = None  # reverse KL to the teachers, per target, before its weight
    grad_norm: float  # before clipping
    update_rms: dict[str, float] | None  # of each group, over its learning rate; where measured
    lr: float
    loads: Mapping[int, Int[Tensor, "2 E"]]  # per layer: tokens per expert, of text and of images
    num_targets: int  # tokens, or texts, that were predicted
    retrieval: float | None = None  # of a contrastive step: images that find their text
    draft: DraftFigures | None = None  # where the drafter learns


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """What the optimizers did with the gradients of a batch."""

    grad_norm: float
    update_rms: dict[str, float] | None
    lr: float


def train_step(
    model: CausalEncoderDecoder,
    optimizer: Optimizers,
    packed: PackedBatch,
    config: TrainConfig,
    step: int,
    *,
    teachers: Teachers | None = None,
    most: float = math.inf,
) -> StepResult:
    """Train on one batch; raises DivergedError before anything has changed, see ``update``.

    The batch runs in parts of ``micro_batch_tokens``, and each process runs its own documents;
    losses, gradients and loads are those of the whole.
    """
    freeze(optimizer, config, step)
    packed = simulate_replay(packed, model.config, config, step)
    if config.draft.weight:
        packed = draw_anchors(packed, model.config, config, step)
    sums = Sums(model, packed, config, teachers)
    own, idle = own_parts(packed, config.micro_batch_tokens, optimizer.processes)
    for part in own:
        sums.add(part)
    for part in idle:
        sums.join(part)
    sums.collect(optimizer.processes)
    done = update(optimizer, sums.loss, config, step, most=most)
    if not config.lora.rank:
        loads = {**sums.loads, **sums.draft_loads}
        update_biases(model, loads, config.balance_speed, by_modality=config.modality_biases)
    return StepResult(
        loss=sums.loss,
        losses=sums.by_modality(),
        indexer_loss=sums.indexer,
        balance_loss=sums.balance,
        distill_loss=sums.distill,
        grad_norm=done.grad_norm,
        update_rms=done.update_rms,
        lr=done.lr,
        loads=sums.loads,
        num_targets=sums.num_targets,
        draft=None if sums.drafts is None else sums.drafts.figures(),
    )


def update(
    optimizer: Optimizers, loss: float, config: TrainConfig, step: int, *, most: float = math.inf
) -> Update:
    """Clip the gradients of a batch and let every parameter move by them.

    Raises DivergedError, and drops them, where loss or gradient is not finite, or the loss is above
    ``most``.
    """
    optimizer.take_gradients()
    grad_norm = optimizer.clip_gradients(config.optimizer.clip_norm)
    if not (math.isfinite(loss) and math.isfinite(grad_norm) and loss <= most):
        optimizer.zero_grad()
        bound = f", above {most:.4g}" if loss > most else ""
        raise DivergedError(
            f"step {step + 1}: the loss is {loss}{bound}, the gradient norm {grad_norm}"
        )
    lr = config.optimizer.lr * lr_factor(config, step)
    optimizer.set_lr(lr)
    update_rms = None
    if config.update_rms_steps and (step + 1) % config.update_rms_steps == 0:
        update_rms = optimizer.measured_step()
    else:
        optimizer.step()
    optimizer.zero_grad()
    return Update(grad_norm=grad_norm, update_rms=update_rms, lr=lr)


class _Ran(NamedTuple):
    """What a forward and backward of a part gave."""

    out: Output
    nats: Float[Tensor, " targets"]  # of the language model
    kinds: Int[Tensor, " targets"]  # 1 for targets in documents with an image
    weights: Float[Tensor, " targets"]
    divergence: Float[Tensor, ""] | None  # from the teachers, summed over the targets


class Sums:
    """Losses, gradients and loads of a batch, added up part by part."""

    def __init__(
        self,
        model: CausalEncoderDecoder,
        packed: PackedBatch,
        config: TrainConfig,
        teachers: Teachers | None = None,
    ) -> None:
        self.model, self.config, self.teachers = model, config, teachers
        self.device = model.norm.weight.device
        self._also = model.config.image_token_id if config.learn_image_tokens else None
        self.num_tokens = len(packed.ids)
        weights = self._targets(packed)[2]
        self.num_targets, self.total_weight = len(weights), float(weights.sum())
        self.nats = torch.zeros(2, dtype=torch.float64)  # of text, of documents with images
        self.counts = torch.zeros(2, dtype=torch.float64)  # their targets' weights
        self.loads: dict[int, Tensor] = {}
        self.indexer: float | None = None
        self.balance: float | None = None
        self.distill: float | None = None
        self.drafts = DraftSums(model, packed, config) if config.draft.weight else None

    @property
    def draft_loads(self) -> Mapping[int, Tensor]:
        """Loads of the drafter's stages, where their biases shall follow them."""
        drafts = self.drafts if self.config.draft.balance else None
        return {} if drafts is None else drafts.loads

    @property
    def loss(self) -> float:
        """Mean over all targets by their weights, in nats."""
        return float(self.nats.sum() / (self.total_weight or 1))

    def by_modality(self) -> dict[str, float]:
        """Mean loss of each kind of document that occurs."""
        pairs = zip(KINDS, self.nats.tolist(), self.counts.tolist(), strict=True)
        return {kind: nats / count for kind, nats, count in pairs if count}

    def add(self, part: PackedBatch) -> None:
        """Run a part forward and backward."""
        out, nats, kinds, weights, divergence = self._run(part, 1.0)
        for total, values in (self.nats, weights * nats), (self.counts, weights):
            total.index_add_(0, kinds.cpu(), values.cpu())
        for layer, counts in out.expert_counts.items():
            self.loads[layer] = self.loads.get(layer, 0) + counts
        share = len(part.ids) / self.num_tokens
        self.indexer = _plus(self.indexer, out.losses.indexer, share)
        self.balance = _plus(self.balance, out.losses.balance, share)
        self.distill = _plus(self.distill, divergence, 1 / max(1, self.num_targets))

    def join(self, part: PackedBatch) -> None:
        """Run a part that counts for nothing, beside a process that still has one to add."""
        out, *_, divergence = self._run(part, 0.0)
        for layer, counts in out.expert_counts.items():
            self.loads.setdefault(layer, torch.zeros_like(counts))
        self.indexer = _plus(self.indexer, out.losses.indexer, 0.0)
        self.balance = _plus(self.balance, out.losses.balance, 0.0)
        self.distill = _plus(self.distill, divergence, 0.0)

    def collect(self, processes: Processes) -> None:
        """Add what the other processes have added."""
        if processes.size == 1:
            return
        if self.drafts is not None:
            self.drafts.collect(processes)
        others = self.indexer, self.balance, self.distill
        losses = torch.tensor([loss or 0.0 for loss in others], dtype=torch.float64)
        figures = torch.cat([self.nats, self.counts, losses]).to(processes.device)
        loads = torch.stack(list(self.loads.values()))
        processes.sum_(figures, loads)
        self.loads = dict(zip(self.loads, loads, strict=True))
        self.nats, self.counts, losses = figures.cpu().split([2, 2, 3])
        self.indexer, self.balance, self.distill = (
            None if loss is None else total
            for loss, total in zip(others, losses.tolist(), strict=True)
        )

    def _run(self, part: PackedBatch, weight: float) -> _Ran:
        """Forward and backward."""
        model, config = self.model, self.config
        lesson = None if self.teachers is None else self.teachers.read(part)
        batch, recompute = part.for_model(model), config.activation_checkpointing
        wanted = config.objectives
        out = model(batch, objectives=wanted, replay=part.replay, recompute=recompute)
        rows, targets, weights = self._targets(part)
        kinds = part.has_images().to(self.device)[rows].long()
        hidden, counted = out.hidden[rows], None if part.weights is None else weights
        loss = model.head.loss(hidden, targets, counted)
        total, divergence = config.lm_weight * loss.summed, None
        if lesson is not None:
            taught = lesson.loss(model.head, hidden, rows)
            total = total + config.distill_weight * taught.summed
            divergence = taught.each.double().sum()
        share = weight * len(part.ids) / self.num_tokens
        others = [share * of_layers for of_layers in weighted(out.losses, config)]
        total = total * (weight / (self.total_weight or 1))
        learned = torch.stack([total, *others]).sum()
        if self.drafts is not None:
            learned = learned + self.drafts.add(part, batch, out, share=weight)
        if learned.requires_grad:  # an adapter may see nothing of a part
            learned.backward()
        return _Ran(out, loss.each.double(), kinds, weights, divergence)

    def _targets(self, part: PackedBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Rows that predict a target, the targets, and their weights in float64."""
        ids, weights = part.ids.to(self.device), part.target_weights(self._also)
        rows, targets = next_tokens(ids, part.lengths, None if weights is None else weights > 0)
        if weights is None:
            return rows, targets, torch.ones(len(rows), dtype=torch.float64, device=ids.device)
        return rows, targets, weights.to(ids.device, torch.float64)[rows + 1]


def own_parts(
    packed: PackedBatch, most: int, processes: Processes
) -> tuple[list[PackedBatch], list[PackedBatch]]:
    """Parts of at most ``most`` tokens that this process runs, and copies for want of another.

    Every process must run as many parts as any other: one that has fewer runs copies of its first,
    or of the batch's shortest document where it has none, that count for nothing.
    """
    most = most or len(packed.ids)
    dealt = packed.dealt(processes.size)
    has_own = processes.rank < len(dealt)
    own = list(packed.only(dealt[processes.rank]).split(most)) if has_own else []
    shares = ([packed.lengths[number] for number in numbers] for numbers in dealt)
    wanted = max(len(list(part_bounds(lengths, most))) for lengths in shares)
    if len(own) == wanted:
        return own, []
    shortest = packed.lengths.index(min(packed.lengths))
    return own, [own[0] if own else packed.only([shortest])] * (wanted - len(own))


def next_tokens(
    ids: Int[Tensor, " T"], lengths: tuple[int, ...], learned: Bool[Tensor, " T"] | None = None
) -> tuple[Int[Tensor, " targets"], Int[Tensor, " targets"]]:
    """Rows that predict a token, and these tokens: a document's last token predicts none.

    ``learned`` says which tokens count as targets; None means all.
    """
    last = torch.tensor(lengths, device=ids.device).cumsum(0) - 1
    predicts = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
    if learned is not None:
        predicts[:-1] = learned[1:].to(ids.device)
    predicts[last] = False
    rows = predicts.nonzero()[:, 0]
    return rows, ids[rows + 1]


def weighted(losses: Losses, config: TrainConfig) -> list[Float[Tensor, ""]]:
    """The losses of single layers by their weights, where something is there to learn."""
    pairs = (config.indexer_loss, losses.indexer), (config.balance_loss, losses.balance)
    return [weight * loss for weight, loss in pairs if loss is not None and loss.requires_grad]


def _plus(total: float | None, loss: Tensor | None, share: float) -> float | None:
    return total if loss is None else (total or 0.0) + share * loss.item()
