"""A dense cache: the reference that any other cache is compared with. Report §2.2.

It keeps what a paged cache would drop (window KV behind the window, projections of finished
groups), which is why it can be truncated to any position exactly.
"""

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from openv41.errors import InputError
from openv41.layers.store import Slot, Spans

FIRST_CAPACITY = 64
ENTRY_KINDS = ("main", "index")


class DenseStore:
    """A KVStore of growable tensors. ``ratios`` gives the compression ratio of each layer."""

    def __init__(self, ratios: tuple[int, ...], *, poison: bool = False) -> None:
        self._ratios = ratios
        self._poison = poison
        self._rows: dict[int, dict[Slot, Tensor]] = {}
        self._bounds: dict[int, dict[Slot, tuple[int, int]]] = {}  # first and last row + 1

    def write(
        self,
        slot: Slot,
        spans: Spans,
        rows: Shaped[Tensor, "rows ..."],
        unrounded: Shaped[Tensor, "rows ..."],
    ) -> None:
        """Set rows; entries and token ids may leave no gap, windows and the like begin anew."""
        assert rows.shape == unrounded.shape, f"{slot}: {rows.shape} and {unrounded.shape}"
        rows = rows.detach()
        parts = [rows] if len(spans.requests) == 1 else rows.split(spans.counts)
        for request, first, stop, part in zip(
            spans.requests, spans.firsts, spans.stops, parts, strict=True
        ):
            self._write(request, slot, first, stop, part)

    def place(self, slot: Slot, spans: Spans) -> None:
        """Nothing is packed here."""

    def packed_rows(self, slot: Slot, requests: tuple[int, ...]) -> None:
        """Rows are numbers here."""
        return

    def read(self, slot: Slot, spans: Spans) -> Shaped[Tensor, "rows ..."]:
        """Get rows; a view where only one request is asked for."""
        parts = [
            self._read(request, slot, first, stop)
            for request, first, stop in zip(spans.requests, spans.firsts, spans.stops, strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def pick(self, slot: Slot, spans: Spans, rows: Int[Tensor, " n"]) -> Float[Tensor, "n columns"]:
        """Get some rows of what ``read`` would give."""
        return self.read(slot, spans)[rows]

    def rows_before(
        self, slot: Slot, requests: tuple[int, ...], starts: tuple[int, ...]
    ) -> tuple[int, ...]:
        """How many rows right before ``starts`` each request has."""
        bounds = [self._bounds.get(r, {}).get(slot, (0, 0)) for r in requests]
        return tuple(
            start - first if first <= start <= stop else 0
            for start, (first, stop) in zip(starts, bounds, strict=True)
        )

    def truncate(self, request: int, position: int) -> None:
        """Forget everything that positions >= ``position`` wrote; exact at any position."""
        if not 0 <= position <= self.length(request):
            raise InputError(
                f"request {request} has {self.length(request)} positions; cannot truncate it to "
                f"{position}"
            )
        for slot, (first, stop) in self._bounds.get(request, {}).items():
            ratio = self._ratios[slot.layer] if slot.kind in ENTRY_KINDS else 1
            kept = min(stop, position // ratio)
            self._bounds[request][slot] = (min(first, kept), kept)

    def length(self, request: int) -> int:
        """Positions written so far."""
        return self._bounds.get(request, {}).get(Slot("tokens", -1), (0, 0))[1]

    def drop(self, request: int) -> None:
        """Forget a request."""
        self._rows.pop(request, None)
        self._bounds.pop(request, None)

    def _write(self, request: int, slot: Slot, first: int, stop: int, rows: Tensor) -> None:
        bounds = self._bounds.setdefault(request, {})
        begin, end = bounds.get(slot, (0, 0))
        if first > end:
            has_gap = slot.kind in (*ENTRY_KINDS, "tokens")
            assert not has_gap, f"{slot} of {request}: row {first} leaves a gap"
            begin = first
        buffer = self._buffer(request, slot, stop, rows)
        buffer[first:stop] = rows
        bounds[slot] = (min(begin, first), stop)
        if self._poison and buffer.is_floating_point():
            buffer[stop:] = torch.nan

    def _read(self, request: int, slot: Slot, first: int, stop: int) -> Tensor:
        begin, end = self._bounds[request][slot]
        assert begin <= first and stop <= end, (  # noqa: PT018 -- one range
            f"{slot} of {request}: rows {first} to {stop} asked, {begin} to {end} are there"
        )
        return self._rows[request][slot][first:stop]

    def _buffer(self, request: int, slot: Slot, rows_needed: int, like: Tensor) -> Tensor:
        """The slot's tensor, doubled until it has the rows."""
        slots = self._rows.setdefault(request, {})
        old = slots.get(slot)
        if old is not None and len(old) >= rows_needed:
            return old
        capacity = max(FIRST_CAPACITY, 0 if old is None else len(old))
        while capacity < rows_needed:
            capacity *= 2
        new = like.new_zeros(capacity, *like.shape[1:])
        if self._poison and new.is_floating_point():
            new.fill_(torch.nan)
        if old is not None:
            new[: len(old)] = old
        slots[slot] = new
        return new
