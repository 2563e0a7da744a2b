"""The protocol of every cache. Report §2.2, §2.3.1."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from jaxtyping import Float, Int, Shaped, UInt8
from torch import Tensor

from openv41.ops.cache_writers import Format


class Slot(NamedTuple):
    """A kind of state and the layer that owns it.

    ``window`` (window KV) and ``pending`` (compressor projections of one token) hold a row per
    position; ``main`` (main KV) and ``index`` (index keys) a row per entry; ``tokens`` the token
    ids, -1 at image positions, with layer -1.
    """

    kind: str
    layer: int


@dataclass(frozen=True, slots=True)
class Spans:
    """Rows ``firsts`` to ``stops`` - 1 of each request."""

    requests: tuple[int, ...]
    firsts: tuple[int, ...]
    stops: tuple[int, ...]

    @classmethod
    def of(cls, ranges: Iterable[tuple[int, int, int]]) -> "Spans":
        """Make spans of (request, first, stop)."""
        requests, firsts, stops = zip(*ranges, strict=True)
        return cls(requests, firsts, stops)

    @property
    def counts(self) -> tuple[int, ...]:
        """Rows of each request."""
        return tuple(b - a for a, b in zip(self.firsts, self.stops, strict=True))

    @property
    def total(self) -> int:
        """Rows of all requests."""
        return sum(self.stops) - sum(self.firsts)


@dataclass(frozen=True, eq=False)
class Place:
    """Where the packed rows of some spans go; a row of -1 is not kept."""

    stored: UInt8[Tensor, "S columns"]
    rows: Int[Tensor, " T"]
    form: Format


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Entries as they lie in a store: entry j of a request is at row j of its pages."""

    stored: UInt8[Tensor, "S columns"]
    table: Int[Tensor, "B pages"]  # of each request; behind its last page is anything
    per_page: int


@runtime_checkable
class KVStore(Protocol):
    """State of requests, addressed by absolute row: never "the last", so rollback is no case."""

    def write(
        self,
        slot: Slot,
        spans: Spans,
        rows: Shaped[Tensor, "rows ..."],
        unrounded: Shaped[Tensor, "rows ..."],
    ) -> None:
        """Set rows, packed request by request; rows behind them become invalid.

        ``rows`` are the values that ``read`` gives back. A store that packs makes its codes from
        ``unrounded``, whose rounded values they are.
        """
        ...

    def place(self, slot: Slot, spans: Spans) -> Place | None:
        """Say where packed rows go that the caller writes at once, instead of ``write``.

        The rows count as written. None where the store does not pack this kind.
        """
        ...

    def packed_rows(self, slot: Slot, requests: tuple[int, ...]) -> PackedRows | None:
        """The packed entries of a slot; None where the store does not pack them in pages."""
        ...

    def read(self, slot: Slot, spans: Spans) -> Shaped[Tensor, "rows ..."]:
        """Get rows, which must have been written, packed request by request."""
        ...

    def pick(self, slot: Slot, spans: Spans, rows: Int[Tensor, " n"]) -> Float[Tensor, "n columns"]:
        """Get some rows of what ``read`` would give, without reading the others."""
        ...

    def rows_before(
        self, slot: Slot, requests: tuple[int, ...], starts: tuple[int, ...]
    ) -> tuple[int, ...]:
        """How many rows right before ``starts`` each request still has."""
        ...

    def truncate(self, request: int, position: int) -> None:
        """Forget everything that positions >= ``position`` wrote."""
        ...

    def length(self, request: int) -> int:
        """Positions written so far; 0 for a request that is not there."""
        ...
