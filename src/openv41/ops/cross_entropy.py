"""The language model's loss, from hidden rows, without all logits at once. Report §2.1."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from openv41.ops._dispatch import op
from openv41.ops.precision import widened

LOGITS_AT_ONCE = 1 << 22  # logits that are alive at a time: 16 MB


class CrossEntropy(NamedTuple):
    """Weighted sum over the targets, and each target's own loss, without a gradient; in nats."""

    summed: Float[Tensor, ""]
    each: Float[Tensor, " targets"]


@op
def linear_cross_entropy(
    hidden: Float[Tensor, "targets D"],
    weight: Float[Tensor, "V D"],
    targets: Int[Tensor, " targets"],
    weights: Float[Tensor, " targets"] | None = None,
) -> CrossEntropy:
    """-log softmax(hidden weight^T)[target], in at least float32, in pieces of the rows.

    Only one piece of logits is alive; where a gradient is asked for, the forward computes it, and
    the backward pass multiplies it by that of the sum.
    """
    summed, each = _LinearCrossEntropy.apply(hidden, weight, targets, weights)
    return CrossEntropy(summed, each)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 -- of torch, without annotations
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        weights: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        wants_hidden, wants_weight, *_ = ctx.needs_input_grad
        wide = widened(weight)
        of_hidden = torch.empty_like(hidden, dtype=wide.dtype) if wants_hidden else None
        of_weight = torch.zeros_like(wide) if wants_weight else None
        each = hidden.new_empty(len(hidden), dtype=wide.dtype)
        size = max(1, LOGITS_AT_ONCE // len(weight))
        for start in range(0, len(hidden), size):
            rows = slice(start, start + size)
            inputs, wanted = hidden[rows].to(wide.dtype), targets[rows]
            logits = F.linear(inputs, wide)
            each[rows] = F.cross_entropy(logits, wanted, reduction="none")
            if of_hidden is None and of_weight is None:
                continue
            slope = logits.softmax(dim=1)
            slope[torch.arange(len(wanted), device=slope.device), wanted] -= 1
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
