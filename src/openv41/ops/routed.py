"""What the routing of a few tokens finds. Report §2.1.1."""

from typing import NamedTuple

from jaxtyping import Float, Int
from torch import Tensor


class Routed(NamedTuple):
    """Experts of each token, and its (token, choice) pairs sorted by expert, stably."""

    chosen: Int[Tensor, "T A"]
    weights: Float[Tensor, "T A"]
    order: Int[Tensor, " pairs"]  # pair of each sorted row
    places: Int[Tensor, " pairs"]  # sorted row of each pair
    counts: Int[Tensor, " E"]  # pairs of each expert
