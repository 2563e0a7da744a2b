# mypy: disable-error-code="no-untyped-call, misc"
"""Kernels of the residual streams, forward and backward. Report §2.4.1."""

from typing import Any

import torch
from torch import Tensor

from openv41.ops._dispatch import kernel
from openv41.ops.mhc_backward_triton import Saved, boundary_backward, streams_backward
from openv41.ops.mhc_forward_triton import Advanced, advance, collapse, update

DTYPES = (torch.bfloat16, torch.float32)
MOST_STREAMS = 4  # the coefficients of more do not fit the kernel's registers


def _refuse_streams(x: Tensor, *coefficients: Tensor, deterministic: bool = False) -> str | None:
    if deterministic:
        return "its rows depend on how many there are"
    if x.dtype not in DTYPES:
        return f"streams must be bfloat16 or float32, not {x.dtype}"
    if x.shape[1] > MOST_STREAMS:
        return f"there are {x.shape[1]} streams, more than {MOST_STREAMS}"
    wrong = {t.dtype for t in coefficients} - {torch.float32}
    return f"coefficients must be float32, not {wrong.pop()}" if wrong else None


def _refuse_mix(x: Tensor, a: Tensor) -> str | None:
    return _refuse_streams(x, a)


def _refuse_update(
    x: Tensor, y: Tensor, b: Tensor, c: Tensor, *, deterministic: bool = False
) -> str | None:
    if y.dtype != x.dtype:
        return f"the output is {y.dtype}, the streams are {x.dtype}"
    return _refuse_streams(x, b, c, deterministic=deterministic)


def _refuse(
    x: Tensor,
    y: Tensor | None,
    b: Tensor | None,
    c: Tensor | None,
    a: Tensor,
    *,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    deterministic: bool = False,
    **_: Any,
) -> str | None:
    if y is not None and y.dtype != x.dtype:
        return f"the output is {y.dtype}, the streams are {x.dtype}"
    coefficients = [tensor for tensor in (b, c, a, fn, base, scale) if tensor is not None]
    return _refuse_streams(x, *coefficients, deterministic=deterministic)


@kernel(refuse=_refuse, has_backward=True)
def mega_mhc(
    x: Tensor,
    y: Tensor | None,
    b: Tensor | None,
    c: Tensor | None,
    a: Tensor,
    *,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm: Tensor,
    steps: int,
    eps: float,
    norm_eps: float,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Advance the streams in one pass over them."""
    constants = steps, eps, norm_eps
    x = _whole_rows(x)
    pending: tuple[Tensor, ...] = ()
    if y is not None:
        assert b is not None and c is not None, "an output is written with coefficients"  # noqa: PT018
        pending = _whole_rows(y), b.contiguous(), c.contiguous()
    weights = fn.contiguous(), base.contiguous(), scale.contiguous(), norm.contiguous()
    out = _Boundary.apply(constants, x, a.contiguous(), *weights, *pending)
    return out if y is not None else (x, *out)


def _refuse_prediction(
    x: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    deterministic: bool = False,
    **_: Any,
) -> str | None:
    return _refuse_streams(x, fn, base, scale, deterministic=deterministic)


@kernel(refuse=_refuse_prediction, has_backward=True)
def predict_mix(
    x: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    steps: int,
    eps: float,
    norm_eps: float,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Predict the coefficients; what the streams collapse to is nothing."""
    nothing = torch.zeros(x.shape[:2], dtype=torch.float32, device=x.device)
    norm = torch.ones(x.shape[2], dtype=torch.float32, device=x.device)
    weights = fn.contiguous(), base.contiguous(), scale.contiguous(), norm
    out = _Boundary.apply((steps, eps, norm_eps), _whole_rows(x), nothing, *weights)
    return out[1], out[2], out[3]


@kernel(refuse=_refuse_update, has_backward=True)
def update_streams(
    x: Tensor,
    y: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    deterministic: bool = False,
) -> Tensor:
    """Write what is pending, where the streams themselves are read next."""
    parts = _whole_rows(x), _whole_rows(y), b.contiguous(), c.contiguous()
    new: Tensor = _Update.apply(*parts)
    return new


@kernel(refuse=_refuse_mix, has_backward=True)
def mix_streams(x: Tensor, a: Tensor) -> Tensor:
    """Collapse the streams, where no coefficients follow."""
    mixed: Tensor = _Mix.apply(_whole_rows(x), a.contiguous())
    return mixed


def _whole_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


class _Update(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, b: Tensor, c: Tensor) -> Tensor:
        ctx.save_for_backward(x, y, b, c)
        return update(x, (y, b, c))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *pending = ctx.saved_tensors
        if len(x) == 0:
            return tuple(torch.zeros_like(tensor) for tensor in (x, *pending))
        g_x, g_y, _, g_b, g_c = streams_backward(x, tuple(pending), None, grad.contiguous(), None)
        return g_x, g_y, g_b, g_c


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor) -> Tensor:
        ctx.save_for_backward(x, a)
        return collapse(x, a)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, a = ctx.saved_tensors
        if len(x) == 0:
            return torch.zeros_like(x), torch.zeros_like(a)
        g_x, _, g_a, _, _ = streams_backward(x, None, a, None, grad.contiguous())
        return g_x, g_a


class _Boundary(torch.autograd.Function):
    """Keeps the streams before and after, and per token the mixes and the two rms."""

    @staticmethod
    def forward(
        ctx: Any,
        constants: tuple[int, float, float],
        x: Tensor,
        a: Tensor,
        *rest: Tensor,
    ) -> tuple[Tensor, ...]:
        weights, y_b_c = rest[:4], rest[4:]
        out = advance(x, y_b_c or None, a, weights, constants)  # type: ignore[arg-type]
        ctx.constants = constants
        kept = (out.mixes, out.inverse, *(() if out.new is None else (out.new,)))
        ctx.save_for_backward(x, a, *rest, *kept)
        found = out.h, out.a, out.b, out.c
        return found if out.new is None else (out.new, *found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        has_y = len(grads) == 5
        x, a, weights, rest = tensors[0], tensors[1], tensors[2:6], tensors[6:]
        pending, rest = (rest[:3], rest[3:]) if has_y else (None, rest)
        out = Advanced(rest[2] if has_y else None, a, a, a, a, rest[0], rest[1])
        steps, eps, _ = ctx.constants
        g_new = grads[0].contiguous() if has_y else None
        g_h, g_next_a, g_next_b, g_next_c = (g.contiguous() for g in grads[-4:])
        if len(x) == 0:
            zeros = [torch.zeros_like(tensor) for tensor in (x, a, *weights, *(pending or ()))]
            return (None, *zeros)
        saved = Saved(x, pending, a, weights, out)
        g_x, g_y, g_b, g_c, g_a, *g_weights = boundary_backward(
            saved, g_new, g_h, (g_next_a, g_next_b, g_next_c), (steps, eps)
        )
        g_pending = (g_y, g_b, g_c) if has_y else ()
        return (None, g_x, g_a, *g_weights, *g_pending)
