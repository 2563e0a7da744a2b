"""Flash attention over listed rows, forward and backward. Report §2.3.1.

A program holds the heads of one query and reads each listed row once, for scores and sums. Its
work is 4 H C operations per listed row: 8192 queries of 64 heads x 512 over 640 rows are 687 GF,
872 us at 788 TFLOP/s.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from openv41.ops import sparse_attention_hopper_triton as hopper
from openv41.ops._dispatch import kernel, wants_gradient
from openv41.ops.listed_rows_triton import (
    NONE,
    Tiling,
    contiguous,
    fits_hopper,
    forward_tiling,
    gather_rows,
    join_sink,
    kernel_arguments,
    read_heads,
    read_list,
    scores,
)
from openv41.ops.sparse_attention import Keys
from openv41.ops.sparse_attention_backward_triton import backward

DTYPES = (torch.float32, torch.bfloat16)
WIDEST = 512  # channels of a row that fit in a program


def _refuse(q, window_kv, window_keys, main_kv, main_keys, sink, scale, **_) -> str | None:
    """Say what the kernel cannot take."""
    listed = [k.listed if isinstance(k, Keys) else k for k in (window_keys, main_keys)]
    if q.dtype not in DTYPES or {window_kv.dtype, main_kv.dtype} != {q.dtype}:
        return f"queries are {q.dtype}, keys {window_kv.dtype} and {main_kv.dtype}"
    if q.shape[2] > WIDEST:
        return f"a row has {q.shape[2]} channels, more than {WIDEST}"
    if not all(rows.is_cuda for rows in (*listed, q)):
        return "an input is not on a CUDA device"
    return None


@kernel(refuse=_refuse, has_backward=True)
def sparse_attention(
    q: Tensor,
    window_kv: Tensor,
    window_keys: Keys,
    main_kv: Tensor,
    main_keys: Keys,
    sink: Tensor,
    scale: float,
    *,
    deterministic: bool = False,
) -> Tensor:
    """Read each listed row once; keep the logarithms of the denominators for the backward."""
    stores = contiguous(window_kv), contiguous(main_kv)
    if wants_gradient(q, window_kv, main_kv, sink):
        out: Tensor = _SparseAttention.apply(
            contiguous(q), *stores, sink, window_keys, main_keys, scale
        )
        return out
    return forward(contiguous(q), stores, (window_keys, main_keys), sink, scale)[0]


@kernel(refuse=_refuse, has_backward=True)  # the op has no gradient
@torch.no_grad()
def attention_mass(
    q: Tensor,
    window_kv: Tensor,
    window_keys: Keys,
    main_kv: Tensor,
    main_rows: Tensor,
    sink: Tensor,
    scale: float,
) -> Tensor:
    """Two passes over the scores: denominators, then probabilities summed over the heads."""
    q, stores = contiguous(q), (contiguous(window_kv), contiguous(main_kv))
    tiling = forward_tiling(q)
    blocks = triton.cdiv(q.shape[1], tiling.heads)
    found = q.new_empty(len(q), blocks, main_rows.shape[1], dtype=torch.float32)
    if found.numel():
        given = kernel_arguments(q, stores, (window_keys.listed, main_rows), sink, scale)
        _mass[len(q), blocks](**given, out_ptr=found, **tiling.launch)
    return found[:, 0] if blocks == 1 else found.sum(1)


def forward(
    q: Tensor,
    stores: tuple[Tensor, Tensor],
    keys: tuple[Keys, Keys],
    sink: Tensor,
    scale: float,
    tiling: Tiling | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention, and the base-2 logarithm of its denominator per query and head."""
    on_hopper, tiling = tiling is None and fits_hopper(q), tiling or forward_tiling(q)
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
    grid, rows = (len(q), triton.cdiv(q.shape[1], tiling.heads)), (keys[0].listed, keys[1].listed)
    given = kernel_arguments(q, stores, rows, sink, scale)
    if out.numel() and on_hopper:
        hopper.attend[grid](**given, out_ptr=out, lse_ptr=lse, NONE=NONE.value, num_warps=8)
    elif out.numel():
        _forward[grid](**given, out_ptr=out, lse_ptr=lse, **tiling.launch)
    return out, lse


class _SparseAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q, window_kv, main_kv, sink, window_keys, main_keys, scale):
        keys = window_keys, main_keys
        out, lse = forward(q, (window_kv, main_kv), keys, sink, scale)
        ctx.save_for_backward(q, window_kv, main_kv, sink, out, lse)
        ctx.keys, ctx.scale = keys, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad_out):
        grads = backward(ctx.saved_tensors, ctx.keys, ctx.scale, grad_out.contiguous())
        return *grads, None, None, None


@triton.jit
@no_type_check
def _fold(q, kv, rows, scale, top, total, acc):
    """Take a block of rows into a running softmax."""
    s = scores(q, kv, rows, scale)
    new = tl.maximum(top, tl.max(s, 1))
    p = tl.exp2(s - new[:, None])
    shrink = tl.exp2(top - new)
    acc = tl.dot(p.to(kv.dtype), kv, acc * shrink[:, None], input_precision="ieee")
    return new, total * shrink + tl.sum(p, 1), acc


@triton.jit
@no_type_check
def _forward(
    q_ptr,
    window_ptr,
    main_ptr,
    window_rows,
    main_rows,
    W,
    K,
    sink_ptr,
    scale,
    H,
    C,
    out_ptr,
    lse_ptr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    channels = tl.arange(0, BLOCK_C)
    q = read_heads(q_ptr, heads, channels, t, H, C)
    top = tl.full([BLOCK_H], 2 * NONE, tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)
    for start in range(0, W, BLOCK_K):
        rows = read_list(window_rows + t * W, start, W, BLOCK_K)
        kv = gather_rows(window_ptr, rows, channels, C)
        top, total, acc = _fold(q, kv, rows, scale, top, total, acc)
    for start in range(0, K, BLOCK_K):
        rows = read_list(main_rows + t * K, start, K, BLOCK_K)
        kv = gather_rows(main_ptr, rows, channels, C)
        top, total, acc = _fold(q, kv, rows, scale, top, total, acc)
    factor, lse = join_sink(sink_ptr, heads, H, top, total)
    at = t * H * C + heads[:, None] * C + channels[None, :]
    inside = (heads[:, None] < H) & (channels[None, :] < C)
    tl.store(out_ptr + at, (acc * factor[:, None]).to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(lse_ptr + t * H + heads, lse, mask=heads < H)


@triton.jit
@no_type_check
def _count(q, kv, rows, scale, top, total):
    """Take a block of rows into a running denominator."""
    s = scores(q, kv, rows, scale)
    new = tl.maximum(top, tl.max(s, 1))
    return new, total * tl.exp2(top - new) + tl.sum(tl.exp2(s - new[:, None]), 1)


@triton.jit
@no_type_check
def _mass(
    q_ptr,
    window_ptr,
    main_ptr,
    window_rows,
    main_rows,
    W,
    K,
    sink_ptr,
    scale,
    H,
    C,
    out_ptr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    channels = tl.arange(0, BLOCK_C)
    q = read_heads(q_ptr, heads, channels, t, H, C)
    top = tl.full([BLOCK_H], 2 * NONE, tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    for start in range(0, W, BLOCK_K):
        rows = read_list(window_rows + t * W, start, W, BLOCK_K)
        kv = gather_rows(window_ptr, rows, channels, C)
        top, total = _count(q, kv, rows, scale, top, total)
    for start in range(0, K, BLOCK_K):
        rows = read_list(main_rows + t * K, start, K, BLOCK_K)
        kv = gather_rows(main_ptr, rows, channels, C)
        top, total = _count(q, kv, rows, scale, top, total)
    _, lse = join_sink(sink_ptr, heads, H, top, total)
    into = out_ptr + (t * tl.num_programs(1) + tl.program_id(1)) * K
    for start in range(0, K, BLOCK_K):
        rows = read_list(main_rows + t * K, start, K, BLOCK_K)
        kv = gather_rows(main_ptr, rows, channels, C)
        p = tl.exp2(scores(q, kv, rows, scale) - lse[:, None])
        p = tl.sum(tl.where(heads[:, None] < H, p, 0.0), 0)
        at = start + tl.arange(0, BLOCK_K)
        tl.store(into + at, p, mask=at < K)
