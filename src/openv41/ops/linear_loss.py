"""Losses of logits = hidden weight^T that never hold all logits at once. Report §2.1."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812

from openv41.ops.precision import widened

LOGITS_AT_ONCE = 1 << 20  # logits that are alive at a time: 4 MB, which a cache holds
LOGITS_ON_GPU = 1 << 26  # there a piece costs its launches
LEAST_ROWS = 32  # of a piece: with fewer the product reads the weights too often

# From some rows and their logits to each row's loss, and how to get its slope for the logits.
Piece = Callable[[slice, Tensor], tuple[Tensor, Callable[[], Tensor]]]


class LinearLoss(NamedTuple):
    """Weighted sum over the targets, and each target's own loss, without a gradient; in nats."""

    summed: Float[Tensor, ""]
    each: Float[Tensor, " targets"]


def rows_at_once(vocabulary: int, *, is_cuda: bool) -> int:
    """How many rows of logits are alive at a time."""
    return max(LEAST_ROWS, (LOGITS_ON_GPU if is_cuda else LOGITS_AT_ONCE) // vocabulary)


def in_pieces(
    hidden: Float[Tensor, "targets D"],
    weight: Float[Tensor, "V D"],
    piece: Piece,
    weights: Float[Tensor, " targets"] | None = None,
) -> LinearLoss:
    """Loss of logits in at least float32, of which one piece of rows is alive.

    Where a gradient is asked for, the forward computes it, and the backward pass multiplies it by
    that of the sum.
    """
    summed, each = _InPieces.apply(hidden, weight, piece, weights)
    return LinearLoss(summed, each)


class _InPieces(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 -- of torch, without annotations
        hidden: Tensor,
        weight: Tensor,
        piece: Piece,
        weights: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        wants_hidden, wants_weight, *_ = ctx.needs_input_grad
        wide = widened(weight)
        of_hidden = torch.empty_like(hidden, dtype=wide.dtype) if wants_hidden else None
        of_weight = torch.zeros_like(wide) if wants_weight else None
        each = hidden.new_empty(len(hidden), dtype=wide.dtype)
        size = rows_at_once(len(weight), is_cuda=hidden.is_cuda)
        for start in range(0, len(hidden), size):
            rows = slice(start, start + size)
            inputs = hidden[rows].to(wide.dtype)
            each[rows], slope_of = piece(rows, F.linear(inputs, wide))
            if of_hidden is None and of_weight is None:
                continue
            slope = slope_of()
            if weights is not None:
                slope *= weights[rows, None]
            if of_hidden is not None:
                of_hidden[rows] = slope @ wide
            if of_weight is not None:
                of_weight.addmm_(slope.T, inputs)
        ctx.save_for_backward(of_hidden, of_weight)
        ctx.dtypes = hidden.dtype, weight.dtype
        ctx.mark_non_differentiable(each)
        summed = each.sum() if weights is None else each @ weights.to(each.dtype)
        return summed, each

    @staticmethod
    @once_differentiable  # the gradient was computed with the loss
    def backward(
        ctx: Any,  # noqa: ANN401 -- of torch, without annotations
        of_summed: Tensor,
        _of_each: Tensor,
    ) -> tuple[Tensor | None, Tensor | None, None, None]:
        of_hidden, of_weight = (
            None if slope is None else (slope * of_summed).to(dtype)
            for slope, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return of_hidden, of_weight, None, None
