"""The language model's loss, from hidden rows, without all logits at once. Report §2.1."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from openv41.ops._dispatch import op
from openv41.ops.linear_loss import LinearLoss, in_pieces


@op
def linear_cross_entropy(
    hidden: Float[Tensor, "targets D"],
    weight: Float[Tensor, "V D"],
    targets: Int[Tensor, " targets"],
    weights: Float[Tensor, " targets"] | None = None,
) -> LinearLoss:
    """-log softmax(hidden weight^T)[target], in at least float32, in pieces of the rows.

    Only one piece of logits is alive, see ops/linear_loss.py.
    """

    def piece(rows: slice, logits: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
        wanted = targets[rows]

        def slope() -> Tensor:
            found = logits.softmax(dim=1)
            found[torch.arange(len(wanted), device=found.device), wanted] -= 1
            return found

        return F.cross_entropy(logits, wanted, reduction="none"), slope

    return in_pieces(hidden, weight, piece, weights)
