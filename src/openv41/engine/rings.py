"""State of the last positions of each request: window KV, pending projections, token ids.

Position p lives in place p mod size of the request's ring. Report §2.3.1.
"""

from dataclasses import dataclass, field
from functools import cached_property

import torch
from jaxtyping import Int64, Shaped
from torch import Tensor

from openv41.layers.store import Slot, Spans
from openv41.model.cache_formats import RowFormat


@dataclass(slots=True)
class RingBounds:
    """Rows of one request in one ring: ``first`` to ``stop`` - 1 are valid."""

    first: int = 0
    stop: int = 0
    high: int = 0  # behind the last row that was ever written: older ones are overwritten

    def write(self, first: int, stop: int, size: int) -> None:
        """Note that rows were written."""
        if not self.first <= first <= self.stop:
            self.first, self.high = first, stop
        self.high = max(self.high, stop)
        self.first, self.stop = max(self.first, self.high - size), stop

    def cut(self, position: int) -> None:
        """Forget rows from a position on; those older than they were are gone all the same."""
        self.stop = min(self.stop, position)
        self.first = min(self.first, self.stop)

    def rows_before(self, start: int) -> int:
        """Valid rows right before ``start``."""
        return start - self.first if self.first <= start <= self.stop else 0


@dataclass(slots=True)
class Ahead:
    """Positions that steps have written in every layer, and that not every ring's bounds say."""

    first: int
    stop: int
    high: int  # behind the last one ever written

    def write(self, start: int, stop: int) -> None:
        """Note that the next positions were written."""
        assert start == self.stop, f"steps go on at {self.stop}, not at {start}"
        self.stop, self.high = stop, max(self.high, stop)

    def settle(self, bounds: RingBounds, size: int) -> None:
        """Let the bounds of a ring say so."""
        bounds.write(self.first, self.high, size)
        bounds.cut(self.stop)


@dataclass
class Ring:
    """One slot's rings, one per place; a request holds one place in all rings."""

    rows: Shaped[Tensor, "all ..."]  # of all places, ``size`` each
    size: int
    stored: RowFormat | None  # None: token ids
    bounds: dict[int, RingBounds] = field(default_factory=dict)  # by place

    def write(
        self,
        places: tuple[int, ...],
        spans: Spans,
        addresses: "Addresses",
        rows: Shaped[Tensor, "rows ..."],
    ) -> None:
        """Keep the last rows of each span."""
        kept = rows if addresses.kept is None else rows[addresses.kept]
        self.rows[addresses.rows] = kept if self.stored is None else self.stored.pack(kept)
        self.note(places, spans)

    def note(self, places: tuple[int, ...], spans: Spans) -> None:
        """Count the rows of these spans as written."""
        for place, first, stop in zip(places, spans.firsts, spans.stops, strict=True):
            if stop > first:
                self.bounds.setdefault(place, RingBounds()).write(first, stop, self.size)

    def read(self, addresses: "Addresses", dtype: torch.dtype) -> Shaped[Tensor, "rows ..."]:
        """Get the rows at these addresses."""
        found = self.rows[addresses.rows]
        return found if self.stored is None else self.stored.unpack(found, dtype)


@dataclass(frozen=True, eq=False)
class Addresses:
    """Where the rows of some spans lie in a ring; ``kept`` selects them if not all fit."""

    rows: Int64[Tensor, " rows"]
    kept: Int64[Tensor, " rows"] | None
    count: int  # rows of the spans

    @cached_property
    def of_all(self) -> Int64[Tensor, " count"]:
        """Where each row of the spans lies; -1 if it is not kept."""
        if self.kept is None:
            return self.rows
        return self.rows.new_full((self.count,), -1).index_copy(0, self.kept, self.rows)


def ring_addresses(
    places: tuple[int, ...], spans: Spans, size: int, device: torch.device
) -> Addresses:
    """Address the last ``size`` rows of each span."""
    parts, kept, taken, is_cut = [], [], 0, False
    for place, first, stop in zip(places, spans.firsts, spans.stops, strict=True):
        begin = max(first, stop - size)
        parts.append(torch.arange(begin, stop) % size + place * size)
        kept.append(torch.arange(begin, stop) - first + taken)
        is_cut |= begin > first
        taken += stop - first
    rows = torch.cat(parts).to(device)
    return Addresses(rows, torch.cat(kept).to(device) if is_cut else None, taken)


def ring_slots(layers: int, pending: tuple[int, ...]) -> list[Slot]:
    """Every slot that a ring holds."""
    windows = [Slot("window", layer) for layer in range(layers)]
    return [*windows, *(Slot("pending", layer) for layer in pending), Slot("tokens", -1)]
