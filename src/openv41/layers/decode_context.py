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
from jaxtyping import Complex, Float, Int, Shaped
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
        self._in_rings: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # by reach and size
        self._newest: dict[int, Tensor] = {}  # by entries of a page

    def entries(self, ratio: int) -> Entries:
        """As many entries of each request as its row of the table has places for."""
        if ratio not in self._entries:
            num, width = len(self.batch.requests), self._width(ratio)
            groups = ops.group_rows(self._state.places, self.batch.positions, ratio, width)
            self._entries[ratio] = Entries(
                ratio=ratio,
                spans=Spans(self.batch.requests, (0,) * num, (width,) * num),
                stored=(width,) * num,
                totals=(width,) * num,
                visible=groups.visible,
                first_rows=groups.first_rows,
                new_positions=groups.first_positions,
                member_rows=groups.members,
            )
        return self._entries[ratio]

    def rope(self, ratio: int, *, of_entries: bool = False) -> Complex[Tensor, "T pairs"]:
        """As of any forward; the entry of one token stands where the token does."""
        return super().rope(ratio, of_entries=of_entries and ratio > 1)

    def segments(self, ratio: int) -> list[Segment]:
        """All rows at once; where their entries are only the table says."""
        if ratio not in self._segments:
            own = torch.arange(len(self.batch.requests), device=self.batch.device)[:, None]
            nowhere = own.expand(-1, self._width(ratio))
            self._segments[ratio] = [Segment(self.batch.requests, own, nowhere, nowhere >= 0)]
        return self._segments[ratio]

    def window(self, slot: Slot, latents: Latents) -> tuple[Shaped[Tensor, "S columns"], ops.Keys]:
        """Write a row per token; return the whole ring and what each token sees of it."""
        ring, reach = self._state.rings[slot], self._attention.window_size
        own, rows = self._ring_rows(reach, ring.size)
        self._write(ring, own, latents)
        key = (ring.size,), None
        if key not in self._windows:
            self._windows[key] = ops.plan_keys(rows, deterministic=self.deterministic)
        return ring.rows, self._windows[key]

    def write_window(self, slot: Slot, latents: Latents) -> None:
        """Write a row per token that this batch does not read."""
        ring = self._state.rings[slot]
        self._write(ring, self._ring_rows(1, ring.size)[0], latents)

    def no_main(self, window: Tensor) -> tuple[Shaped[Tensor, "M columns"], ops.Keys]:
        """No row of a store whose rows are packed as those of main KV."""
        found = [pages.rows for slot, pages in self._state.pages.items() if slot.kind == "main"]
        return found[0] if found else window, self.no_keys

    def look_back(self, slot: Slot, new: Tensor, reach: int) -> Int[Tensor, "T reach"]:
        """Write a number per token; return those of the last ``reach`` positions, or -1."""
        ring = self._state.rings[slot]
        own, rows = self._ring_rows(reach, ring.size)
        ring.rows[own] = new
        rows = rows.flip(1)  # newest first
        return torch.where(rows < 0, -1, ring.rows[rows])

    def pool_with_pending(
        self, slot: Slot, ratio: int, kv: Float[Tensor, "T C"], gate: Float[Tensor, "T C"]
    ) -> Float[Tensor, "T C"]:
        """Pool the group of each token."""
        ring = self._state.rings[slot]
        own, rows = self._ring_rows(2, ring.size)
        members = self.entries(ratio).member_rows
        return ops.pool_pending(kv, gate, ring.rows, own, rows[:, 0], members)

    def publish_entries(self, slot: Slot, ratio: int, latents: Latents) -> None:
        """Write the entry of each token's group."""
        pages = self._state.pages[slot]
        if pages.size not in self._newest:
            newest = (self.batch.positions // ratio)[:, None]
            self._newest[pages.size] = ops.page_rows(newest, self._state.table, pages.size)[:, 0]
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
        rows = ops.page_rows(selected, self._state.table, pages.size)
        self.selections[source] = Selection(pages.rows, rows, self.deterministic, rows.numel())

    def _width(self, ratio: int) -> int:
        """Entries of a row of the table."""
        return self._state.table.shape[1] * (self._state.page_size // ratio)

    def _ring_rows(self, reach: int, size: int) -> tuple[Int[Tensor, " T"], Int[Tensor, "T reach"]]:
        """Row of each token; rows of its last ``reach`` positions, oldest first, or -1."""
        if (reach, size) not in self._in_rings:
            rows = ops.ring_rows(self._state.places, self.batch.positions, reach, size)
            self._in_rings[reach, size] = rows
        return self._in_rings[reach, size]

    def _write(self, stored: StoredRows, rows: Int[Tensor, " T"], latents: Latents) -> None:
        if stored.form is None:
            stored.rows[rows] = latents.rounded.to(stored.rows.dtype)
        else:
            latents.pack_into(Place(stored.rows, rows, stored.form))
