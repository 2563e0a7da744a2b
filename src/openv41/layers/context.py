"""What the layers of one forward share: positions, contexts, selections. Report §2.2, §2.3.1."""

from functools import cached_property

import torch
from jaxtyping import Bool, Complex, Float, Int
from torch import Tensor

from openv41 import ops
from openv41.config import AttentionConfig
from openv41.layers.batch import Batch
from openv41.layers.geometry import Entries, Segment, lookback_rows, segments
from openv41.layers.probe import Probe
from openv41.layers.store import KVStore, Slot

PAIRS_AT_ONCE = 1 << 18  # query-entry pairs scored in one piece


class ForwardContext:
    """State of one forward over one batch.

    Without a store every request starts at position 0 and contexts are the batch's own rows, so
    gradients flow through them; with a store the same tables address stored and new rows.
    """

    def __init__(
        self,
        batch: Batch,
        attention: AttentionConfig,
        store: KVStore | None = None,
        probe: Probe | None = None,
        *,
        deterministic: bool = False,
    ) -> None:
        assert store is not None or not any(batch.starts), f"no store, but starts {batch.starts}"
        self.batch = batch
        self.store = store
        self.deterministic = deterministic
        self._attention = attention
        self._probe = probe
        self._entries: dict[int, Entries] = {}
        self._ropes: dict[tuple[str, bool], Tensor] = {}
        self._segments: dict[int, list[Segment]] = {}
        self.main_kv: dict[int, Float[Tensor, "M C"]] = {}  # by kv source
        self.index_keys: dict[int, Float[Tensor, "M J"]] = {}  # by kv source
        self.main_keys: dict[int, ops.Keys] = {}  # by index source
        self.candidates: Bool[Tensor, "T M"] | None = None
        self.is_image: Bool[Tensor, " T"] | None = None
        self.recent_ids: Int[Tensor, "T reach"] | None = None  # compressed, newest first
        self.pad_id = 0  # compressed id of the padding token
        self.taps: list[Float[Tensor, "T D"]] = []  # stream means, inputs of the drafter
        self.expert_counts: dict[int, Int[Tensor, "2 E"]] = {}  # by layer: text, image

    def observe(self, name: str, value: Tensor) -> Tensor:
        """Show a tensor to the probe, if there is one; go on with what it returns."""
        return value if self._probe is None else self._probe(name, value)

    def is_wanted(self, name: str) -> bool:
        """Whether the probe keeps this tensor, which the forward could do without."""
        return self._probe is not None and self._probe.wants(name)

    @cached_property
    def window_keys(self) -> ops.Keys:
        """Rows of the window context that each token sees."""
        rows = lookback_rows(self.batch, self._attention.window_size)
        return ops.plan_keys(rows, deterministic=self.deterministic)

    @cached_property
    def no_keys(self) -> ops.Keys:
        """No row for any token: the main part of a layer without main KV."""
        return ops.plan_keys(self.batch.positions[:, None][:, :0])

    def entries(self, ratio: int) -> Entries:
        """Main-KV bookkeeping of a compression ratio."""
        if ratio not in self._entries:
            self._entries[ratio] = Entries.of(self.batch, ratio)
        return self._entries[ratio]

    def segments(self, ratio: int) -> list[Segment]:
        """Requests grouped for scoring."""
        if ratio not in self._segments:
            self._segments[ratio] = segments(self.batch, self.entries(ratio), PAIRS_AT_ONCE)
        return self._segments[ratio]

    def rope(self, ratio: int, *, of_entries: bool = False) -> Complex[Tensor, "T pairs"]:
        """Rotation of each token, or of each new entry at its group's first position.

        Layers without main KV use the plain base, all others the compressed base with YaRN.
        """
        key = (f"ratio {ratio}" if of_entries else "tokens", ratio > 0)
        if key not in self._ropes:
            of = self.entries(ratio).new_positions if of_entries else self.batch.positions
            table = ops.rope_table(of, frequencies(self._attention, ratio).to(of.device))
            self._ropes[key] = table
        return self._ropes[key]

    def extend(self, slot: Slot, new: Tensor, *, reach: int | None = None) -> Tensor:
        """Write a row per new token; return the context of the last ``reach`` positions each."""
        keep = [min(start, (reach or 1) - 1) for start in self.batch.starts]
        firsts = [start - k for start, k in zip(self.batch.starts, keep, strict=True)]
        return self._extend(slot, new, self.batch.starts, self.batch.stops, firsts)

    def extend_entries(self, slot: Slot, ratio: int, new: Tensor) -> Tensor:
        """Write a row per new entry; return the context of all entries."""
        entries = self.entries(ratio)
        return self._extend(slot, new, entries.stored, entries.totals, [0] * len(entries.totals))

    def _extend(
        self,
        slot: Slot,
        new: Tensor,
        starts: tuple[int, ...],
        stops: tuple[int, ...],
        firsts: list[int],
    ) -> Tensor:
        if self.store is None:
            return new
        parts, taken = [], 0
        for request, start, stop, first in zip(
            self.batch.requests, starts, stops, firsts, strict=True
        ):
            self.store.write(request, slot, start, new[taken : taken + stop - start])
            taken += stop - start
            parts.append(self.store.read(request, slot, first, stop))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def with_pending(self, slot: Slot, new: Float[Tensor, "T C"]) -> Float[Tensor, "rows C"]:
        """Put the projections of each request's previous position before the new ones.

        Only a request that stands in the middle of a group has one; others get zeros.
        """
        pending = new.new_zeros(len(self.batch.requests), *new.shape[1:])
        if self.store is not None:
            for row, request in enumerate(self.batch.requests):
                if (start := self.batch.starts[row]) % 2:
                    pending[row] = self.store.read(request, slot, start - 1, start)[0]
            self._extend(slot, new, self.batch.starts, self.batch.stops, list(self.batch.starts))
        return torch.cat([pending, new])

    def publish_selection(self, source: int, ratio: int, selected: Int[Tensor, "T K"]) -> None:
        """Share the entries (ids within a request) that an index source has chosen."""
        rows = torch.where(selected < 0, -1, selected + self.entries(ratio).first_rows[:, None])
        self.main_keys[source] = ops.plan_keys(rows, deterministic=self.deterministic)


def frequencies(attention: AttentionConfig, ratio: int) -> Float[Tensor, " pairs"]:
    """Rotary frequencies of a layer with this compression ratio."""
    if ratio == 0:
        return ops.rope_frequencies(attention.rope_dim, attention.rope_theta)
    yarn = attention.yarn
    return ops.yarn_frequencies(
        attention.rope_dim,
        attention.compress_rope_theta,
        factor=yarn.factor,
        beta_fast=yarn.beta_fast,
        beta_slow=yarn.beta_slow,
        original_max_position=yarn.original_max_position,
    )
