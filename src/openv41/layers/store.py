"""The protocol of every cache. Report §2.2, §2.3.1."""

from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor


class Slot(NamedTuple):
    """A kind of state and the layer that owns it.

    ``window`` (window KV) and ``pending`` (compressor projections of one token) hold a row per
    position; ``main`` (main KV) and ``index`` (index keys) a row per entry; ``tokens`` the token
    ids, -1 at image positions, with layer -1.
    """

    kind: str
    layer: int


@runtime_checkable
class KVStore(Protocol):
    """State of requests, addressed by absolute row: never "the last", so rollback is no case."""

    def write(self, request: int, slot: Slot, first: int, rows: Tensor) -> None:
        """Set rows ``first``, ``first`` + 1, ... of a request; later rows become invalid."""
        ...

    def read(self, request: int, slot: Slot, first: int, stop: int) -> Tensor:
        """Get rows ``first`` to ``stop`` - 1, which must have been written."""
        ...

    def truncate(self, request: int, position: int) -> None:
        """Forget everything that positions >= ``position`` wrote."""
        ...

    def length(self, request: int) -> int:
        """Positions written so far; 0 for a request that is not there."""
        ...
