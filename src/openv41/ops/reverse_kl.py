"""The loss of distillation, from hidden rows of student and teacher, without all logits at once."""

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from openv41.ops._dispatch import op
from openv41.ops.linear_loss import LinearLoss, in_pieces
from openv41.ops.precision import widened


@op
def linear_reverse_kl(
    hidden: Float[Tensor, "targets D"],
    weight: Float[Tensor, "V D"],
    teacher_hidden: Float[Tensor, "targets width"],
    teacher_weight: Float[Tensor, "V width"],
) -> LinearLoss:
    """KL(p || q) = sum_v p_v (log p_v - log q_v) of each row, in at least float32.

    p is softmax(hidden weight^T) and q the same of the teacher, which gets no gradient. Where both
    have the same logits to the bit, value and gradient are exactly zero. One piece of rows has its
    logits alive, of both, see ops/linear_loss.py.
    """
    wide = widened(teacher_weight)

    def piece(rows: slice, logits: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
        log_p = logits.log_softmax(dim=1)
        log_q = F.linear(teacher_hidden[rows].to(wide.dtype), wide).log_softmax(dim=1)
        p, gap = log_p.exp(), log_p - log_q.to(log_p.dtype)
        divergence = (p * gap).sum(dim=1)
        return divergence, lambda: p * (gap - divergence[:, None])

    return in_pieces(hidden, weight, piece)
