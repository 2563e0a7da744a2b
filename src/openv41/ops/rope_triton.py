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
    PAIRS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = (row < rows)[:, None]
    start = width - 2 * pairs
    column = tl.arange(0, COLUMNS)
    place = row[:, None] * width + column[None, :]
    mask = is_row & (column < start)[None, :]
    tl.store(out + place, tl.load(x + place, mask=mask, other=0.0), mask=mask)
    pair = tl.arange(0, PAIRS)
    mask = is_row & (pair < pairs)[None, :]
    place = row[:, None] * width + start + 2 * pair[None, :]
    a = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x + place + 1, mask=mask, other=0.0).to(tl.float32)
    turn = table + 2 * ((row // heads)[:, None] * pairs + pair[None, :])
    real = tl.load(turn, mask=mask, other=1.0)
    imaginary = tl.load(turn + 1, mask=mask, other=0.0)
    if BACK:
        imaginary = -imaginary
    tl.store(out + place, (a * real - b * imaginary).to(out.dtype.element_ty), mask=mask)
    tl.store(out + place + 1, (b * real + a * imaginary).to(out.dtype.element_ty), mask=mask)


def turn(x: Tensor, table: Tensor, *, back: bool) -> Tensor:
    """Rotate contiguous rows by a real table [T, pairs, 2], or back."""
    out, width, pairs = torch.empty_like(x), x.shape[-1], table.shape[1]
    if not out.numel():
        return out
    rows, columns = x.numel() // width, triton.next_power_of_2(max(1, width - 2 * pairs))
    each = max(1, min(VALUES // columns, 32))
    _rotate[(triton.cdiv(rows, each),)](
        x,
        table,
        out,
        rows,
        rows // len(x),
        width,
        pairs,
        BACK=back,
        ROWS=each,
        COLUMNS=columns,
        PAIRS=triton.next_power_of_2(max(1, pairs)),
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
