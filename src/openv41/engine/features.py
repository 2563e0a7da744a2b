"""Features of a request's last positions, until its drafter reads them. Report §2.4.3."""

from collections import deque

from jaxtyping import Float
from torch import Tensor


class Features:
    """Rows of consecutive positions: the last ``window`` of those added, or a few more."""

    def __init__(self, window: int) -> None:
        self.first = self.stop = 0  # their positions
        self._window = window
        self._parts: deque[Float[Tensor, "_ width"]] = deque()

    def __len__(self) -> int:
        return self.stop - self.first

    def add(self, first: int, rows: Float[Tensor, "rows width"]) -> None:
        """Add rows of the positions from ``first`` on; what they do not follow is forgotten."""
        if first != self.stop:
            self._parts.clear()
        if not self._parts:
            self.first = first
        self._parts.append(rows)
        self.stop = first + len(rows)
        while len(self) - len(self._parts[0]) >= self._window:
            self.first += len(self._parts.popleft())

    def take(self) -> list[Float[Tensor, "_ width"]]:
        """Hand all rows over."""
        parts = list(self._parts)
        self.clear()
        return parts

    def clear(self) -> None:
        """Forget the rows."""
        self._parts.clear()
        self.first = self.stop
