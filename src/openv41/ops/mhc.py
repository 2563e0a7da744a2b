"""Residual streams and their mixing coefficients. Report §2.4.1."""

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
    inverse = torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    mixes = linear(flat, fn, deterministic=deterministic) * inverse  # [T, N*(N+2)]
    return coefficients(mixes, base, scale, num, steps=steps, eps=eps)


def coefficients(
    mixes: Float[Tensor, "T N*(N+2)"],
    base: Float[Tensor, " N*(N+2)"],
    scale: Float[Tensor, " 3"],
    num: int,
    *,
    steps: int,
    eps: float,
) -> tuple[Float[Tensor, "T N"], Float[Tensor, "T N N"], Float[Tensor, "T N"]]:
    """Turn raw mixes, in the order [A (N), C (N), B (N x N)], into coefficients A, B, C."""
    sizes = [num, num, num * num]
    spread = torch.repeat_interleave(scale, torch.tensor(sizes, device=scale.device))
    raw_a, raw_c, raw_b = (mixes * spread + base).split(sizes, dim=-1)
    comb = doubly_stochastic(raw_b.unflatten(-1, (num, num)), steps, eps)
    return raw_a.sigmoid() + eps, comb.transpose(1, 2), 2 * raw_c.sigmoid()


@op
def mix_streams(x: Float[Tensor, "T N D"], a: Float[Tensor, "T N"]) -> Float[Tensor, "T D"]:
    """Collapse the N streams of each token into one block input: x_hat = A X, Eq. (5).

    Accumulates in at least float32 (float64 stays); the result has the dtype of ``x``.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.einsum("tnd,tn->td", x.to(wide), a.to(wide)).to(x.dtype)


@op
def update_streams(
    x: Float[Tensor, "T N D"],
    y: Float[Tensor, "T D"],
    b: Float[Tensor, "T N N"],
    c: Float[Tensor, "T N"],
) -> Float[Tensor, "T N D"]:
    """Write a block output back into the streams: X' = B X + C y, Eq. (6)."""
    wide = torch.promote_types(x.dtype, torch.float32)
    mixed = torch.einsum("tmn,tnd->tmd", b.to(wide), x.to(wide))
    return (mixed + c.to(wide)[..., None] * y.to(wide)[:, None]).to(x.dtype)
