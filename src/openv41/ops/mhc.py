"""Residual streams and their mixing coefficients. Report §2.4.1."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from openv41.ops._dispatch import op
from openv41.ops.linear import linear
from openv41.ops.sinkhorn import doubly_stochastic


@op
def predict_mix(
    x: Float[Tensor, "T N D"],
    fn: Float[Tensor, "N*(N+2) N*D"],
    base: Float[Tensor, " N*(N+2)"],
    scale: Float[Tensor, " 3"],
    *,
    steps: int,
    eps: float,
    norm_eps: float,
    deterministic: bool = False,
) -> tuple[Float[Tensor, "T N"], Float[Tensor, "T N N"], Float[Tensor, "T N"]]:
    """Predict A, B, C of Eq. (6) from the streams: (A, B, C) = H(X).

    A = sigmoid + eps, C = 2 sigmoid, B the transpose of a doubly stochastic matrix. At least
    float32 throughout; the RMS division comes after the projection.
    """
    num = x.shape[1]
    flat = x.flatten(1).to(torch.promote_types(x.dtype, torch.float32))
    mixes: Tensor = _NormedProjection.apply(flat, fn.to(flat.dtype), norm_eps, deterministic)
    return coefficients(mixes, base, scale, num, steps=steps, eps=eps)


def coefficients(
    mixes: Float[Tensor, "T size"],
    base: Float[Tensor, " size"],
    scale: Float[Tensor, " 3"],
    num: int,
    *,
    steps: int,
    eps: float,
) -> tuple[Float[Tensor, "T N"], Float[Tensor, "T N N"], Float[Tensor, "T N"]]:
    """Turn raw mixes, in the order [A (N), C (N), B (N x N)], into coefficients A, B, C."""
    sizes = [num, num, num * num]
    spread = torch.cat([scale[i].expand(size) for i, size in enumerate(sizes)])
    raw_a, raw_c, raw_b = (mixes * spread + base).split(sizes, dim=-1)
    comb = doubly_stochastic(raw_b.unflatten(-1, (num, num)), steps, eps)
    return raw_a.sigmoid() + eps, comb.transpose(1, 2), 2 * raw_c.sigmoid()


@op
def mix_streams(x: Float[Tensor, "T N D"], a: Float[Tensor, "T N"]) -> Float[Tensor, "T D"]:
    """Collapse the N streams of each token into one block input: x_hat = A X, Eq. (5).

    Accumulates in at least float32 (float64 stays); the result has the dtype of ``x``.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    return (x.to(wide) * a.to(wide)[..., None]).sum(dim=1).to(x.dtype)


@op
def update_streams(
    x: Float[Tensor, "T N D"],
    y: Float[Tensor, "T D"],
    b: Float[Tensor, "T N N"],
    c: Float[Tensor, "T N"],
) -> Float[Tensor, "T N D"]:
    """Write a block output back into the streams: X' = B X + C y, Eq. (6)."""
    wide = torch.promote_types(x.dtype, torch.float32)
    mixed = torch.bmm(b.to(wide), x.to(wide))
    return torch.addcmul(mixed, c.to(wide)[..., None], y.to(wide)[:, None]).to(x.dtype)


class _NormedProjection(torch.autograd.Function):
    """(x W^T) / rms(x), with the gradient in closed form."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, deterministic: bool) -> Tensor:  # noqa: ANN401
        inverse = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        out = linear(x, weight, deterministic=deterministic) * inverse
        ctx.save_for_backward(x, weight, inverse, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:  # noqa: ANN401
        x, weight, inverse, out = ctx.saved_tensors
        scaled = grad * inverse
        along = (grad * out).sum(-1, keepdim=True) * inverse.square() / x.shape[-1]
        return (scaled @ weight).addcmul_(x, along, value=-1), scaled.T @ x, None, None
