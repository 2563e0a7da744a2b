"""Kernels of RMS normalisation, forward and backward in one pass over the rows. Report §2.3.

The floor is that of their bytes: rows x D values read and written forward, twice read and once
written backward. Gradients of the weight are summed program by program, then over the programs.
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
PROGRAMS = 264  # of a backward pass: two per multiprocessor


@triton.jit
@no_type_check
def _forward(x, weight, out, inverses, rows, width, eps, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    place = row[:, None] * width + column[None, :]
    mask = (row < rows)[:, None] & (column < width)[None, :]
    value = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(value * value, 1) / width + eps)
    tl.store(inverses + row, inverse, mask=row < rows)
    found = value * inverse[:, None] * scale[None, :]
    tl.store(out + place, found.to(out.dtype.element_ty), mask=mask)


@triton.jit
@no_type_check
def _backward(
    x,
    weight,
    inverses,
    grad,
    of_x,
    of_weight,
    rows,
    width,
    tiles,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    column = tl.arange(0, COLUMNS)
    scale = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    total = tl.zeros((COLUMNS,), tl.float32)
    row = tl.program_id(0).to(tl.int64) * tiles * ROWS + tl.arange(0, ROWS)
    for _ in range(0, tiles):
        place = row[:, None] * width + column[None, :]
        mask = (row < rows)[:, None] & (column < width)[None, :]
        value = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
        slope = tl.load(grad + place, mask=mask, other=0.0).to(tl.float32)
        inverse = tl.load(inverses + row, mask=row < rows, other=0.0)[:, None]
        unit = value * inverse
        total += tl.sum(slope * unit, 0)
        slope *= scale[None, :]
        mean = tl.sum(slope * unit, 1) / width
        found = (slope - unit * mean[:, None]) * inverse
        tl.store(of_x + place, found.to(of_x.dtype.element_ty), mask=mask)
        row += ROWS
    place = tl.program_id(0).to(tl.int64) * width + column
    tl.store(of_weight + place, total, mask=column < width)


def _tile(width: int) -> dict[str, int]:
    columns = triton.next_power_of_2(max(1, width))
    return {"ROWS": max(1, min(VALUES // columns, 32)), "COLUMNS": columns, "num_warps": 4}


def normalise(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The forward alone, of contiguous rows, and the inverse root mean square of each."""
    width = x.shape[-1]
    rows = x.numel() // max(1, width)
    out, tile = torch.empty_like(x), _tile(width)
    inverses = torch.empty(rows, device=x.device, dtype=torch.float32)
    if out.numel():
        grid = (triton.cdiv(rows, tile["ROWS"]),)
        _forward[grid](x, weight, out, inverses, rows, width, eps, **tile)
    return out, inverses


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out, inverses = normalise(x, weight, eps)
        ctx.save_for_backward(x, weight, inverses)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverses = ctx.saved_tensors
        width, rows = x.shape[-1], len(inverses)
        of_x, tile = torch.empty_like(x), _tile(width)
        if not x.numel():
            return of_x, torch.zeros_like(weight), None
        count = triton.cdiv(rows, tile["ROWS"])
        each = triton.cdiv(count, PROGRAMS)
        programs = triton.cdiv(count, each)
        parts = torch.empty(programs, width, device=x.device, dtype=torch.float32)
        grad = grad.contiguous()
        _backward[(programs,)](x, weight, inverses, grad, of_x, parts, rows, width, each, **tile)
        return of_x, parts.sum(0).to(weight.dtype), None


def _refuse(x: Tensor, weight: Tensor, eps: float) -> str | None:
    if x.dtype not in DTYPES or weight.dtype not in DTYPES:
        return f"inputs are {x.dtype} and {weight.dtype}"
    return f"{x.shape[-1]} columns are more than {WIDEST}" if x.shape[-1] > WIDEST else None


@kernel(refuse=_refuse, has_backward=True)
def rms_norm(x: Float[Tensor, "... D"], weight: Float[Tensor, " D"], eps: float) -> Tensor:
    """Divide each row by its root mean square, then scale; in float32 with one rounding."""
    x, weight = x.contiguous(), weight.contiguous()
    if wants_gradient(x, weight):
        found: Tensor = _RMSNorm.apply(x, weight, eps)
        return found
    return normalise(x, weight, eps)[0]
