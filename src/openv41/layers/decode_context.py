"""The context of a decode step: rows that say themselves where they stand. Report §2.2, §2.3.1.

What a step reads and writes is addressed on the device, from positions and page tables that lie
there. Sizes are those of the tables, so that a step can be captured once and replayed: nothing that
the host does depends on what the tables hold. A request has one row, or one for its newest token
and one for each draft behind it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Complex, Float, Int, Shaped
from torch import Tensor

from openv41 import ops
from openv41.config import AttentionConfig
from openv41.layers.batch import Batch
from openv41.layers.context import ForwardContext, Selection
from openv41.layers.geometry import Entries, Segment
from openv41.layers.latents import Latents
from openv41.layers.store import PackedRows, Place, Slot, Spans
from openv41.ops.cache_writers import Format


@dataclass(frozen=True, eq=False)
class StoredRows:
    """All rows of one slot: rings of ``size`` rows, or pages of ``size`` entries."""

    rows: Shaped[Tensor, "all columns"]
    size: int
    form: Format | None  # None: numbers, not packed
    unpack: Callable[[Tensor], Tensor]  # numbers of such rows


@dataclass(frozen=True, eq=False)
class DecodeState:
    """A step of R rows, and where all state is; the last row may be repeated.

    Rows of a request follow each other by position. Position p of a request is row p mod size of
    its place in a ring, entry j row j mod size of its page j // size. Behind the pages of a request
    its rows of the table hold any page.
    """

    token_ids: Int[Tensor, " R"]
    positions: Int[Tensor, " R"]  # of these tokens
    places: Int[Tensor, " R"]  # in the rings
    table: Int[Tensor, "R pages"]
    page_size: int  # positions of a page
    rings: Mapping[Slot, StoredRows]
    pages: Mapping[Slot, StoredRows]
    frequencies: Mapping[bool, Float[Tensor, " pairs"]]  # of layers without and with main KV


@dataclass(frozen=True, eq=False, kw_only=True)
class DecodeBatch(Batch):
    """Rows whose positions are known on the device alone; to others each is a request."""

    at: Int[Tensor, " T"]

    @cached_property
    def positions(self) -> Int[Tensor, " T"]:
        """Absolute position of each token in its request."""
        return self.at


class DecodeContext(ForwardContext):
    """Reads rows where they are stored, by address; writes before it reads.

    The entry of a group that is not complete is written too: nobody sees it, and it is written
    again when the group is complete. Where a later row of the step completes it, both write that.
    """

    has_fixed_sizes = True
    counts_loads = False

    def __init__(
        self, state: DecodeState, attention: AttentionConfig, *, deterministic: bool = False
    ) -> None:
        rows = len(state.token_ids)
        batch = DecodeBatch(
            state.token_ids, tuple(range(rows)), (0,) * rows, (1,) * rows, at=state.positions
        )
        super().__init__(batch, attention, deterministic=deterministic)
        self._state = state
        self._frequencies.update(state.frequencies)
        self._numbers = torch.arange(rows, device=batch.device)
        self._in_rings: dict[tuple[int, int], Tensor] = {}  # by reach and size
        self._own: dict[int, Tensor] = {}  # by size
        self._newest: dict[int, Tensor] = {}  # by entries of a page
        self._heads: dict[tuple[bool, int], tuple[Tensor, Tensor]] = {}  # with main KV, and heads

    def entries(self, ratio: int) -> Entries:
        """As many entries of each request as its row of the table has places for."""
        if ratio not in self._entries:
            num, width = len(self._numbers), self._width(ratio)
            positions, is_whole = self.batch.positions, ratio == 1
            self._entries[ratio] = Entries(
                ratio=ratio,
                spans=Spans(self.batch.requests, (0,) * num, (width,) * num),
                stored=(width,) * num,
                totals=(width,) * num,
                visible=positions + 1 if is_whole else (positions + 1) // ratio,
                first_rows=self._numbers * width,
                new_positions=positions if is_whole else positions // ratio * ratio,
                member_rows=self._members(ratio),
            )
        return self._entries[ratio]

    def _members(self, ratio: int) -> Int[Tensor, "T ratio"]:
        """Rows of [pending rows, rows] that make each token's entry."""
        num, positions = len(self._numbers), self.batch.positions
        if ratio == 1:
            return self._numbers[:, None] + num
        last = self._numbers + self._is_continued * (positions % ratio == 0)
        return last[:, None] + num * torch.arange(2 - ratio, 2, device=positions.device)

    def rope(self, ratio: int, *, of_entries: bool = False) -> Complex[Tensor, "T pairs"]:
        """As of any forward; the entry of one token stands where the token does."""
        return super().rope(ratio, of_entries=of_entries and ratio > 1)

    def head_rows(
        self, ratio: int, heads: int
    ) -> tuple[Complex[Tensor, "rows pairs"], Int[Tensor, " rows"]]:
        """The same for all layers."""
        key = ratio > 0, heads
        if key not in self._heads:
            self._heads[key] = super().head_rows(ratio, heads)
        return self._heads[key]

    @cached_property
    def _is_continued(self) -> Bool[Tensor, " T"]:
        """Whether the next row is the next position of the same request."""
        places, positions = self._state.places, self.batch.positions
        follows = (places[1:] == places[:-1]) & (positions[1:] == positions[:-1] + 1)
        return torch.nn.functional.pad(follows, (0, 1))

    def segments(self, ratio: int) -> list[Segment]:
        """All rows at once; where their entries are only the table says."""
        if ratio not in self._segments:
            own = self._numbers[:, None]
            nowhere = own.expand(-1, self._width(ratio))
            self._segments[ratio] = [Segment(self.batch.requests, own, nowhere, nowhere >= 0)]
        return self._segments[ratio]

    def window(self, slot: Slot, latents: Latents) -> tuple[Shaped[Tensor, "S columns"], ops.Keys]:
        """Write a row per token; return the whole ring and what each token sees of it."""
        ring, reach = self._state.rings[slot], self._attention.window_size
        rows = self._ring_rows(reach, ring.size)
        self.write_window(slot, latents)
        key = (ring.size,), None
        if key not in self._windows:
            self._windows[key] = ops.plan_keys(rows, deterministic=self.deterministic)
        return ring.rows, self._windows[key]

    def write_window(self, slot: Slot, latents: Latents) -> None:
        """Write a row per token that this batch does not read."""
        ring = self._state.rings[slot]
        self._write(ring, self._own_rows(ring.size), latents)

    def no_main(self, window: Tensor) -> tuple[Shaped[Tensor, "M columns"], ops.Keys]:
        """No row of a store whose rows are packed as those of main KV."""
        found = [pages.rows for slot, pages in self._state.pages.items() if slot.kind == "main"]
        return found[0] if found else window, self.no_keys

    def look_back(self, slot: Slot, new: Tensor, reach: int) -> Int[Tensor, "T reach"]:
        """Write a number per token; return those of the last ``reach`` positions, or -1."""
        ring = self._state.rings[slot]
        rows = self._ring_rows(reach, ring.size).flip(1)  # newest first
        ring.rows[self._own_rows(ring.size)] = new
        return torch.where(rows < 0, -1, ring.rows[rows])

    def with_pending(self, slot: Slot, new: Float[Tensor, "T C"]) -> Float[Tensor, "rows C"]:
        """Put the projections of the positions before in front of the new ones."""
        ring = self._state.rings[slot]
        rows = self._ring_rows(2, ring.size)[:, 0]
        ring.rows[self._own_rows(ring.size)] = new.to(ring.rows.dtype)
        pending = ring.rows[rows].to(new.dtype)
        return torch.cat([pending, new])

    def publish_entries(self, slot: Slot, ratio: int, latents: Latents) -> None:
        """Write the entry of each token's group."""
        pages = self._state.pages[slot]
        if pages.size not in self._newest:
            newest = self.batch.positions if ratio == 1 else self.batch.positions // ratio
            self._newest[pages.size] = self._addresses(newest[:, None], pages.size)[:, 0]
        self._write(pages, self._newest[pages.size], latents)

    def packed_rows(self, slot: Slot) -> PackedRows | None:
        """Packed entries of the batch's requests; None where they are numbers."""
        pages = self._state.pages[slot]
        if pages.form is None:
            return None
        return PackedRows(pages.rows, self._state.table, pages.size)

    def segment_rows(
        self, slot: Slot, ratio: int, segment: Segment
    ) -> Float[Tensor, "B M columns"]:
        """Entries of each request, and what lies behind them."""
        pages = self._state.pages[slot]
        stored = pages.rows.unflatten(0, (-1, pages.size))[self._state.table]
        return pages.unpack(stored.flatten(1, 2))

    def entry_rows(self, slot: Slot, ratio: int) -> Float[Tensor, "M C"]:
        """The same, request by request."""
        if slot not in self._all_rows:
            [segment] = self.segments(ratio)
            self._all_rows[slot] = self.segment_rows(slot, ratio, segment).flatten(0, 1)
        return self._all_rows[slot]

    def publish_selection(self, source: int, main: Slot, ratio: int, selected: Tensor) -> None:
        """Share where the chosen entries lie."""
        pages = self._state.pages[main]
        rows = self._addresses(selected, pages.size)
        self.selections[source] = Selection(pages.rows, rows, self.deterministic, rows.numel())

    def _width(self, ratio: int) -> int:
        """Entries of a row of the table."""
        return self._state.table.shape[1] * (self._state.page_size // ratio)

    def _ring_rows(self, reach: int, size: int) -> Int[Tensor, "T reach"]:
        """Rows of the last ``reach`` positions of each token, oldest first, or -1."""
        if (reach, size) not in self._in_rings:
            steps = torch.arange(1 - reach, 1, device=self.batch.device)
            positions = self.batch.positions[:, None] + steps
            rows = self._state.places[:, None] * size + positions % size
            self._in_rings[reach, size] = torch.where(positions < 0, -1, rows)
            self._own.setdefault(size, rows[:, -1].contiguous())
        return self._in_rings[reach, size]

    def _own_rows(self, size: int) -> Int[Tensor, " T"]:
        """Row of each token."""
        if size not in self._own:
            self._own[size] = self._state.places * size + self.batch.positions % size
        return self._own[size]

    def pool_entries(self, places: Int[Tensor, "T K"], size: int) -> Int[Tensor, "T K"]:
        """Entries of places among each token's candidates; -1 stays."""
        return self._looked_up(self._pools, places, size)

    @cached_property
    def _pools(self) -> Int[Tensor, "T blocks"]:
        assert self.candidates is not None, "no pool was published"
        return torch.nn.functional.pad(self.candidates, (0, 1), value=-1)

    @cached_property
    def _table(self) -> Int[Tensor, "R pages"]:
        return torch.nn.functional.pad(self._state.table, (0, 1), value=-1)

    def _addresses(self, entries: Int[Tensor, "T n"], size: int) -> Int[Tensor, "T n"]:
        """Rows of entries in pages of ``size``; -1 stays."""
        return self._looked_up(self._table, entries, size)

    def _looked_up(
        self, parts: Int[Tensor, "T parts"], numbers: Int[Tensor, "T n"], size: int
    ) -> Int[Tensor, "T n"]:
        """``part * size + within`` of numbers that are in parts of ``size``.

        -1 is the last number of part -1, whose -1 is the last column: it stays without a mask.
        """
        found = parts[self._numbers[:, None], numbers // size]
        return torch.add(numbers % size, found, alpha=size)

    def _write(self, stored: StoredRows, rows: Int[Tensor, " T"], latents: Latents) -> None:
        if stored.form is None:
            stored.rows[rows] = latents.rounded.to(stored.rows.dtype)
        else:
            latents.pack_into(Place(stored.rows, rows, stored.form))
