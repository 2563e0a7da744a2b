"""What the layers of one forward share: positions, contexts, selections. Report §2.2, §2.3.1."""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from jaxtyping import Complex, Float, Int, Shaped
from torch import Tensor

from openv41 import ops
from openv41.config import AttentionConfig
from openv41.layers.batch import Batch
from openv41.layers.geometry import Entries, ReplayBounds, Segment, lookback_rows, segments
from openv41.layers.latents import Latents
from openv41.layers.objectives import LayerLosses
from openv41.layers.probe import Probe
from openv41.layers.store import KVStore, PackedRows, Place, Slot, Spans

PAIRS_AT_ONCE = 1 << 18  # query-entry pairs scored in one piece
PAIRS_ON_GPU = 1 << 25  # there a piece costs its launches, and the kernel has only scores


@dataclass
class Work:
    """What layers did, counted where they do it."""

    entries_scored: dict[int, int] = field(default_factory=dict)  # by index source
    entries_read: dict[int, int] = field(default_factory=dict)  # by layer that attends


@dataclass
class Selection:
    """Main-KV rows that queries read: all that are needed, and which of them each query lists."""

    kv: Shaped[Tensor, "M columns"]  # numbers; packed where a decode step reads them in a store
    rows: Int[Tensor, "T K"]  # -1 is none
    deterministic: bool
    read: int  # rows that are read

    @cached_property
    def keys(self) -> ops.Keys:
        """How to read the rows."""
        return ops.plan_keys(self.rows, deterministic=self.deterministic)


class Choices:
    """What layers chose in a forward whose layers run again for the gradient."""

    def __init__(self) -> None:
        self._made: dict[str, Tensor] = {}

    def once(self, name: str, choose: Callable[[], Tensor]) -> Tensor:
        """The choice of the first run, in every run."""
        if name not in self._made:
            self._made[name] = choose()
        return self._made[name]


class ForwardContext:
    """State of one forward over one batch.

    Without a store every request starts at position 0 and contexts are the batch's own rows, so
    gradients flow through them; with a store the same tables address stored and new rows.
    """

    has_fixed_sizes = False  # no size may depend on what is in a tensor
    counts_loads = True  # of experts

    def __init__(
        self,
        batch: Batch,
        attention: AttentionConfig,
        store: KVStore | None = None,
        probe: Probe | None = None,
        losses: LayerLosses | None = None,
        *,
        replay: ReplayBounds | None = None,
        deterministic: bool = False,
    ) -> None:
        assert replay is None or len(replay.floors) == len(batch.requests), (
            f"{len(replay.floors)} floors for {len(batch.requests)} requests"
        )
        self.batch = batch
        self.store = store
        self.losses = losses  # None where nobody asks for any
        self.replay = replay  # None where every row counts and every window is whole
        self.deterministic = deterministic
        self._attention = attention
        self._probe = probe
        self._entries: dict[int, Entries] = {}
        self._frequencies: dict[bool, Tensor] = {}
        self._ropes: dict[tuple[str, bool], Tensor] = {}
        self._segments: dict[int, list[Segment]] = {}
        self._windows: dict[tuple[tuple[int, ...], tuple[int, ...] | None], ops.Keys] = {}
        self._counted: dict[int, Tensor | None] = {}
        self._orders: dict[tuple[int, ...], Tensor] = {}
        self._all_rows: dict[Slot, Tensor] = {}  # of slots that somebody reads whole
        self.selections: dict[int, Selection] = {}  # by index source
        self.candidates: Int[Tensor, "T blocks"] | None = None  # block ids, ascending, then -1
        self.is_image: Tensor | None = None
        self.recent_ids: Int[Tensor, "T reach"] | None = None  # compressed, newest first
        self.engram_rows: dict[int, Int[Tensor, "T lookups"]] = {}  # by layer, where prefetched
        self.pad_id = 0  # compressed id of the padding token
        self.taps: list[tuple[Float[Tensor, "T D"], Batch]] = []  # stream means, for the drafter
        self.expert_counts: dict[int, Int[Tensor, "2 E"]] = {}  # by layer: text, image
        self.choices: Choices | None = None  # of layers that run twice
        self.work = Work()

    def part(self, batch: Batch, rows: Int[Tensor, " rows"]) -> "ForwardContext":
        """The context of some rows of this one, which ``batch`` describes."""
        made = ForwardContext(
            batch, self._attention, self.store, self._probe, deterministic=self.deterministic
        )
        made.pad_id, made.taps, made.work = self.pad_id, self.taps, self.work
        made.expert_counts = self.expert_counts
        for name in ("candidates", "is_image", "recent_ids"):
            if (value := getattr(self, name)) is not None:
                setattr(made, name, value[rows])
        for source, chosen in self.selections.items():
            made.selections[source] = replace(chosen, rows=chosen.rows[rows])
        return made

    def fork(self) -> "ForwardContext":
        """The same state, apart from then on; what layers add to one the other does not see."""
        made = copy(self)
        for name, value in vars(self).items():
            if isinstance(value, dict | list):
                setattr(made, name, copy(value))
        made.work = Work(dict(self.work.entries_scored), dict(self.work.entries_read))
        return made

    def observe(self, name: str, value: Tensor) -> Tensor:
        """Show a tensor to the probe, if there is one; go on with what it returns."""
        return value if self._probe is None else self._probe(name, value)

    def once(self, name: str, choose: Callable[[], Tensor]) -> Tensor:
        """Choose something without a gradient, or take the choice of the layer's first run."""
        return choose() if self.choices is None else self.choices.once(name, choose)

    def is_wanted(self, name: str) -> bool:
        """Whether the probe keeps or replaces this tensor, which the forward could do without."""
        return self._probe is not None and self._probe.wants_or_feeds(name)

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
            limit = PAIRS_ON_GPU if self.batch.device.type == "cuda" else PAIRS_AT_ONCE
            self._segments[ratio] = segments(self.batch, self.entries(ratio), limit)
        return self._segments[ratio]

    def rope(self, ratio: int, *, of_entries: bool = False) -> Complex[Tensor, "T pairs"]:
        """Rotation of each token, or of each new entry at its group's first position.

        Layers without main KV use the plain base, all others the compressed base with YaRN.
        """
        is_compressed = ratio > 0
        key = (f"ratio {ratio}" if of_entries else "tokens", is_compressed)
        if key not in self._ropes:
            of = self.entries(ratio).new_positions if of_entries else self.batch.positions
            if is_compressed not in self._frequencies:
                found = frequencies(self._attention, ratio)
                self._frequencies[is_compressed] = found.to(of.device)
            self._ropes[key] = ops.rope_table(of, self._frequencies[is_compressed])
        return self._ropes[key]

    def inverse_rope(self, ratio: int) -> Complex[Tensor, "T pairs"]:
        """What undoes the rotation of each token."""
        key = ("inverse", ratio > 0)
        if key not in self._ropes:
            self._ropes[key] = ops.inverse_table(self.rope(ratio))
        return self._ropes[key]

    def window(self, slot: Slot, latents: Latents) -> tuple[Shaped[Tensor, "S columns"], ops.Keys]:
        """Write a row per new token; return the window context and what each token sees of it."""
        reach = self._attention.window_size
        past = self._past(slot, reach)
        floors = None if self.replay is None else self.replay.window_floors(slot.layer)
        if (past, floors) not in self._windows:
            rows = lookback_rows(self.batch, reach, past, floors)
            planned = ops.plan_keys(rows, deterministic=self.deterministic)
            self._windows[past, floors] = planned
        name = f"layers.{slot.layer}.window_kv"
        known = self._with_past(slot, past, lambda: self._stored(slot, latents, name))
        return known, self._windows[past, floors]

    def write_window(self, slot: Slot, latents: Latents) -> None:
        """Write a row per new token that this batch does not read."""
        self._stored(slot, latents, f"layers.{slot.layer}.window_kv")

    def no_main(self, window: Tensor) -> tuple[Shaped[Tensor, "M columns"], ops.Keys]:
        """No row for any token: the main part of a layer without main KV, beside its window."""
        return window[:0], self.no_keys

    def counted_rows(self, layer: int) -> Int[Tensor, " rows"] | None:
        """Rows whose losses and loads count in a layer; None for all."""
        if self.replay is None:
            return None
        if layer not in self._counted:
            self._counted[layer] = self.replay.counted_rows(self.batch, layer)
        return self._counted[layer]

    def look_back(self, slot: Slot, new: Tensor, reach: int) -> Int[Tensor, "T reach"]:
        """Write a number per new token; return those of the last ``reach`` positions, or -1."""
        past = self._past(slot, reach)
        known = self._with_past(slot, past, lambda: self._kept(slot, new))
        none = torch.full_like(new[:1], -1) if len(new) else new.new_full((1,), -1)
        rows = lookback_rows(self.batch, reach, past).flip(1)  # newest first
        return torch.cat([known, none])[rows]  # row -1 is the last one

    def _past(self, slot: Slot, reach: int) -> tuple[int, ...]:
        """Rows before the new ones that tokens see, and that are there."""
        if self.store is None:
            assert not any(self.batch.starts), f"no store, but starts {self.batch.starts}"
            return (0,) * len(self.batch.requests)
        found = self.store.rows_before(slot, self.batch.requests, self.batch.starts)
        return tuple(min(rows, reach - 1) for rows in found)

    def _with_past(self, slot: Slot, past: tuple[int, ...], write: Callable[[], Tensor]) -> Tensor:
        """Write new rows; put the past ones, read before, in front of them, by request."""
        batch = self.batch
        if self.store is None or not any(past):
            return write()
        ranges = zip(batch.requests, batch.starts, past, strict=True)
        spans = Spans.of((r, start - rows, start) for r, start, rows in ranges if rows)
        known = self.store.read(slot, spans)
        new = write()
        both = torch.cat([known.to(new.dtype), new])
        return both if len(past) == 1 else both[self._order(past)]

    def _kept(self, slot: Slot, new: Tensor) -> Tensor:
        if self.store is not None:
            self.store.write(slot, self.batch.spans, new, new)
        return new

    def _stored(self, slot: Slot, latents: Latents, name: str) -> Float[Tensor, "T C"]:
        """Write rows of this batch's tokens; returns their values, shown under their name."""
        place = self._place(slot, self.batch.spans, latents)
        if place is not None:
            return self.observe(name, latents.pack_into(place))
        new = self.observe(name, latents.rounded)
        if self.store is not None:
            self.store.write(slot, self.batch.spans, new, latents.unrounded)
        return new

    def _place(self, slot: Slot, spans: Spans, latents: Latents) -> Place | None:
        """Where the rows go packed; None where they are stored or wanted as numbers."""
        if self.store is None or latents.want_gradient:
            return None
        return self.store.place(slot, spans)

    def _order(self, past: tuple[int, ...]) -> Int[Tensor, " S"]:
        """Sort [past rows, new rows] by request."""
        if past not in self._orders:
            requests = torch.arange(len(past))
            of = [requests.repeat_interleave(torch.tensor(n)) for n in (past, self.batch.counts)]
            self._orders[past] = torch.cat(of).sort(stable=True).indices.to(self.batch.device)
        return self._orders[past]

    def with_pending(self, slot: Slot, new: Float[Tensor, "T C"]) -> Float[Tensor, "rows C"]:
        """Put the projections of each request's previous position before the new ones.

        Only a request that stands in the middle of a group has one; others get zeros.
        """
        batch = self.batch
        pending = new.new_zeros(len(batch.requests), *new.shape[1:])
        if self.store is not None:
            odd = [row for row, start in enumerate(batch.starts) if start % 2]
            if odd:
                of = ((batch.requests[r], batch.starts[r] - 1, batch.starts[r]) for r in odd)
                pending[odd] = self.store.read(slot, Spans.of(of))
            self.store.write(slot, batch.spans, new, new)
        return torch.cat([pending, new])

    def pool_with_pending(
        self, slot: Slot, ratio: int, kv: Float[Tensor, "T C"], gate: Float[Tensor, "T C"]
    ) -> Float[Tensor, "M C"]:
        """Pool the groups that this batch completes, of which it may bring the last token alone."""
        rows = self.with_pending(slot, torch.cat([kv, gate], dim=-1))
        members = rows[self.entries(ratio).member_rows]  # [M, ratio, 2C]
        pairs, gates = members.chunk(2, dim=-1)
        return ops.pool_group(pairs, gates, deterministic=self.deterministic)

    def publish_entries(self, slot: Slot, ratio: int, latents: Latents) -> None:
        """Write a row per new entry and let layers read all entries of the slot."""
        name = f"layers.{slot.layer}.{'main_kv' if slot.kind == 'main' else 'index_k'}"
        if self.store is None:
            self._all_rows[slot] = self.observe(name, latents.rounded)
            return
        entries = self.entries(ratio)
        spans = Spans(self.batch.requests, entries.stored, entries.totals)
        place = self._place(slot, spans, latents)
        if place is None:
            self.store.write(slot, spans, latents.rounded, latents.unrounded)
        else:
            latents.pack_into(place)
        self._all_rows.pop(slot, None)
        if self.is_wanted(name):
            self._all_rows[slot] = self.observe(name, self.store.read(slot, entries.spans))

    def packed_rows(self, slot: Slot) -> PackedRows | None:
        """Packed entries of the batch's requests, in the store; None where there are none."""
        if self.store is None or slot in self._all_rows:
            return None
        return self.store.packed_rows(slot, self.batch.requests)

    def entry_rows(self, slot: Slot, ratio: int) -> Float[Tensor, "M C"]:
        """All entries of a slot, request by request."""
        if slot not in self._all_rows:
            assert self.store is not None, f"{slot} was not published"
            self._all_rows[slot] = self.store.read(slot, self.entries(ratio).spans)
        return self._all_rows[slot]

    def segment_rows(
        self, slot: Slot, ratio: int, segment: Segment
    ) -> Float[Tensor, "B M columns"]:
        """Entries of the requests of a segment."""
        return self.entry_rows(slot, ratio)[segment.entry_rows]

    def pick_entries(self, slot: Slot, ratio: int, rows: Int[Tensor, " n"]) -> Float[Tensor, "n C"]:
        """Some of ``entry_rows``, without reading the others where they come from a store."""
        if slot in self._all_rows or self.store is None:
            return self.entry_rows(slot, ratio)[rows]
        return self.store.pick(slot, self.entries(ratio).spans, rows)

    def publish_selection(self, source: int, main: Slot, ratio: int, selected: Tensor) -> None:
        """Share the entries (ids within a request, [T, K]) that an index source has chosen."""
        rows = selected.long()
        if len(self.batch.requests) > 1:
            first = self.entries(ratio).first_rows[:, None]
            rows = torch.where(rows < 0, -1, rows + first)
        if self.store is None or main in self._all_rows:
            kv = self.entry_rows(main, ratio)
        else:
            used, rows = compact(rows, sum(self.entries(ratio).totals))
            kv = self.pick_entries(main, ratio, used)
        self.selections[source] = Selection(kv, rows, self.deterministic, len(kv))


def compact(
    rows: Int[Tensor, "T K"], total: int
) -> tuple[Int[Tensor, " used"], Int[Tensor, "T K"]]:
    """List the rows that occur, and number ``rows`` by that list; -1 stays.

    Ascending, but for a single query, whose own list serves.
    """
    if rows.shape[0] == 1 and bool((rows >= 0).all()):
        return rows[0], torch.arange(rows.shape[1], device=rows.device)[None]
    if rows.numel() < total:
        used, places = rows.unique(return_inverse=True)
        none = int(used[:1].eq(-1).sum())  # -1 sorts first
        return used[none:], places - none
    marks = torch.zeros(total + 1, dtype=torch.bool, device=rows.device)
    marks[rows] = True  # -1 marks the last one
    places = marks.cumsum(0) - 1
    return marks[:-1].nonzero()[:, 0], torch.where(rows < 0, -1, places[rows])


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
