"""DSpark: drafts a block of tokens behind the newest one. Report §2.4.3.

The anchor is the newest token of a request: sampled by the target, not yet run through it. If it
stands at position P, a block has rows for positions P..P+4, which predict the tokens P+1..P+5.
They read the target's features of the committed positions P-128..P-1 and one another.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Protocol, Unpack, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from openv41 import ops
from openv41.config import DsparkConfig, ModelConfig, MoeConfig, NumericsConfig
from openv41.layers.batch import Batch
from openv41.layers.context import ForwardContext
from openv41.layers.decode_context import DecodeContext, DecodeState
from openv41.layers.draft_attention import DraftAttention, DraftBlocks, Window
from openv41.layers.experts import MixtureOfExperts
from openv41.layers.factory import Factory
from openv41.layers.markov_head import MarkovHead
from openv41.layers.quantized_linear import Linear, QuantizedLinear, RMSNorm
from openv41.layers.single_pass_mhc import SinglePassMHC, Streams
from openv41.layers.store import KVStore, Slot, Spans
from openv41.ops.precision import widened

Choose = Callable[[Float[Tensor, "B V"], int], Int[Tensor, " B"]]


@runtime_checkable
class Target(Protocol):
    """What the drafter shares with the model that it drafts for: embedding and head."""

    def first_streams(self, batch: Batch, ctx: ForwardContext) -> Streams:
        """Embed tokens into equal streams, with the first input mix."""
        ...

    def logits(self, hidden: Float[Tensor, "T D"]) -> Float[Tensor, "T V"]:
        """Score the vocabulary, in at least float32."""
        ...


@dataclass(frozen=True, eq=False)
class Proposal:
    """What the stages say of a block behind each anchor; X rows per request, in their order."""

    anchors: Batch  # one token per request
    hidden: Float[Tensor, "rows D"]  # before the last norm, as the confidence head reads it
    base_logits: Float[Tensor, "rows V"]  # without the Markov bias; at least float32


@dataclass(frozen=True, eq=False)
class Blocks:
    """What the stages say of blocks of whole texts; X rows per anchor, in their order."""

    hidden: Float[Tensor, "rows D"]  # before the last norm
    expert_counts: dict[int, Int[Tensor, "2 E"]]  # by stage, counted behind the target's layers


@dataclass(frozen=True, eq=False)
class DraftedBlocks:
    """Drafted tokens and the very logits that they were chosen from."""

    tokens: Int[Tensor, "B X"]
    logits: Float[Tensor, "B X V"]  # base logits with the Markov bias, before any temperature
    confidence: Float[Tensor, "B X"]  # raw: its sigmoid is P(accepted | all before accepted)


def most_likely(logits: Float[Tensor, "B V"], step: int) -> Int[Tensor, " B"]:
    """Choose greedily; of equal logits the lowest token."""
    del step
    return logits.argmax(dim=-1)


class DraftStage(nn.Module):
    """One block of the drafter: attention and experts, each around an mHC site."""

    def __init__(
        self,
        config: ModelConfig,
        moe: MoeConfig,
        layer: int,
        numerics: NumericsConfig,
        **made: Unpack[Factory],
    ) -> None:
        super().__init__()
        dim, eps, mhc = config.hidden_size, config.norm_eps, config.mhc
        self.slot = Slot("window", layer)
        self.attn_mhc = SinglePassMHC(dim, mhc, eps, numerics, **made)
        self.attn_norm = RMSNorm(dim, eps, **made)
        self.attention = DraftAttention(config, numerics, **made)
        self.ffn_mhc = SinglePassMHC(dim, mhc, eps, numerics, **made)
        self.ffn_norm = RMSNorm(dim, eps, **made)
        self.moe = MixtureOfExperts(layer, dim, moe, numerics, **made)

    def forward(
        self, streams: Streams, context: Float[Tensor, "S C"], blocks: DraftBlocks
    ) -> Streams:
        """Advance the streams of every row of every block."""
        attend = partial(self.attention, context=context, blocks=blocks)
        streams = self.attn_mhc(streams, self.attn_norm.weight, attend)
        advanced: Streams = self.ffn_mhc(
            streams, self.ffn_norm.weight, partial(self.moe, ctx=blocks.ctx)
        )
        return advanced


class DSparkDrafter(nn.Module):
    """Three stages over one shared projection of the target's features, and two small heads.

    Embedding and head are the target's, which every call gets. Context KV of stage s lives in
    ``Slot("window", num_layers + s)`` of the same store as the target's, by absolute position.
    """

    def __init__(
        self,
        config: ModelConfig,
        dspark: DsparkConfig,
        numerics: NumericsConfig,
        **made: Unpack[Factory],
    ) -> None:
        super().__init__()
        dim = config.hidden_size
        self.config, self.dspark, self.numerics = config, dspark, numerics
        self.main_proj = QuantizedLinear(self.tap_width, dim, numerics, **made)
        self.main_norm = RMSNorm(dim, config.norm_eps, **made)
        moe = dspark.moe(config.moe)
        self.stages = nn.ModuleList(
            DraftStage(config, moe, config.num_layers + stage, numerics, **made)
            for stage in range(dspark.num_stages)
        )
        self.norm = RMSNorm(dim, config.norm_eps, **made)
        self.markov = MarkovHead(config.vocab_size, dspark.markov_rank, numerics, **made)
        self.confidence = Linear(dim + dspark.markov_rank, 1, numerics, **made)

    @property
    def block_size(self) -> int:
        """Rows of a block, always all of them: fewer would be another model."""
        return self.dspark.block_size

    @property
    def tap_width(self) -> int:
        """Numbers of a position's features: stream means of all tapped layers."""
        return len(self.dspark.target_layer_ids) * self.config.hidden_size

    @property
    def num_stages(self) -> int:
        """Layers behind the target's that have a window KV in its store."""
        return self.dspark.num_stages

    def write_context(
        self,
        taps: Float[Tensor, "rows width"],
        tap_batch: Batch,
        store: KVStore,
        stops: Sequence[int] | None = None,
    ) -> None:
        """Store context KV of committed positions, from ``Output.taps`` and its batch.

        ``stops`` are positions, one per request of the batch: rows from there on (drafts that
        were rejected) are left out; None commits all. Only rows that a later block can see, the
        last ``window_size`` of each request, are computed and written.
        """
        stops = tap_batch.stops if stops is None else stops
        firsts = [stop - self.config.attention.window_size for stop in stops]
        kept, rows = tap_batch.part(firsts, stops)
        if not len(rows):
            return
        self._write(taps[rows], self._context(kept, store))

    def write_rows(self, taps: Float[Tensor, "R width"], state: DecodeState) -> None:
        """Store context KV of committed positions where ``state`` says, waiting for nothing."""
        self._write(taps, self._decode_context(state))

    def _write(self, taps: Float[Tensor, "rows width"], ctx: ForwardContext) -> None:
        main_x = self.main_features(taps)
        for stage in self.all_stages():
            ctx.write_window(stage.slot, stage.attention.context(main_x, ctx.rope(0)))

    def propose(self, target: Target, anchors: Batch, store: KVStore) -> Proposal:
        """Run the stages on a whole block behind each anchor.

        ``anchors`` holds one token per request, at the position where the target will run it next:
        the same batch without drafts. Blocks read the context KV right before it and write none.
        """
        assert set(anchors.counts) <= {1}, f"counts {anchors.counts}, give one anchor per request"
        window = self.config.attention.window_size
        ask = (anchors.requests, anchors.starts)
        past = [min(n, window) for n in store.rows_before(self.all_stages()[0].slot, *ask)]
        spans = [(r, p - n, p) for r, p, n in zip(*ask, past, strict=True) if n]
        table = torch.tensor([[0, *accumulate(past)][:-1], past], device=anchors.device)
        blocks = self._blocks(
            anchors.token_ids,
            anchors.starts,
            Window(table[0], table[1], widest=self._widest(past), total=sum(past)),
        )
        width = self.config.attention.head_dim
        contexts = [
            store.read(stage.slot, Spans.of(spans))
            if spans
            else self.norm.weight.new_empty(0, width)
            for stage in self.all_stages()
        ]
        hidden = self._run(target, blocks, contexts)
        return Proposal(anchors, hidden, self.base_logits(target, hidden))

    def propose_rows(self, target: Target, state: DecodeState) -> Proposal:
        """The same behind one anchor per row of ``state``, waiting for nothing.

        Rings must hold the context KV of all positions that the blocks read.
        """
        size, window, count = self.block_size, self.config.attention.window_size, len(state.places)
        counts = state.positions.clamp(max=window)
        ahead, behind = (torch.arange(n, device=counts.device) for n in (size, window))
        near = (state.positions - counts)[:, None] + behind
        contexts = []
        for stage in self.all_stages():
            ring = state.rings[stage.slot]
            rows = state.places[:, None] * ring.size + near % ring.size
            contexts.append(ring.unpack(ring.rows[rows.flatten()]))
        firsts = window * torch.arange(count, device=counts.device)
        ctx = self._decode_context(
            replace(
                state,
                token_ids=self._block_ids(state.token_ids),
                positions=(state.positions[:, None] + ahead).flatten(),
                places=state.places.repeat_interleave(size),
            )
        )
        seen = Window(firsts, counts, widest=window, total=count * window)
        hidden = self._run(target, DraftBlocks(ctx, seen, size), contexts)
        anchors = Batch(state.token_ids, tuple(range(count)), (0,) * count, (1,) * count)
        return Proposal(anchors, hidden, self.base_logits(target, hidden))

    def draft(self, proposal: Proposal, choose: Choose = most_likely) -> DraftedBlocks:
        """Choose the tokens of every block one after the other.

        ``choose`` gets the logits [B, V] of a step and its number from 0 and returns a token per
        request. A confidence depends on the tokens before its own alone.
        """
        size = self.block_size
        base = proposal.base_logits.unflatten(0, (-1, size))
        hidden = proposal.hidden.unflatten(0, (-1, size))
        previous = proposal.anchors.token_ids
        steps = []
        for step in range(size):
            features = self.markov.features(previous)
            logits = base[:, step] + self.markov(features)
            confidence = self.confidence_logits(hidden[:, step], features)
            previous = choose(logits, step)
            steps.append((previous, logits, confidence))
        tokens, logits, confidence = (torch.stack(part, dim=1) for part in zip(*steps, strict=True))
        return DraftedBlocks(tokens, logits, confidence)

    def forward(
        self,
        target: Target,
        taps: Float[Tensor, "T width"],
        batch: Batch,
        anchor_rows: Int[Tensor, " B"],
    ) -> Blocks:
        """Run blocks behind many anchors of whole texts at once, for training.

        ``anchor_rows`` are rows of ``batch``, whose requests start at 0. Each block sees what it
        would see alone, where ``propose`` drafts behind its anchor: nothing of other blocks, and
        no feature at or behind its anchor.
        """
        ctx = self._context(batch)
        main_x = self.main_features(taps)
        starts = batch.positions[anchor_rows]
        counts = starts.clamp(max=self.config.attention.window_size)
        widest = self._widest(counts.tolist())
        window = Window(anchor_rows - counts, counts, widest=widest, total=len(taps))
        blocks = self._blocks(batch.token_ids[anchor_rows], tuple(starts.tolist()), window)
        contexts = [s.attention.context(main_x, ctx.rope(0)).rounded for s in self.all_stages()]
        hidden = self._run(target, blocks, contexts)
        return Blocks(hidden, blocks.ctx.expert_counts)

    def main_features(self, taps: Float[Tensor, "rows width"]) -> Float[Tensor, "rows D"]:
        """Project and normalise the target's features, once for all stages."""
        features: Tensor = self.main_norm(self.main_proj(taps))
        return features

    def base_logits(self, target: Target, hidden: Float[Tensor, "rows D"]) -> Tensor:
        """Score the vocabulary with the target's head: [rows, V], without the Markov bias."""
        return target.logits(self.norm(hidden))

    def confidence_logits(
        self, hidden: Float[Tensor, "... D"], features: Float[Tensor, "... rank"]
    ) -> Float[Tensor, "..."]:
        """Raw confidence of a token that is not chosen yet, in at least float32."""
        logits: Tensor = self.confidence(torch.cat([widened(hidden), features], dim=-1))
        return logits[..., 0]

    def _run(
        self, target: Target, blocks: DraftBlocks, contexts: Sequence[Tensor]
    ) -> Float[Tensor, "rows D"]:
        """Streams of all rows through all stages, folded by the last input mix."""
        streams = target.first_streams(blocks.ctx.batch, blocks.ctx)
        for stage, context in zip(self.all_stages(), contexts, strict=True):
            streams = stage(streams, context, blocks)
        x, a, _ = streams.settled(self.numerics.deterministic)
        return ops.mix_streams(x, a)

    def _blocks(
        self, anchors: Int[Tensor, " B"], starts: tuple[int, ...], window: Window
    ) -> DraftBlocks:
        """Rows [anchor, noise, noise, ...] at positions P, P + 1, ... of each anchor."""
        size, count = self.block_size, len(anchors)
        ids = self._block_ids(anchors)
        batch = Batch(ids, tuple(range(count)), starts, (size,) * count)
        return DraftBlocks(self._context(batch), window, size)

    def _block_ids(self, anchors: Int[Tensor, " B"]) -> Int[Tensor, " rows"]:
        """[anchor, noise, noise, ...] of each block."""
        ids = anchors.new_full((len(anchors), self.block_size), self.dspark.noise_token_id)
        ids[:, 0] = anchors
        return ids.flatten()

    def _widest(self, counts: Sequence[int]) -> int:
        """Columns for the rows of a window: the same in every batch where that must not matter."""
        is_fixed = self.numerics.deterministic
        return self.config.attention.window_size if is_fixed else max(counts, default=0)

    def _context(self, batch: Batch, store: KVStore | None = None) -> ForwardContext:
        deterministic = self.numerics.deterministic
        return ForwardContext(batch, self.config.attention, store, deterministic=deterministic)

    def _decode_context(self, state: DecodeState) -> DecodeContext:
        deterministic = self.numerics.deterministic
        return DecodeContext(state, self.config.attention, deterministic=deterministic)

    def all_stages(self) -> list[DraftStage]:
        """The stages, in order."""
        return [stage for stage in self.stages if isinstance(stage, DraftStage)]
