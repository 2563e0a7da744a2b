"""Kernels of the experts' linear layers: one launch per product, no count read by the host.

Each program finds its expert from the counts, so that the grid only depends on shapes. The floor
of a product is that of its bytes, or 2 x pairs x D x F operations. ``WIDE`` multiplies in float32:
Triton's interpreter knows no product in bfloat16. Report §2.1.1.
"""

from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from openv41.ops._dispatch import kernel, wants_gradient
from openv41.ops.precision import cast

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_EXPERTS = 1024  # whose counts every program reads


class Blocks(NamedTuple):
    """Sides of the tiles of a product, and how a program runs."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int


def blocks(pairs: int, experts: int, dtype: torch.dtype) -> Blocks:
    """Tiles that an expert's share of the rows fills."""
    share = pairs / experts
    if dtype == torch.float32:
        return Blocks(32 if share > 16 else 16, 64, 32, 4, 2)
    if share > 64:
        return Blocks(128, 128, 64, 8, 3)
    return Blocks(64, 128, 64, 4, 3) if share > 24 else Blocks(16, 128, 128, 4, 4)


@triton.jit
@no_type_check
def _find(counts, experts, tile, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """Expert of a tile of rows (``EXPERTS`` if there is none), its first row and the last + 1."""
    ids = tl.arange(0, EXPERTS)
    count = tl.load(counts + ids, mask=ids < experts, other=0).to(tl.int32)
    tiles = (count + ROWS - 1) // ROWS
    expert = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    before = tl.sum(tl.where(ids < expert, count, 0), 0)
    within = tile - tl.sum(tl.where(ids < expert, tiles, 0), 0)
    own = tl.sum(tl.where(ids == expert, count, 0), 0)
    return expert, before + within * ROWS, before + own


@triton.jit
@no_type_check
def _product(
    rows,
    weight,
    counts,
    out,
    experts,
    inner,
    columns,
    of_expert,
    of_column,
    of_inner,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    WIDE: tl.constexpr,
):
    across = tl.cdiv(columns, COLUMNS)
    expert, first, stop = _find(counts, experts, tl.program_id(0) // across, EXPERTS, ROWS)
    if expert >= experts:
        return
    row = first + tl.arange(0, ROWS)
    column = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, INNER)
    is_row, is_column = row < stop, column < columns
    wide = row.to(tl.int64)[:, None]
    left = rows + wide * inner + depth[None, :]
    right = weight + expert.to(tl.int64) * of_expert
    right += column[None, :] * of_column + depth[:, None] * of_inner
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, inner, INNER):
        is_inner = depth < inner - start
        a = tl.load(left, mask=is_row[:, None] & is_inner[None, :], other=0.0)
        b = tl.load(right, mask=is_inner[:, None] & is_column[None, :], other=0.0)
        if WIDE:
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, b, total, input_precision="ieee")
        left += INNER
        right += INNER * of_inner
    place = out + wide * columns + column[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit
@no_type_check
def _weight_gradient(
    rows,
    grad,
    counts,
    out,
    experts,
    inner,
    columns,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    WIDE: tl.constexpr,
):
    expert = tl.program_id(1)
    ids = tl.arange(0, EXPERTS)
    count = tl.load(counts + ids, mask=ids < experts, other=0).to(tl.int32)
    first = tl.sum(tl.where(ids < expert, count, 0), 0)
    stop = first + tl.sum(tl.where(ids == expert, count, 0), 0)
    across = tl.cdiv(inner, INNER)
    column = (tl.program_id(0) // across) * COLUMNS + tl.arange(0, COLUMNS)
    depth = (tl.program_id(0) % across) * INNER + tl.arange(0, INNER)
    is_column, is_inner = column < columns, depth < inner
    total = tl.zeros((COLUMNS, INNER), tl.float32)
    for start in range(first, stop, ROWS):
        row = start + tl.arange(0, ROWS)
        is_row, wide = row < stop, row.to(tl.int64)
        left = grad + wide[None, :] * columns + column[:, None]
        right = rows + wide[:, None] * inner + depth[None, :]
        a = tl.load(left, mask=is_column[:, None] & is_row[None, :], other=0.0)
        b = tl.load(right, mask=is_row[:, None] & is_inner[None, :], other=0.0)
        if WIDE:
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, b, total, input_precision="ieee")
    place = out + expert.to(tl.int64) * columns * inner + column[:, None] * inner + depth[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=is_column[:, None] & is_inner[None, :])


def product(
    rows: Float[Tensor, "pairs D"],
    weight: Float[Tensor, "E F D"],
    counts: Int[Tensor, " E"],
    shape: Blocks | None = None,
) -> Float[Tensor, "pairs F"]:
    """Rows @ weight^T, expert by expert; strides of ``weight`` may be any."""
    experts, columns, inner = weight.shape
    shape = shape or blocks(len(rows), experts, rows.dtype)
    out = rows.new_empty(len(rows), columns)
    tiles = triton.cdiv(len(rows), shape.rows) + experts  # at most so many
    _product[(tiles * triton.cdiv(columns, shape.columns),)](
        rows,
        weight,
        counts,
        out,
        experts,
        inner,
        columns,
        *weight.stride(),
        EXPERTS=triton.next_power_of_2(experts),
        ROWS=shape.rows,
        COLUMNS=shape.columns,
        INNER=shape.inner,
        WIDE=not rows.is_cuda,
        num_warps=shape.warps,
        num_stages=shape.stages,
    )
    return out


def weight_gradient(
    rows: Float[Tensor, "pairs D"],
    grad: Float[Tensor, "pairs F"],
    counts: Int[Tensor, " E"],
    dtype: torch.dtype,
    shape: Blocks | None = None,
) -> Float[Tensor, "E F D"]:
    """grad^T @ rows, expert by expert; zero for one without rows."""
    experts, inner, columns = len(counts), rows.shape[1], grad.shape[1]
    shape = shape or blocks(len(rows), experts, rows.dtype)
    out = rows.new_empty(experts, columns, inner, dtype=dtype)
    width = min(shape.columns, 128)
    grid = triton.cdiv(columns, width) * triton.cdiv(inner, shape.columns), experts
    _weight_gradient[grid](
        rows,
        grad,
        counts,
        out,
        experts,
        inner,
        columns,
        EXPERTS=triton.next_power_of_2(experts),
        ROWS=max(16, min(shape.rows, 64)),
        COLUMNS=width,
        INNER=shape.columns,
        WIDE=not rows.is_cuda,
        num_warps=shape.warps,
        num_stages=shape.stages,
    )
    return out


class _GroupedLinear(torch.autograd.Function):
    """Keeps the weight as it was multiplied; its gradient is rounded once, to the weight's own."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        narrow = cast(weight, rows.dtype)
        ctx.save_for_backward(rows, narrow, counts)
        ctx.dtype = weight.dtype
        return product(rows, narrow, counts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, counts = ctx.saved_tensors
        wants_rows, wants_weight, _ = ctx.needs_input_grad
        grad = grad.contiguous()
        of_rows = product(grad, weight.mT, counts) if wants_rows else None
        of_weight = weight_gradient(rows, grad, counts, ctx.dtype) if wants_weight else None
        return of_rows, of_weight, None


def _refuse(
    rows: Tensor, weight: Tensor, counts: Tensor, *, deterministic: bool = False
) -> str | None:
    if deterministic:
        return "deterministic mode runs on tiles of one shape"
    if rows.dtype not in DTYPES:
        return f"rows are {rows.dtype}"
    if len(weight) > MOST_EXPERTS:
        return f"there are {len(weight)} experts, more than {MOST_EXPERTS}"
    return None


@kernel(refuse=_refuse, has_backward=True)
def grouped_linear(
    rows: Float[Tensor, "pairs D"],
    weight: Float[Tensor, "E F D"],
    counts: Int[Tensor, " E"],
    *,
    deterministic: bool = False,
) -> Float[Tensor, "pairs F"]:
    """Multiply each expert's rows by its weight, in one launch."""
    assert not deterministic, "refused"
    rows = rows.contiguous()
    if wants_gradient(rows, weight):
        found: Tensor = _GroupedLinear.apply(rows, weight, counts)
        return found
    return product(rows, cast(weight, rows.dtype), counts)
