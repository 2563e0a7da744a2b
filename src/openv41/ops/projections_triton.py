"""Products of a few rows, each weight read once, with what stands around them. Report §2.3.

A launch for each product, norm and rotation costs more than what these do. Floors are those of
the weights' bytes: 18 MB of the released first projections, 4.3 us; 84 MB of its queries, 20 us.
Many rows, and all that wants a gradient, take stock products and the kernels of their parts.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Complex, Float
from torch import Tensor

from openv41.config import Rounding
from openv41.ops._dispatch import kernel, wants_gradient
from openv41.ops.projections import composed_queries, separate_products

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FEW = 64  # rows of one program
MOST = 4  # weights of one launch


@triton.jit
@no_type_check
def _total(
    x,
    weight,
    column,
    row,
    rows,
    inner,
    columns,
    inverse,
    norm,
    normed,
    NORM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Product of all rows with some rows of a weight; the normed rows are stored on the way."""
    depth = tl.arange(0, INNER)
    is_row, is_column = row < rows, column < columns
    left = x + row.to(tl.int64)[:, None] * inner + depth[None, :]
    right = weight + column.to(tl.int64)[None, :] * inner + depth[:, None]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, inner, INNER):
        is_inner = depth < inner - start
        mask = is_row[:, None] & is_inner[None, :]
        a = tl.load(left + start, mask=mask, other=0.0)
        b = tl.load(right + start, mask=is_inner[:, None] & is_column[None, :], other=0.0).to(
            x.dtype.element_ty
        )
        if NORM:
            scale = tl.load(norm + start + depth, mask=is_inner, other=0.0).to(tl.float32)
            a = (a.to(tl.float32) * inverse[:, None] * scale[None, :]).to(x.dtype.element_ty)
            if tl.program_id(0) == 0:
                into = normed + row.to(tl.int64)[:, None] * inner + start + depth[None, :]
                tl.store(into, a, mask=mask)
        if WIDE:
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, b, total, input_precision="ieee")
    return total


@triton.jit
@no_type_check
def _joint(
    x,
    w0,
    w1,
    w2,
    w3,
    o0,
    o1,
    o2,
    o3,
    f0,
    f1,
    f2,
    f3,
    rows,
    inner,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Tiles of the first weight's columns, then those of the second, and so on."""
    tile, weight, out, width = tl.program_id(0), w0, o0, f0
    n0, n1, n2 = tl.cdiv(f0, COLUMNS), tl.cdiv(f1, COLUMNS), tl.cdiv(f2, COLUMNS)
    if tile >= n0 + n1 + n2:
        tile, weight, out, width = tile - n0 - n1 - n2, w3, o3, f3
    elif tile >= n0 + n1:
        tile, weight, out, width = tile - n0 - n1, w2, o2, f2
    elif tile >= n0:
        tile, weight, out, width = tile - n0, w1, o1, f1
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    total = _total(
        x, weight, column, row, rows, inner, width, row, x, x, False, ROWS, COLUMNS, INNER, WIDE
    )
    at = out + row.to(tl.int64)[:, None] * width + column[None, :]
    mask = (row < rows)[:, None] & (column < width)[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
@no_type_check
def _queries(
    x,
    norm,
    weight,
    turns,
    normed,
    out,
    rows,
    inner,
    columns,
    width,
    pairs,
    eps,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Norm, product, rotation of the last 2 * ``pairs`` channels of each head of ``width``."""
    row, depth = tl.arange(0, ROWS), tl.arange(0, INNER)
    is_row = row < rows
    squares = tl.zeros((ROWS,), tl.float32)
    left = x + row.to(tl.int64)[:, None] * inner + depth[None, :]
    for start in range(0, inner, INNER):
        mask = is_row[:, None] & (depth < inner - start)[None, :]
        value = tl.load(left + start, mask=mask, other=0.0).to(tl.float32)
        squares += tl.sum(value * value, 1)
    inverse = tl.rsqrt(squares / inner + eps)
    first = tl.program_id(0) * COLUMNS
    column = first + tl.arange(0, COLUMNS)
    total = _total(
        *(x, weight, column, row, rows, inner, columns),
        *(inverse, norm, normed, True, ROWS, COLUMNS, INNER, WIDE),
    )
    kind = out.dtype.element_ty
    rounded = tl.reshape(total.to(kind).to(tl.float32), (ROWS, COLUMNS // 2, 2))
    even, odd = tl.split(rounded)
    pair = (first // 2 + tl.arange(0, COLUMNS // 2)) % (width // 2) - (width // 2 - pairs)
    turned = is_row[:, None] & (pair >= 0)[None, :]
    at = turns + 2 * (row.to(tl.int64)[:, None] * pairs + pair[None, :])
    real = tl.load(at, mask=turned, other=1.0)
    imaginary = tl.load(at + 1, mask=turned, other=0.0)
    found = tl.join(
        tl.where(turned, even * real - odd * imaginary, even),
        tl.where(turned, odd * real + even * imaginary, odd),
    )
    into = out + row.to(tl.int64)[:, None] * columns + column[None, :]
    mask = is_row[:, None] & (column < columns)[None, :]
    tl.store(into, tl.reshape(found, (ROWS, COLUMNS)).to(kind), mask=mask)


def _tiles(x: Tensor, columns: int) -> dict[str, int]:
    """Sides of tiles that give every multiprocessor one, and how a program runs."""
    wide = 64 if columns >= 64 * 128 else 32 if columns >= 32 * 128 else 16
    rows = max(16, triton.next_power_of_2(len(x)))
    inner, stages = (32, 2) if x.element_size() == 4 else (128, 4)
    return {
        "ROWS": rows,
        "COLUMNS": wide,
        "INNER": inner,
        "WIDE": not x.is_cuda,
        "num_warps": 4,
        "num_stages": stages,
    }


def products(x: Tensor, weights: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """All products in one launch."""
    widths = [len(w) for w in weights]
    outs = tuple(x.new_empty(len(x), width) for width in widths)
    missing, tiles = MOST - len(weights), _tiles(x, sum(widths))
    given = [*weights, *[weights[0]] * missing], [*outs, *[outs[0]] * missing]
    grid = sum(triton.cdiv(width, tiles["COLUMNS"]) for width in widths)
    _joint[(grid,)](x, *given[0], *given[1], *widths, *[0] * missing, len(x), x.shape[1], **tiles)
    return outs


def _is_few(x: Tensor, rounding: Rounding, *weights: Tensor) -> bool:
    """Whether one launch does; else the parts do."""
    is_plain = rounding == "off" and not wants_gradient(x, *weights)
    known = {w.dtype for w in weights}
    return is_plain and x.dtype in DTYPES and known <= set(DTYPES) and 0 < len(x) <= FEW


@kernel(refuse=lambda *_, **__: None, has_backward=True)
def joint_linear(
    x: Float[Tensor, "T D"],
    weights: tuple[Tensor, ...],
    rounding: Rounding = "off",
    *,
    deterministic: bool = False,
) -> tuple[Tensor, ...]:
    """A few rows in one launch."""
    is_one = len({w.dtype for w in weights}) == 1 and len(weights) <= MOST
    if deterministic or not is_one or not _is_few(x, rounding, *weights):
        return separate_products(x, weights, rounding, deterministic=deterministic)
    return products(x.contiguous(), tuple(w.contiguous() for w in weights))


def queries(
    latent: Tensor,
    norm: Tensor,
    eps: float,
    weight: Tensor,
    table: Tensor,
    num_heads: int,
) -> tuple[Tensor, Tensor]:
    """All steps in one launch."""
    (tokens, rank), columns = latent.shape, len(weight)
    normed, out = torch.empty_like(latent), latent.new_empty(tokens, columns)
    tiles, width = _tiles(latent, columns), columns // num_heads
    _queries[(triton.cdiv(columns, tiles["COLUMNS"]),)](
        *(latent, norm, weight, torch.view_as_real(table.resolve_conj()), normed, out),
        *(tokens, rank, columns, width, table.shape[1], eps),
        **tiles,
    )
    return normed, out.view(tokens, num_heads, width)


@kernel(refuse=lambda *_, **__: None, has_backward=True)
def rotated_queries(
    latent: Float[Tensor, "T rank"],
    norm: Float[Tensor, " rank"],
    eps: float,
    weight: Float[Tensor, "columns rank"],
    table: Complex[Tensor, "T pairs"],
    num_heads: int,
    rounding: Rounding = "off",
    *,
    deterministic: bool = False,
) -> tuple[Float[Tensor, "T rank"], Float[Tensor, "T H C"]]:
    """A few rows in one launch."""
    is_even = (len(weight) // num_heads) % 2 == 0 and table.dtype == torch.complex64
    if deterministic or not is_even or not _is_few(latent, rounding, norm, weight):
        given = latent, norm, eps, weight, table, num_heads, rounding
        return composed_queries(*given, deterministic=deterministic)
    parts = norm.contiguous(), eps, weight.contiguous(), table.contiguous()
    return queries(latent.contiguous(), *parts, num_heads)
