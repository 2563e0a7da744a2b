"""The dense reference store: every row of every position, in plain tensors. Report §2.2.

It keeps what a paged cache would drop (window KV behind the window, projections of finished
groups), which is why it can be truncated to any position exactly.
"""

import torch
from torch import Tensor

from openv41.errors import InputError
from openv41.layers.store import Slot

FIRST_CAPACITY = 64


class DenseStore:
    """A KVStore of growable tensors. ``ratios`` gives the compression ratio of each layer."""

    def __init__(self, ratios: tuple[int, ...], *, poison: bool = False) -> None:
        self._ratios = ratios
        self._poison = poison
        self._rows: dict[int, dict[Slot, Tensor]] = {}
        self._lengths: dict[int, dict[Slot, int]] = {}

    def write(self, request: int, slot: Slot, first: int, rows: Tensor) -> None:
        """Set rows from ``first`` on; rows behind the last one written become invalid."""
        lengths = self._lengths.setdefault(request, {})
        assert first <= lengths.get(slot, 0), f"{slot} of {request}: row {first} leaves a gap"
        stop = first + len(rows)
        buffer = self._buffer(request, slot, stop, rows)
        buffer[first:stop] = rows.detach()
        lengths[slot] = stop
        if self._poison and buffer.is_floating_point():
            buffer[stop:] = torch.nan

    def read(self, request: int, slot: Slot, first: int, stop: int) -> Tensor:
        """Get rows ``first`` to ``stop`` - 1 as a view."""
        length = self._lengths[request][slot]
        assert stop <= length, f"{slot} of {request}: rows up to {stop} asked, {length} written"
        return self._rows[request][slot][first:stop]

    def truncate(self, request: int, position: int) -> None:
        """Forget everything that positions >= ``position`` wrote; exact at any position."""
        if not 0 <= position <= self.length(request):
            raise InputError(
                f"request {request} has {self.length(request)} positions; cannot truncate it to "
                f"{position}"
            )
        for slot, length in self._lengths.get(request, {}).items():
            per_entry = slot.kind in ("main", "index")
            keep = position // self._ratios[slot.layer] if per_entry else position
            self._lengths[request][slot] = min(length, keep)

    def length(self, request: int) -> int:
        """Positions written so far."""
        return self._lengths.get(request, {}).get(Slot("tokens", -1), 0)

    def drop(self, request: int) -> None:
        """Forget a request."""
        self._rows.pop(request, None)
        self._lengths.pop(request, None)

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
