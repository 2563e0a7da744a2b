"""Kernels of the clamped SwiGLU, forward and backward in one launch each. Report §2.1.1.

The floor is that of their bytes: three times T x F values forward, five times backward.
"""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from openv41.ops._dispatch import kernel, wants_gradient

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDEST = 16384  # columns that a program holds
VALUES = 4096  # of a tile


@triton.jit
@no_type_check
def _clamped(gate, up, limit):
    """silu(min(gate, limit)), its slope, and the clamped up; NaN stays NaN."""
    g = tl.where(gate > limit, limit, gate)
    u = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    share = 1 / (1 + tl.exp(-g))
    return g * share, share * (1 + g * (1 - share)), u


@triton.jit
@no_type_check
def _forward(
    gate,
    up,
    weight,
    out,
    rows,
    width,
    limit,
    WEIGHTED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    place = row[:, None] * width + column[None, :]
    mask = (row < rows)[:, None] & (column < width)[None, :]
    g = tl.load(gate + place, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + place, mask=mask, other=0.0).to(tl.float32)
    act, _, u = _clamped(g, u, limit)
    found = act * u
    if WEIGHTED:
        found *= tl.load(weight + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]
    tl.store(out + place, found.to(out.dtype.element_ty), mask=mask)


@triton.jit
@no_type_check
def _backward(
    gate,
    up,
    weight,
    grad,
    of_gate,
    of_up,
    of_weight,
    rows,
    width,
    limit,
    WEIGHTED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    place = row[:, None] * width + column[None, :]
    mask = (row < rows)[:, None] & (column < width)[None, :]
    g = tl.load(gate + place, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + place, mask=mask, other=0.0).to(tl.float32)
    slope = tl.load(grad + place, mask=mask, other=0.0).to(tl.float32)
    act, steepness, clamped = _clamped(g, u, limit)
    if WEIGHTED:
        share = tl.sum(slope * act * clamped, 1)
        tl.store(of_weight + row, share.to(of_weight.dtype.element_ty), mask=row < rows)
        slope *= tl.load(weight + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]
    by_gate = tl.where(g > limit, 0.0, slope * clamped * steepness)
    by_up = tl.where((u > limit) | (u < -limit), 0.0, slope * act)
    tl.store(of_gate + place, by_gate.to(of_gate.dtype.element_ty), mask=mask)
    tl.store(of_up + place, by_up.to(of_up.dtype.element_ty), mask=mask)


def _tile(rows: int, width: int) -> dict[str, int]:
    columns = triton.next_power_of_2(max(1, width))
    return {"ROWS": max(1, min(VALUES // columns, 32)), "COLUMNS": columns, "num_warps": 4}


def activate(gate: Tensor, up: Tensor, limit: float, weight: Tensor | None) -> Float[Tensor, "T F"]:
    """The forward alone."""
    rows, width = gate.shape
    out, tile = torch.empty_like(gate), _tile(rows, width)
    if out.numel():
        grid = (triton.cdiv(rows, tile["ROWS"]),)
        is_weighted = weight is not None
        _forward[grid](gate, up, weight, out, rows, width, limit, WEIGHTED=is_weighted, **tile)
    return out


class _ClampedSwiglu(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        gate: Tensor,
        up: Tensor,
        limit: float,
        weight: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        ctx.limit = limit
        return activate(gate, up, limit, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, weight = ctx.saved_tensors
        rows, width = gate.shape
        of_gate, of_up, tile = torch.empty_like(gate), torch.empty_like(up), _tile(rows, width)
        of_weight = None if weight is None else torch.zeros_like(weight)
        if gate.numel():
            _backward[(triton.cdiv(rows, tile["ROWS"]),)](
                gate,
                up,
                weight,
                grad.contiguous(),
                of_gate,
                of_up,
                of_weight,
                rows,
                width,
                ctx.limit,
                WEIGHTED=weight is not None,
                **tile,
            )
        return of_gate, of_up, None, of_weight


def _refuse(
    gate: Tensor,
    up: Tensor,
    limit: float,
    weight: Tensor | None = None,
    *,
    deterministic: bool = False,
) -> str | None:
    if deterministic:
        return "deterministic mode keeps to stock functions"
    if gate.dtype not in DTYPES or up.dtype not in DTYPES:
        return f"inputs are {gate.dtype} and {up.dtype}"
    if weight is not None and weight.dtype not in DTYPES:
        return f"weights are {weight.dtype}"
    return f"{gate.shape[1]} columns are more than {WIDEST}" if gate.shape[1] > WIDEST else None


@kernel(refuse=_refuse, has_backward=True)
def clamped_swiglu(
    gate: Float[Tensor, "T F"],
    up: Float[Tensor, "T F"],
    limit: float,
    weight: Float[Tensor, " T"] | None = None,
    *,
    deterministic: bool = False,
) -> Float[Tensor, "T F"]:
    """silu(min(gate, limit)) * clamp(up, -limit, limit) * weight, in float32."""
    assert not deterministic, "refused"
    gate, up = gate.contiguous(), up.contiguous()
    weight = None if weight is None else weight.contiguous()
    given = (gate, up) if weight is None else (gate, up, weight)
    if wants_gradient(*given):
        found: Tensor = _ClampedSwiglu.apply(gate, up, limit, weight)
        return found
    return activate(gate, up, limit, weight)
