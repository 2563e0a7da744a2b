"""Gradients of flash attention over listed rows. Report §2.3.1.

One kernel takes a query: its gradient, and per listed row the probabilities and the gradients of
the scores. A second makes a gradient per listed row of them (1.3 GB per 2048 queries of 640 rows x
512 channels), a third sums these row by row in the order of the queries. So nothing is added
atomically, and bits repeat. Products: 2.5 times those of the forward; moved: 5.4 GB written and
read again at 8192 queries, 2.5 ms.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from openv41.ops import sparse_attention_hopper_triton as hopper
from openv41.ops.listed_rows_triton import (
    LOG2E,
    Tiling,
    fits_hopper,
    forward_tiling,
    gather_rows,
    kernel_arguments,
    read_heads,
    read_list,
    scores,
)
from openv41.ops.sparse_attention import NO_SINK, READERS_AT_ONCE, Keys


def backward_tiling(q: Tensor) -> Tiling:
    """As for the forward, with the output's gradient beside the query."""
    tiling = forward_tiling(q)
    if q.element_size() == 4 or tiling.channels < 512:
        return tiling
    return tiling._replace(stages=1) if tiling.heads == 64 else tiling


def backward(
    saved: tuple[Tensor, ...],
    keys: tuple[Keys, Keys],
    scale: float,
    grad_out: Tensor,
    tiling: Tiling | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of queries, both stores and sinks, READERS_AT_ONCE queries at a time."""
    q, window_kv, main_kv, sink, out, lse = saved
    on_hopper = tiling is None and fits_hopper(q) and q.shape[1] <= 64
    tiling = tiling or backward_tiling(q)
    grad_q, mean = torch.empty_like(q), torch.empty_like(lse)
    totals = tuple(kv.new_zeros(kv.shape, dtype=torch.float32) for kv in (window_kv, main_kv))
    places = [triton.cdiv(k.listed.shape[1], tiling.rows) * tiling.rows for k in keys]
    for number, start in enumerate(range(0, len(q) if q.numel() else 0, READERS_AT_ONCE)):
        piece = slice(start, start + READERS_AT_ONCE)
        rows = keys[0].listed[piece], keys[1].listed[piece]
        part, grad = q[piece], grad_out[piece]
        weights = q.new_empty(len(part), 2, q.shape[1], sum(places))
        given = kernel_arguments(part, (window_kv, main_kv), rows, sink, scale) | {
            "out_ptr": out[piece],
            "lse_ptr": lse[piece],
            "grad_ptr": grad,
            "grad_q_ptr": grad_q[piece],
            "mean_ptr": mean[piece],
            "weights_ptr": weights,
            "first_main": places[0],
            "places": sum(places),
        }
        if on_hopper:
            hopper.differentiate[(len(part),)](**given, num_warps=8)
        else:
            grid = len(part), triton.cdiv(q.shape[1], tiling.heads)
            _backward_queries[grid](**given, **tiling.launch)
        if not sum(places):
            continue
        grads = _row_gradients(part, grad, weights)
        for k, total, first in zip(keys, totals, (0, places[0]), strict=True):
            _add_by_row(grads, k.readers[number], k.listed.shape[1], first, total)
    sink_share = torch.exp2((sink.float() * LOG2E).clamp(NO_SINK, -NO_SINK) - lse)
    grad_sink = -(sink_share * mean).sum(0).to(sink.dtype)
    return grad_q, totals[0].to(window_kv.dtype), totals[1].to(main_kv.dtype), grad_sink


def _row_gradients(q: Tensor, grad: Tensor, weights: Tensor) -> Tensor:
    """Gradient of each place of each query: [T, places, C]."""
    (count, heads, channels), places = q.shape, weights.shape[-1]
    made, is_wide = q.new_empty(count, places, channels), q.element_size() == 4
    block_c = min(triton.next_power_of_2(max(channels, 16)), 64 if is_wide else 256)
    block_h = min(max(16, triton.next_power_of_2(heads)), 16 if is_wide else 64)
    _backward_rows[count, triton.cdiv(channels, block_c)](
        q,
        grad,
        weights,
        made,
        heads,
        channels,
        places,
        BLOCK_H=block_h,
        BLOCK_C=block_c,
        BLOCK_K=16 if is_wide else min(64, places & -places),
        IS_ONE=heads <= block_h,
        num_warps=4,
        num_stages=2,
    )
    return made


def _add_by_row(grads: Tensor, readers, listed: int, first: int, total: Tensor) -> None:
    """Add the gradients of all places that read a row, in the order of the queries."""
    if not listed or not total.numel():
        return
    order, rows = readers
    starts = torch.searchsorted(rows, torch.arange(len(total) + 1, device=rows.device).to(rows))
    channels, block = total.shape[1], 128
    _sum_readers[len(total), triton.cdiv(channels, block)](
        grads,
        order,
        starts,
        total,
        listed,
        first,
        grads.shape[1],
        channels,
        BLOCK_C=block,
        BLOCK_R=16,
        num_warps=4,
    )


@triton.jit
@no_type_check
def _weigh(q, grad, kv, rows, scale, lse, mean, acc):
    """Probabilities of a block of rows, gradients of its scores, and the query's gradient."""
    p = tl.exp2(scores(q, kv, rows, scale) - lse[:, None])
    dp = tl.dot(grad, tl.trans(kv), input_precision="ieee") - mean[:, None]
    ds = (p * dp * (scale * 0.6931471805599453)).to(kv.dtype)
    return p.to(kv.dtype), ds, tl.dot(ds, kv, acc, input_precision="ieee")


@triton.jit
@no_type_check
def _backward_queries(
    out_ptr,
    lse_ptr,
    grad_ptr,
    grad_q_ptr,
    mean_ptr,
    weights_ptr,
    first_main,
    places,
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
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Gradients of a query; for the rows' gradients leave those of scores, and probabilities."""
    t = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    channels = tl.arange(0, BLOCK_C)
    q, grad = (
        read_heads(q_ptr, heads, channels, t, H, C),
        read_heads(grad_ptr, heads, channels, t, H, C),
    )
    out = read_heads(out_ptr, heads, channels, t, H, C)
    mean = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
    tl.store(mean_ptr + t * H + heads, mean, mask=heads < H)
    lse = tl.load(lse_ptr + t * H + heads, mask=heads < H, other=0.0)
    acc = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)
    into = weights_ptr + (t * 2 * H + heads[:, None]) * places + tl.arange(0, BLOCK_K)[None, :]
    present = (heads[:, None] < H) & (tl.arange(0, BLOCK_K)[None, :] >= 0)
    for start in range(0, W, BLOCK_K):
        rows = read_list(window_rows + t * W, start, W, BLOCK_K)
        kv = gather_rows(window_ptr, rows, channels, C)
        p, ds, acc = _weigh(q, grad, kv, rows, scale, lse, mean, acc)
        tl.store(into + start, ds, mask=present)
        tl.store(into + H * places + start, p, mask=present)
    for start in range(0, K, BLOCK_K):
        rows = read_list(main_rows + t * K, start, K, BLOCK_K)
        kv = gather_rows(main_ptr, rows, channels, C)
        p, ds, acc = _weigh(q, grad, kv, rows, scale, lse, mean, acc)
        tl.store(into + first_main + start, ds, mask=present)
        tl.store(into + H * places + first_main + start, p, mask=present)
    at = t * H * C + heads[:, None] * C + channels[None, :]
    inside = (heads[:, None] < H) & (channels[None, :] < C)
    tl.store(grad_q_ptr + at, acc.to(grad_q_ptr.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def _add_place(weights_ptr, t, start, heads, q, grad, acc, H, places, BLOCK_K: tl.constexpr):
    """Add what some heads want of a block of places."""
    at = start + tl.arange(0, BLOCK_K)
    from_ds = weights_ptr + (t * 2 * H + heads[:, None]) * places + at[None, :]
    present = (heads[:, None] < H) & (at[None, :] < places)
    ds = tl.load(from_ds, mask=present, other=0.0)
    p = tl.load(from_ds + H * places, mask=present, other=0.0)
    acc = tl.dot(tl.trans(ds), q, acc, input_precision="ieee")
    return tl.dot(tl.trans(p), grad, acc, input_precision="ieee")


@triton.jit
@no_type_check
def _write_place(out_ptr, t, start, channels, acc, places, C, BLOCK_K: tl.constexpr):
    at = start + tl.arange(0, BLOCK_K)
    into = out_ptr + (t * places + at[:, None]) * C + channels[None, :]
    inside = (at[:, None] < places) & (channels[None, :] < C)
    tl.store(into, acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def _backward_rows(
    q_ptr,
    grad_ptr,
    weights_ptr,
    out_ptr,
    H,
    C,
    places,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_ONE: tl.constexpr,
):
    """Gradient of every place of a query: sums over heads, for a slice of the channels."""
    t = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    if IS_ONE:  # all heads at once: they are read once for all places
        heads = tl.arange(0, BLOCK_H)
        q = read_heads(q_ptr, heads, channels, t, H, C)
        grad = read_heads(grad_ptr, heads, channels, t, H, C)
        for start in range(0, places, BLOCK_K):
            acc = tl.zeros([BLOCK_K, BLOCK_C], tl.float32)
            acc = _add_place(weights_ptr, t, start, heads, q, grad, acc, H, places, BLOCK_K)
            _write_place(out_ptr, t, start, channels, acc, places, C, BLOCK_K)
    else:
        for start in range(0, places, BLOCK_K):
            acc = tl.zeros([BLOCK_K, BLOCK_C], tl.float32)
            for first in range(0, H, BLOCK_H):
                heads = first + tl.arange(0, BLOCK_H)
                q = read_heads(q_ptr, heads, channels, t, H, C)
                grad = read_heads(grad_ptr, heads, channels, t, H, C)
                acc = _add_place(weights_ptr, t, start, heads, q, grad, acc, H, places, BLOCK_K)
            _write_place(out_ptr, t, start, channels, acc, places, C, BLOCK_K)


@triton.jit
@no_type_check
def _sum_readers(
    grads_ptr,
    order_ptr,
    starts_ptr,
    total_ptr,
    listed,
    first,
    places,
    C,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Add to a row of a store what all places that read it want of it."""
    row = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    start, stop = tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)
    if start < stop:
        acc = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
        for begin in range(start, stop, BLOCK_R):
            at = begin + tl.arange(0, BLOCK_R)
            reader = tl.load(order_ptr + at, mask=at < stop, other=0).to(tl.int64)
            place = (reader // listed) * places + first + reader % listed
            inside = (at[:, None] < stop) & (channels[None, :] < C)
            found = tl.load(
                grads_ptr + place[:, None] * C + channels[None, :], mask=inside, other=0.0
            )
            acc += found.to(tl.float32)
        into = total_ptr + row * C + channels
        known = tl.load(into, mask=channels < C, other=0.0)
        tl.store(into, known + tl.sum(acc, 0), mask=channels < C)
