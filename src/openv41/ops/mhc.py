"""Residual streams and their mixing coefficients. Report §2.4.1."""

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from openv41.ops._dispatch import op, wants_gradient
from openv41.ops.deterministic import VECTOR_ROWS, elementwise, fixed_rows
from openv41.ops.linear import linear
from openv41.ops.norm import rms_norm
from openv41.ops.precision import cast, widened
from openv41.ops.sinkhorn import doubly_stochastic

TOKENS_AT_ONCE = 512


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
    flat = widened(x.flatten(1))
    inputs = flat, cast(fn, flat.dtype), norm_eps, deterministic
    mixes: Tensor = (
        _NormedProjection.apply(*inputs)
        if wants_gradient(flat, fn)
        else _normed_projection(*inputs)[0]
    )
    return coefficients(mixes, base, scale, num, steps=steps, eps=eps, deterministic=deterministic)


def coefficients(
    mixes: Float[Tensor, "T size"],
    base: Float[Tensor, " size"],
    scale: Float[Tensor, " 3"],
    num: int,
    *,
    steps: int,
    eps: float,
    deterministic: bool = False,
) -> tuple[Float[Tensor, "T N"], Float[Tensor, "T N N"], Float[Tensor, "T N"]]:
    """Turn raw mixes, in the order [A (N), C (N), B (N x N)], into coefficients A, B, C."""
    spread = torch.cat([scale, scale[2:].expand(num - 1)])[:, None]  # of the rows A, C, B's N
    raw = mixes.view(-1, num + 2, num) * spread + base.view(-1, num)
    raw_ac, raw_b = torch.split_with_sizes(raw, (2, num), 1)
    if deterministic:
        comb = fixed_rows(raw_b, lambda b: doubly_stochastic(b, steps, eps), VECTOR_ROWS)
        a, c = elementwise(raw_ac, torch.sigmoid).unbind(1)
    else:
        comb = doubly_stochastic(raw_b, steps, eps)
        a, c = raw_ac.sigmoid().unbind(1)
    return a + eps, comb.transpose(1, 2), 2 * c


@op
def mix_streams(x: Float[Tensor, "T N D"], a: Float[Tensor, "T N"]) -> Float[Tensor, "T D"]:
    """Collapse the N streams of each token into one block input: x_hat = A X, Eq. (5).

    Accumulates in at least float32 (float64 stays); the result has the dtype of ``x``.
    """
    wide = widened(x)
    parts = wide, cast(a, wide.dtype)
    mixed: Tensor = _Mix.apply(*parts) if wants_gradient(*parts) else _mixed(*parts)
    return cast(mixed, x.dtype)


@op
def update_streams(
    x: Float[Tensor, "T N D"],
    y: Float[Tensor, "T D"],
    b: Float[Tensor, "T N N"],
    c: Float[Tensor, "T N"],
    *,
    deterministic: bool = False,
) -> Float[Tensor, "T N D"]:
    """Write a block output back into the streams: X' = B X + C y, Eq. (6)."""
    wide = widened(x)
    parts = (wide, *(cast(part, wide.dtype) for part in (y, b, c)))
    if deterministic:
        return cast(_added_in_order(*parts), x.dtype)
    new: Tensor = _Update.apply(*parts) if wants_gradient(*parts) else _updated(*parts)
    return cast(new, x.dtype)


@op
def mega_mhc(
    x: Float[Tensor, "T N D"],
    y: Float[Tensor, "T D"] | None,
    b: Float[Tensor, "T N N"] | None,
    c: Float[Tensor, "T N"] | None,
    a: Float[Tensor, "T N"],
    *,
    fn: Float[Tensor, "N*(N+2) N*D"],
    base: Float[Tensor, " N*(N+2)"],
    scale: Float[Tensor, " 3"],
    norm: Float[Tensor, " D"],
    steps: int,
    eps: float,
    norm_eps: float,
    deterministic: bool = False,
) -> tuple[
    Float[Tensor, "T N D"],
    Float[Tensor, "T D"],
    Float[Tensor, "T N"],
    Float[Tensor, "T N N"],
    Float[Tensor, "T N"],
]:
    """All that happens to the streams between two blocks, Eq. (6).

    Writes the output ``y`` of the block before into the streams, X' = B X + C y; collapses them
    with the ``a`` handed on, h = a X', and normalises h for the next block, whose coefficients are
    predicted from X'. Returns (X', norm(h), A', B', C'). Without ``y`` X' is ``x`` itself.
    """
    if y is not None:
        assert b is not None and c is not None, "an output is written with coefficients"  # noqa: PT018
        x = update_streams(x, y, b, c, deterministic=deterministic)
    next_a, next_b, next_c = predict_mix(
        x, fn, base, scale, steps=steps, eps=eps, norm_eps=norm_eps, deterministic=deterministic
    )
    return x, rms_norm(mix_streams(x, a), norm, norm_eps), next_a, next_b, next_c


def _added_in_order(x: Tensor, y: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """B X + C y one stream after the other: no product whose sums change with T."""
    total = c[..., None] * y[:, None]
    for stream, weight in zip(x.unbind(1), b.unbind(2), strict=True):
        total = total + weight[..., None] * stream[:, None]
    return total


def _pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Cut along tokens, so that all passes over a piece find it in a core's cache."""
    if len(tensors[0]) <= TOKENS_AT_ONCE:
        return iter([tensors])
    return zip(*(t.split(TOKENS_AT_ONCE) for t in tensors), strict=True)


def _mixed(x: Tensor, a: Tensor) -> Tensor:
    if x.shape[0] == 1:
        return (x * a[..., None]).sum(1)
    out = x.new_empty(x.shape[0], x.shape[2])
    for x_, a_, out_ in _pieces(x, a, out):
        torch.sum(x_ * a_[..., None], dim=1, out=out_)
    return out


class _Mix(torch.autograd.Function):
    """out[t] = sum_n a[t, n] x[t, n]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(x, a)
        return _mixed(x, a)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        x, a = ctx.saved_tensors
        grad_x = x.new_empty(x.shape)
        grad_a = torch.empty_like(a)
        for x_, a_, g_, gx_, ga_ in _pieces(x, a, grad, grad_x, grad_a):
            torch.sum(x_ * g_[:, None], dim=-1, out=ga_)
            torch.mul(a_[..., None], g_[:, None], out=gx_)
        return grad_x, grad_a


def _updated(x: Tensor, y: Tensor, b: Tensor, c: Tensor) -> Tensor:
    if x.shape[0] == 1:
        return torch.addcmul(torch.bmm(b, x), c[..., None], y)
    out = x.new_empty(x.shape)
    for x_, y_, b_, c_, out_ in _pieces(x, y, b, c, out):
        torch.addcmul(torch.bmm(b_, x_), c_[..., None], y_[:, None], out=out_)
    return out


class _Update(torch.autograd.Function):
    """out[t, m] = sum_n b[t, m, n] x[t, n] + c[t, m] y[t]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, b: Tensor, c: Tensor) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(x, y, b, c)
        return _updated(x, y, b, c)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:  # noqa: ANN401
        x, y, b, c = ctx.saved_tensors
        grads = x.new_empty(x.shape), torch.empty_like(y), b.new_empty(b.shape), torch.empty_like(c)
        for x_, y_, b_, c_, g_, gx_, gy_, gb_, gc_ in _pieces(x, y, b, c, grad, *grads):
            torch.bmm(b_.mT, g_, out=gx_)
            torch.bmm(g_, x_.mT, out=gb_)
            torch.sum(g_ * y_[:, None], dim=-1, out=gc_)
            torch.sum(g_ * c_[..., None], dim=1, out=gy_)
        return grads


def _normed_projection(
    x: Tensor, weight: Tensor, eps: float, deterministic: bool
) -> tuple[Tensor, Tensor]:
    """(x W^T) / rms(x), and 1 / rms(x)."""
    if x.shape[0] == 1:
        inverse = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        return linear(x, weight, deterministic=deterministic) * inverse, inverse
    out, inverse = x.new_empty(x.shape[0], weight.shape[0]), x.new_empty(x.shape[0], 1)
    for x_, out_, inverse_ in _pieces(x, out, inverse):
        torch.rsqrt(x_.square().mean(-1, keepdim=True) + eps, out=inverse_)
        torch.mul(linear(x_, weight, deterministic=deterministic), inverse_, out=out_)
    return out, inverse


class _NormedProjection(torch.autograd.Function):
    """(x W^T) / rms(x), with the gradient in closed form."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, deterministic: bool) -> Tensor:  # noqa: ANN401
        out, inverse = _normed_projection(x, weight, eps, deterministic)
        ctx.save_for_backward(x, weight, inverse, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:  # noqa: ANN401
        x, weight, inverse, out = ctx.saved_tensors
        grad_x, grad_weight = torch.empty_like(x), torch.zeros_like(weight)
        for x_, inverse_, out_, g_, gx_ in _pieces(x, inverse, out, grad, grad_x):
            scaled = g_ * inverse_
            along = (g_ * out_).sum(-1, keepdim=True) * inverse_.square() / x.shape[-1]
            torch.mm(scaled, weight, out=gx_)
            gx_.addcmul_(x_, along, value=-1)
            grad_weight.addmm_(scaled.T, x_)
        return grad_x, grad_weight, None, None
