"""Kernels that copy tokens to their experts' rows and sum these rows again. Report §2.1.1.

Each is the other's gradient; a token's sum is over its pairs in their order, without atomics.
The floor of both is that of reading and writing pairs x D values once.
"""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from openv41.ops._dispatch import kernel, wants_gradient

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
COLUMNS = 1024  # of a row, that a program copies


@triton.jit
@no_type_check
def _take(x, order, out, width, TOP_K: tl.constexpr, COLUMNS: tl.constexpr):
    pair = tl.program_id(0).to(tl.int64)
    token = tl.load(order + pair) // TOP_K
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    value = tl.load(x + token * width + column, mask=column < width, other=0.0)
    tl.store(out + pair * width + column, value.to(out.dtype.element_ty), mask=column < width)


@triton.jit
@no_type_check
def _place(order, place, pairs, BLOCK: tl.constexpr):
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(order + pair, mask=pair < pairs, other=0)
    tl.store(place + target, pair, mask=pair < pairs)


@triton.jit
@no_type_check
def _combine(rows, place, out, width, TOP_K: tl.constexpr, COLUMNS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for choice in range(TOP_K):
        row = tl.load(place + token * TOP_K + choice).to(tl.int64)
        value = tl.load(rows + row * width + column, mask=column < width, other=0.0)
        total += value.to(tl.float32)
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=column < width)


def take(x: Tensor, order: Tensor, top_k: int, dtype: torch.dtype) -> Float[Tensor, "pairs D"]:
    """The token of each pair, as ``dtype``."""
    width = x.shape[1]
    out = x.new_empty(len(order), width, dtype=dtype)
    if out.numel():
        columns = min(COLUMNS, triton.next_power_of_2(width))
        grid = len(order), triton.cdiv(width, columns)
        _take[grid](x, order, out, width, TOP_K=top_k, COLUMNS=columns)
    return out


def add_up(rows: Tensor, order: Tensor, top_k: int, dtype: torch.dtype) -> Float[Tensor, "T D"]:
    """Sum of each token's pairs, as ``dtype``."""
    width, pairs = rows.shape[1], len(order)
    out = rows.new_empty(pairs // top_k, width, dtype=dtype)
    if out.numel():
        place = torch.empty_like(order, dtype=torch.int32)
        _place[(triton.cdiv(pairs, 1024),)](order, place, pairs, BLOCK=1024)
        columns = min(COLUMNS, triton.next_power_of_2(width))
        grid = len(out), triton.cdiv(width, columns)
        _combine[grid](rows, place, out, width, TOP_K=top_k, COLUMNS=columns)
    return out


class _TakePairs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.top_k = top_k
        return take(x, order, top_k, x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return add_up(grad.contiguous(), ctx.saved_tensors[0], ctx.top_k, grad.dtype), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: Tensor, order: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.top_k, ctx.dtype = top_k, outputs.dtype
        return add_up(outputs, order, top_k, torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return take(grad.contiguous(), ctx.saved_tensors[0], ctx.top_k, ctx.dtype), None, None


def _reason(rows: Tensor, order: Tensor) -> str | None:
    if rows.dtype not in DTYPES:
        return f"rows are {rows.dtype}"
    return f"there are {len(order)} pairs" if len(order) >= 1 << 31 else None


@kernel(refuse=lambda x, order, top_k: _reason(x, order), has_backward=True)
def take_pairs(
    x: Float[Tensor, "T D"], order: Int[Tensor, " pairs"], top_k: int
) -> Float[Tensor, "pairs D"]:
    """The token of each pair, in this order."""
    x = x.contiguous()
    if wants_gradient(x):
        found: Tensor = _TakePairs.apply(x, order, top_k)
        return found
    return take(x, order, top_k, x.dtype)


@kernel(refuse=lambda outputs, order, top_k: _reason(outputs, order), has_backward=True)
def combine(
    outputs: Float[Tensor, "pairs D"], order: Int[Tensor, " pairs"], top_k: int
) -> Float[Tensor, "T D"]:
    """Undo ``order`` and sum each token's pairs, in float32."""
    outputs = outputs.contiguous()
    if wants_gradient(outputs):
        found: Tensor = _Combine.apply(outputs, order, top_k)
        return found
    return add_up(outputs, order, top_k, torch.float32)
