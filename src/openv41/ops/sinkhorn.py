"""Sinkhorn normalisation to a doubly stochastic matrix. Report §2.4.1."""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from openv41.ops._dispatch import op, wants_gradient

FEW_NUMBERS = 4096  # up to here a call of torch costs more than the arithmetic in it
SAME_SUMS = 4  # up to here torch and numpy add in the same order


@op
def doubly_stochastic(
    logits: Float[Tensor, "T N N"], steps: int, eps: float
) -> Float[Tensor, "T N N"]:
    """Alternate row and column normalisation, ``steps`` times each, ending on columns.

    The first row step is a softmax plus eps; every other divides by (sum + eps). The gradient
    walks the steps back exactly.
    """
    if _runs_on_numpy(logits):
        return _balance_few(logits, steps, eps)
    result: Tensor = _Sinkhorn.apply(logits, steps, eps)
    return result


def _runs_on_numpy(logits: Tensor) -> bool:
    is_small = logits.numel() <= FEW_NUMBERS and logits.shape[1] <= SAME_SUMS
    is_plain = logits.device.type == "cpu" and not torch.compiler.is_compiling()
    return is_small and is_plain and not wants_gradient(logits)


def _balance_few(logits: Float[Tensor, "T N N"], steps: int, eps: float) -> Float[Tensor, "T N N"]:
    """The steps of ``_Sinkhorn`` on numpy arrays, same bits: a call costs a third of torch's."""
    soft = logits.detach().softmax(2).numpy().transpose(1, 2, 0)  # [N, N, T]
    mix = np.add(soft, eps, order="C")
    small = np.asarray(eps, mix.dtype)  # a Python number would be converted in each call
    sums = np.empty_like(mix[:1]), np.empty_like(mix[:, :1])
    for step in range(2 * steps - 1):
        axis = step % 2
        divisor = sums[axis]
        np.add.reduce(mix, axis, out=divisor, keepdims=True)
        np.add(divisor, small, divisor)
        np.divide(mix, divisor, mix)
    return torch.from_numpy(mix.transpose(2, 0, 1)).contiguous()


class _Sinkhorn(torch.autograd.Function):
    """Keeps only the divisors: each step is undone by multiplying with them.

    Inside, tokens are the last axis, so that every sum over N is a sum of long contiguous rows.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, steps: int, eps: float) -> Tensor:  # noqa: ANN401
        soft = logits.softmax(2).permute(1, 2, 0).contiguous()  # [N, N, T]
        mix = soft + eps
        divisors = []
        for step in range(2 * steps - 1):
            divisor = mix.sum(step % 2, keepdim=True).add_(eps)
            mix = mix.div_(divisor)
            divisors.append(divisor)
        ctx.save_for_backward(soft, mix, *divisors)
        return mix.permute(2, 0, 1).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        soft, mix, *divisors = ctx.saved_tensors
        mix = mix.clone()
        grad = grad.permute(1, 2, 0).contiguous()
        for step in reversed(range(len(divisors))):
            along = (grad * mix).sum(step % 2, keepdim=True)
            grad = grad.sub_(along).div_(divisors[step])
            mix = mix.mul_(divisors[step])
        grad = soft * (grad - (grad * soft).sum(1, keepdim=True))
        return grad.permute(2, 0, 1), None, None
