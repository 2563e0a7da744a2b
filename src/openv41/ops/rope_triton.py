"""Kernel of the rotary embedding: copies the row, rotates its tail. Report §2.3.

Its gradient is the rotation back, by the same kernel. The floor is that of reading and writing
every value once.
"""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Complex, Float
from torch import Tensor

from openv41.ops._dispatch import kernel, wants_gradient

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDEST = 16384  # channels that a program holds
VALUES = 4096  # of a tile


@triton.jit
@no_type_check
def _rotate(
    x,
    table,
    out,
    rows,
    heads,
    width,
    pairs,
    BACK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    start = width - 2 * pairs
    place = row[:, None] * width + column[None, :]
    mask = (row < rows)[:, None] & (column < width)[None, :]
    turns = mask & (column >= start)[None, :]
    value = tl.load(x + place, mask=mask, other=0.0)
    other_column = start + ((column - start) ^ 1)
    other = tl.load(x + row[:, None] * width + other_column[None, :], mask=turns, other=0.0)
    of_token = (row // heads)[:, None] * pairs + ((column - start) // 2)[None, :]
    real = tl.load(table + 2 * of_token, mask=turns, other=1.0)
    imaginary = tl.load(table + 2 * of_token + 1, mask=turns, other=0.0)
    is_first = ((column - start) % 2 == 0)[None, :]
    sign = tl.where(is_first, -1.0, 1.0)
    if BACK:
        sign = -sign
    turned = value.to(tl.float32) * real + other.to(tl.float32) * imaginary * sign
    found = tl.where(turns, turned.to(out.dtype.element_ty), value)
    tl.store(out + place, found, mask=mask)


def turn(x: Tensor, table: Tensor, *, back: bool) -> Tensor:
    """Rotate contiguous rows by a real table [T, pairs, 2], or back."""
    out, width = torch.empty_like(x), x.shape[-1]
    if not out.numel():
        return out
    rows, columns = x.numel() // width, triton.next_power_of_2(width)
    each = max(1, min(VALUES // columns, 32))
    _rotate[(triton.cdiv(rows, each),)](
        x,
        table,
        out,
        rows,
        rows // len(x),
        width,
        table.shape[1],
        BACK=back,
        ROWS=each,
        COLUMNS=columns,
        num_warps=4,
    )
    return out


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(table)
        return turn(x, table, back=False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return turn(grad.contiguous(), ctx.saved_tensors[0], back=True), None


def _refuse(x: Tensor, table: Tensor, *, deterministic: bool = False) -> str | None:
    if deterministic:
        return "deterministic mode rounds each real product"
    if x.dtype not in DTYPES or table.dtype != torch.complex64:
        return f"inputs are {x.dtype} and {table.dtype}"
    return f"{x.shape[-1]} channels are more than {WIDEST}" if x.shape[-1] > WIDEST else None


@kernel(refuse=_refuse, has_backward=True)
def rotate(
    x: Float[Tensor, "T ... C"],
    table: Complex[Tensor, "T pairs"],
    *,
    deterministic: bool = False,
) -> Float[Tensor, "T ... C"]:
    """Rotate the last R channels of each row, as adjacent pairs, in float32."""
    assert not deterministic, "refused"
    x, real = x.contiguous(), torch.view_as_real(table.resolve_conj()).contiguous()
    if wants_gradient(x):
        found: Tensor = _Rotate.apply(x, real)
        return found
    return turn(x, real, back=False)
