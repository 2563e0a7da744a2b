"""Flash attention over listed rows, forward and backward. Report §2.3.1.

A program holds the heads of one query and reads each listed row once, for scores and sums. Its
work is 4 H C operations per listed row: 8192 queries of 64 heads x 512 over 640 rows are 687 GF,
872 us at 788 TFLOP/s forward and 2.5 times that backward. The backward writes a gradient per
listed row (1.3 GB per 2048 queries) and sums them row by row in the order of the queries, so it
needs no atomics and repeats its bits.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from openv41.ops._dispatch import kernel, wants_gradient
from openv41.ops.sparse_attention import NO_SINK, READERS_AT_ONCE, Keys

LOG2E = 1.4426950408889634
DTYPES = (torch.float32, torch.bfloat16)
WIDEST = 512  # channels of a row that fit in a program
NONE: tl.constexpr = tl.constexpr(NO_SINK)


class Tiling(NamedTuple):
    """Sizes of a program: heads and channels padded to powers of two, rows read at a time."""

    heads: int
    channels: int
    rows: int
    warps: int
    stages: int

    @property
    def launch(self) -> dict[str, int]:
        """Keyword arguments of a launch."""
        return {
            "BLOCK_H": self.heads,
            "BLOCK_C": self.channels,
            "BLOCK_K": self.rows,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


def forward_tiling(q: Tensor) -> Tiling:
    """Choose from heads, width and dtype alone, so that a query's bits depend on nothing else."""
    heads, channels = _padded(q)
    if q.element_size() == 4:
        return Tiling(min(heads, 16), channels, 16, 4, 1)
    if channels < 512:
        return Tiling(heads, channels, 64, 4, 2)
    return Tiling(heads, channels, 64, 8, 2) if heads == 64 else Tiling(heads, channels, 32, 4, 2)


def backward_tiling(q: Tensor) -> Tiling:
    """As for the forward, with the output's gradient beside the query."""
    tiling = forward_tiling(q)
    if q.element_size() == 4 or tiling.channels < 512:
        return tiling
    return tiling._replace(stages=1) if tiling.heads == 64 else tiling


def _padded(q: Tensor) -> tuple[int, int]:
    heads, channels = (max(16, triton.next_power_of_2(n)) for n in q.shape[1:])
    return min(heads, 64), channels


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
    stores = _contiguous(window_kv), _contiguous(main_kv)
    if wants_gradient(q, window_kv, main_kv, sink):
        out: Tensor = _SparseAttention.apply(
            _contiguous(q), *stores, sink, window_keys, main_keys, scale
        )
        return out
    return forward(_contiguous(q), stores, (window_keys, main_keys), sink, scale)[0]


@kernel(refuse=_refuse)
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
    q, stores = _contiguous(q), (_contiguous(window_kv), _contiguous(main_kv))
    tiling = forward_tiling(q)
    blocks = triton.cdiv(q.shape[1], tiling.heads)
    found = q.new_empty(len(q), blocks, main_rows.shape[1], dtype=torch.float32)
    if found.numel():
        arguments = _arguments(q, stores, (window_keys.listed, main_rows), sink, scale)
        _mass[len(q), blocks](*arguments, found, **tiling.launch)
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
    tiling = tiling or forward_tiling(q)
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
    if out.numel():
        grid = len(q), triton.cdiv(q.shape[1], tiling.heads)
        rows = keys[0].listed, keys[1].listed
        _forward[grid](*_arguments(q, stores, rows, sink, scale), out, lse, **tiling.launch)
    return out, lse


def backward(
    saved: tuple[Tensor, ...],
    keys: tuple[Keys, Keys],
    scale: float,
    grad_out: Tensor,
    tiling: Tiling | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of queries, both stores and sinks, READERS_AT_ONCE queries at a time."""
    q, window_kv, main_kv, sink, out, lse = saved
    tiling = tiling or backward_tiling(q)
    grad_q, mean = torch.empty_like(q), torch.empty_like(lse)
    totals = tuple(kv.new_zeros(kv.shape, dtype=torch.float32) for kv in (window_kv, main_kv))
    places = [triton.cdiv(k.listed.shape[1], tiling.rows) * tiling.rows for k in keys]
    for number, start in enumerate(range(0, len(q) if q.numel() else 0, READERS_AT_ONCE)):
        piece = slice(start, start + READERS_AT_ONCE)
        rows = keys[0].listed[piece], keys[1].listed[piece]
        part, grad = q[piece], grad_out[piece]
        weights = q.new_empty(len(part), 2, q.shape[1], sum(places))
        _backward_queries[len(part), triton.cdiv(q.shape[1], tiling.heads)](
            *_arguments(part, (window_kv, main_kv), rows, sink, scale),
            out[piece],
            lse[piece],
            grad,
            grad_q[piece],
            mean[piece],
            weights,
            places[0],
            sum(places),
            **tiling.launch,
        )
        if not sum(places):
            continue
        grads = _row_gradients(part, grad, weights)
        for k, total, first in zip(keys, totals, (0, places[0]), strict=True):
            _add_by_row(grads, k.readers[number], k.listed.shape[1], first, total)
    sink_share = torch.exp2(sink.float().clamp(NO_SINK, -NO_SINK) * LOG2E - lse)
    grad_sink = -(sink_share * mean).sum(0).to(sink.dtype)
    return grad_q, totals[0].to(window_kv.dtype), totals[1].to(main_kv.dtype), grad_sink


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


def _contiguous(x: Tensor) -> Tensor:
    return x if x.is_contiguous() else x.contiguous()


def _arguments(q, stores, rows, sink, scale) -> tuple[Any, ...]:
    """What every kernel over queries and their rows begins with."""
    lists = [part.contiguous() for part in rows]
    counts = [part.shape[1] for part in lists]
    return (q, *stores, *lists, *counts, sink, scale * LOG2E, *q.shape[1:])


def _row_gradients(q: Tensor, grad: Tensor, weights: Tensor) -> Tensor:
    """Gradient of each place of each query: [T, places, C]."""
    (count, heads, channels), places = q.shape, weights.shape[-1]
    made = q.new_empty(count, places, channels)
    block_c = min(triton.next_power_of_2(max(channels, 16)), 256)
    _backward_rows[count, triton.cdiv(channels, block_c)](
        q,
        grad,
        weights,
        made,
        heads,
        channels,
        places,
        BLOCK_H=min(max(16, triton.next_power_of_2(heads)), 64 if q.element_size() == 2 else 16),
        BLOCK_C=block_c if q.element_size() == 2 else min(block_c, 64),
        BLOCK_K=16 if q.element_size() == 4 else min(64, places & -places),
        num_warps=8 if block_c == 256 else 4,
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
def read_heads(base, heads, channels, row, H, C):
    """Read a [heads, channels] tile of one query; padding is zero."""
    at = base + row * H * C + heads[:, None] * C + channels[None, :]
    return tl.load(at, mask=(heads[:, None] < H) & (channels[None, :] < C), other=0.0)


@triton.jit
@no_type_check
def read_list(rows_ptr, start, K, BLOCK_K: tl.constexpr):
    """Read a block of a query's list; -1 behind its end."""
    at = start + tl.arange(0, BLOCK_K)
    return tl.load(rows_ptr + at, mask=at < K, other=-1)


@triton.jit
@no_type_check
def _gather(kv_ptr, rows, channels, C):
    """Read rows of a store; row -1 reads zeros, whatever the store holds."""
    at = kv_ptr + rows.to(tl.int64)[:, None] * C + channels[None, :]
    return tl.load(at, mask=(rows[:, None] >= 0) & (channels[None, :] < C), other=0.0)


@triton.jit
@no_type_check
def _scores(q, kv, rows, scale):
    """Scaled products in base 2; -inf where there is no row."""
    products = tl.dot(q, tl.trans(kv), input_precision="ieee") * scale
    return tl.where(rows[None, :] >= 0, products, -float("inf"))


@triton.jit
@no_type_check
def _fold(q, kv, rows, scale, top, total, acc):
    """Take a block of rows into a running softmax."""
    s = _scores(q, kv, rows, scale)
    new = tl.maximum(top, tl.max(s, 1))
    p = tl.exp2(s - new[:, None])
    shrink = tl.exp2(top - new)
    acc = tl.dot(p.to(kv.dtype), kv, acc * shrink[:, None], input_precision="ieee")
    return new, total * shrink + tl.sum(p, 1), acc


@triton.jit
@no_type_check
def join_sink(sink_ptr, heads, H, top, total):
    """Factor of the sums and logarithm of the denominator, once the sink has joined it."""
    sink = tl.load(sink_ptr + heads, mask=heads < H, other=0.0).to(tl.float32)
    sink = tl.minimum(tl.maximum(sink, NONE), -NONE) * 1.4426950408889634
    new = tl.maximum(top, sink)
    shrink = tl.exp2(top - new)
    total = total * shrink + tl.exp2(sink - new)
    return shrink / total, new + tl.log2(total)


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
        kv = _gather(window_ptr, rows, channels, C)
        top, total, acc = _fold(q, kv, rows, scale, top, total, acc)
    for start in range(0, K, BLOCK_K):
        rows = read_list(main_rows + t * K, start, K, BLOCK_K)
        kv = _gather(main_ptr, rows, channels, C)
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
    s = _scores(q, kv, rows, scale)
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
        kv = _gather(window_ptr, rows, channels, C)
        top, total = _count(q, kv, rows, scale, top, total)
    for start in range(0, K, BLOCK_K):
        rows = read_list(main_rows + t * K, start, K, BLOCK_K)
        kv = _gather(main_ptr, rows, channels, C)
        top, total = _count(q, kv, rows, scale, top, total)
    _, lse = join_sink(sink_ptr, heads, H, top, total)
    into = out_ptr + (t * tl.num_programs(1) + tl.program_id(1)) * K
    for start in range(0, K, BLOCK_K):
        rows = read_list(main_rows + t * K, start, K, BLOCK_K)
        kv = _gather(main_ptr, rows, channels, C)
        p = tl.exp2(_scores(q, kv, rows, scale) - lse[:, None])
        p = tl.sum(tl.where(heads[:, None] < H, p, 0.0), 0)
        at = start + tl.arange(0, BLOCK_K)
        tl.store(into + at, p, mask=at < K)


@triton.jit
@no_type_check
def _weigh(q, grad, kv, rows, scale, lse, mean, acc):
    """Probabilities of a block of rows, gradients of its scores, and the query's gradient."""
    p = tl.exp2(_scores(q, kv, rows, scale) - lse[:, None])
    dp = tl.dot(grad, tl.trans(kv), input_precision="ieee") - mean[:, None]
    ds = (p * dp * (scale * 0.6931471805599453)).to(kv.dtype)
    return p.to(kv.dtype), ds, tl.dot(ds, kv, acc, input_precision="ieee")


@triton.jit
@no_type_check
def _backward_queries(
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
    grad_ptr,
    grad_q_ptr,
    mean_ptr,
    weights_ptr,
    first_main,
    places,
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
        kv = _gather(window_ptr, rows, channels, C)
        p, ds, acc = _weigh(q, grad, kv, rows, scale, lse, mean, acc)
        tl.store(into + start, ds, mask=present)
        tl.store(into + H * places + start, p, mask=present)
    for start in range(0, K, BLOCK_K):
        rows = read_list(main_rows + t * K, start, K, BLOCK_K)
        kv = _gather(main_ptr, rows, channels, C)
        p, ds, acc = _weigh(q, grad, kv, rows, scale, lse, mean, acc)
        tl.store(into + first_main + start, ds, mask=present)
        tl.store(into + H * places + first_main + start, p, mask=present)
    at = t * H * C + heads[:, None] * C + channels[None, :]
    inside = (heads[:, None] < H) & (channels[None, :] < C)
    tl.store(grad_q_ptr + at, acc.to(grad_q_ptr.dtype.element_ty), mask=inside)


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
):
    """Gradient of every place of a query: sums over heads, for a slice of the channels."""
    t = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    for start in range(0, places, BLOCK_K):
        at = start + tl.arange(0, BLOCK_K)
        acc = tl.zeros([BLOCK_K, BLOCK_C], tl.float32)
        for first in range(0, H, BLOCK_H):
            heads = first + tl.arange(0, BLOCK_H)
            from_ds = weights_ptr + (t * 2 * H + heads[:, None]) * places + at[None, :]
            present = (heads[:, None] < H) & (at[None, :] < places)
            ds = tl.load(from_ds, mask=present, other=0.0)
            p = tl.load(from_ds + H * places, mask=present, other=0.0)
            q = read_heads(q_ptr, heads, channels, t, H, C)
            grad = read_heads(grad_ptr, heads, channels, t, H, C)
            acc = tl.dot(tl.trans(ds), q, acc, input_precision="ieee")
            acc = tl.dot(tl.trans(p), grad, acc, input_precision="ieee")
        into = out_ptr + (t * places + at[:, None]) * C + channels[None, :]
        inside = (at[:, None] < places) & (channels[None, :] < C)
        tl.store(into, acc.to(out_ptr.dtype.element_ty), mask=inside)


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
