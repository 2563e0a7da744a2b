"""What an answer may hold: the protocol between requests, the sampler and a grammar."""

from typing import Protocol, runtime_checkable

from jaxtyping import Bool
from torch import Tensor

from openv41.errors import OpenV41Error


class ConstraintError(OpenV41Error):
    """A constraint that went wrong while an answer was written."""


@runtime_checkable
class Guide(Protocol):
    """Which tokens may come next in one answer, as it grows."""

    def allowed(self) -> Bool[Tensor, " V"] | None:
        """Which tokens may come next; None for all."""
        ...

    def accept(self, token: int) -> None:
        """Take the next token, one of those allowed."""
        ...


@runtime_checkable
class Constraint(Protocol):
    """What answers may hold; several requests may share one."""

    def begin(self) -> Guide:
        """Guide for an answer that begins."""
        ...
