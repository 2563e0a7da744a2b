"""Forward and backward for 64 heads of 512 channels on Hopper, layouts chosen. Report §2.3.1.

As in the packed kernel both warpgroups share the columns of the scores. A block of rows is copied
into one buffer while the matrix units work on the other: 64 rows take about 3,400 cycles of
products and softmax, and 2,700 of copying out of L2. The backward has room for one buffer.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from openv41.ops.packed_sparse_attention_hopper_triton import list_block, softmax

_H: gl.constexpr = gl.constexpr(64)
_C: gl.constexpr = gl.constexpr(512)  # the channels, as C
_K: gl.constexpr = gl.constexpr(64)
_ROW: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
_SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16])
_SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16])
_SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@gluon.jit
@no_type_check
def _copy(kv_ptr, rows_ptr, block, count, into):
    """Start to copy a block of listed rows; absent ones become zero."""
    rows = list_block(rows_ptr, block, count, gl.SliceLayout(1, _ROW))
    columns = gl.arange(0, _C, gl.SliceLayout(0, _ROW))
    at = kv_ptr + rows.to(gl.int64)[:, None] * _C + columns[None, :]
    async_copy.async_copy_global_to_shared(into, at, mask=(rows >= 0)[:, None])


@gluon.jit
@no_type_check
def _copy_block(stores, lists, block, near, into):
    if block < near:
        _copy(stores[0], lists[0], block, lists[1], into)
    else:
        _copy(stores[1], lists[2], block - near, lists[3], into)
    async_copy.commit_group()


@gluon.jit
@no_type_check
def _present(lists, block, near):
    """Which places of a block name a row."""
    near_rows = list_block(lists[0], block, lists[1], gl.SliceLayout(0, _SCORES))
    far_rows = list_block(lists[2], block - near, lists[3], gl.SliceLayout(0, _SCORES))
    return (near_rows >= 0) | (far_rows >= 0)


@gluon.jit
@no_type_check
def _sums(stores, lists, scale, q, kv, p_shared, NONE: gl.constexpr):
    """Attention over the lists of one query, not yet divided."""
    near, far = (lists[1] + _K - 1) // _K, (lists[3] + _K - 1) // _K
    top = gl.full([_H], 2 * NONE, gl.float32, gl.SliceLayout(1, _SCORES))
    none = gl.full([_H, _K], 0.0, gl.float32, _SCORES)
    acc, total = gl.full([_H, _C], 0.0, gl.float32, _SUMS), none
    _copy_block(stores, lists, 0, near, kv.index(0))
    for block in range(near + far):
        async_copy.wait_group(0)
        fence_async_shared()
        now = kv.index(block & 1)
        s = warpgroup_mma(q, now.permute((1, 0)), none, use_acc=False, is_async=True)
        _copy_block(stores, lists, block + 1, near, kv.index((block + 1) & 1))
        present = _present(lists, block, near)
        s = warpgroup_mma_wait(0, deps=(s,))
        p, shrink, top, total = softmax(s, present, scale, top, total)
        p_shared.store(p.to(gl.bfloat16))
        fence_async_shared()
        shrink = gl.convert_layout(shrink, gl.SliceLayout(1, _SUMS))[:, None]
        acc = warpgroup_mma(p_shared, now, acc * shrink, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
    async_copy.wait_group(0)
    return acc, top, gl.sum(total, 1)


@gluon.jit
@no_type_check
def attend(
    lse_ptr,
    out_ptr,
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
    C: gl.constexpr,
    NONE: gl.constexpr,
):
    """As ``_forward`` of the kernel for every size; a program per query and 64 heads."""
    t, first = gl.program_id(0).to(gl.int64), gl.program_id(1) * _H
    q = gl.allocate_shared_memory(gl.bfloat16, [_H, _C], _SHARED)
    kv = gl.allocate_shared_memory(gl.bfloat16, [2, _K, _C], _SHARED)
    p_shared = gl.allocate_shared_memory(gl.bfloat16, [_H, _K], _SHARED)
    heads = first + gl.arange(0, _H, gl.SliceLayout(1, _ROW))
    columns = gl.arange(0, _C, gl.SliceLayout(0, _ROW))
    at, inside = (t * H + heads)[:, None] * _C + columns[None, :], (heads < H)[:, None]
    q.store(gl.load(q_ptr + at, mask=inside, other=0.0))
    lists = window_rows + t * W, W, main_rows + t * K, K
    acc, top, total = _sums((window_ptr, main_ptr), lists, scale, q, kv, p_shared, NONE)
    row = first + gl.arange(0, _H, gl.SliceLayout(1, _SCORES))
    sink = gl.load(sink_ptr + row, mask=row < H, other=0.0).to(gl.float32)
    sink = gl.minimum(gl.maximum(sink * 1.4426950408889634, NONE), -NONE)
    new = gl.maximum(top, sink)
    shrink = gl.exp2(top - new)
    total = total * shrink + gl.exp2(sink - new)
    gl.store(lse_ptr + t * H + row, new + gl.log2(total), mask=row < H)
    factor = gl.convert_layout(shrink / total, gl.SliceLayout(1, _SUMS))
    q.store((acc * factor[:, None]).to(gl.bfloat16))  # written in whole lines from there
    gl.store(out_ptr + at, q.load(_ROW), mask=inside)


@gluon.jit
@no_type_check
def _gradient(stores, lists, scale, q, grad, kv, ds_shared, lse, mean, weights, places, H):
    """Gradient of a query; ``weights`` are where the scores' and, H rows on, probabilities go."""
    near, far = (lists[1] + _K - 1) // _K, (lists[3] + _K - 1) // _K
    none = gl.full([_H, _K], 0.0, gl.float32, _SCORES)
    acc = gl.full([_H, _C], 0.0, gl.float32, _SUMS)
    heads = gl.arange(0, _H, gl.SliceLayout(1, _SCORES))
    column = gl.arange(0, _K, gl.SliceLayout(0, _SCORES))
    into, inside = weights + heads[:, None] * places + column[None, :], (heads < H)[:, None]
    _copy_block(stores, lists, 0, near, kv)
    for block in range(near + far):
        async_copy.wait_group(0)
        fence_async_shared()
        keys = kv.permute((1, 0))
        s = warpgroup_mma(q, keys, none, use_acc=False, is_async=True)
        dp = warpgroup_mma(grad, keys, none, use_acc=False, is_async=True)
        present = _present(lists, block, near)
        s, dp = warpgroup_mma_wait(0, deps=(s, dp))
        s = gl.where(present[None, :], s * scale, -float("inf"))
        p = gl.exp2(s - lse[:, None])
        ds = (p * (dp - mean[:, None]) * (scale * 0.6931471805599453)).to(gl.bfloat16)
        ds_shared.store(ds)
        fence_async_shared()
        acc = warpgroup_mma(ds_shared, kv, acc, is_async=True)
        gl.store(into + block * _K, ds, mask=inside)
        gl.store(into + H * places + block * _K, p.to(gl.bfloat16), mask=inside)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        _copy_block(stores, lists, block + 1, near, kv)
    async_copy.wait_group(0)
    return acc


@gluon.jit
@no_type_check
def differentiate(
    H,
    scale,
    weights_ptr,
    places,
    first_main,
    mean_ptr,
    grad_q_ptr,
    grad_ptr,
    out_ptr,
    lse_ptr,
    q_ptr,
    sink_ptr,
    W,
    window_rows,
    window_ptr,
    K,
    main_rows,
    main_ptr,
    C: gl.constexpr,
):
    """As ``_backward_queries`` of the kernel for every size, for at most 64 heads."""
    t = gl.program_id(0).to(gl.int64)
    q = gl.allocate_shared_memory(gl.bfloat16, [_H, _C], _SHARED)
    grad = gl.allocate_shared_memory(gl.bfloat16, [_H, _C], _SHARED)
    kv = gl.allocate_shared_memory(gl.bfloat16, [_K, _C], _SHARED)
    ds_shared = gl.allocate_shared_memory(gl.bfloat16, [_H, _K], _SHARED)
    heads = gl.arange(0, _H, gl.SliceLayout(1, _ROW))
    columns = gl.arange(0, _C, gl.SliceLayout(0, _ROW))
    at, inside = (t * H + heads)[:, None] * _C + columns[None, :], (heads < H)[:, None]
    q.store(gl.load(q_ptr + at, mask=inside, other=0.0))
    given = gl.load(grad_ptr + at, mask=inside, other=0.0)
    grad.store(given)
    out = gl.load(out_ptr + at, mask=inside, other=0.0)
    mean = gl.sum(given.to(gl.float32) * out.to(gl.float32), 1)
    gl.store(mean_ptr + t * H + heads, mean, mask=heads < H)
    row = gl.arange(0, _H, gl.SliceLayout(1, _SCORES))
    lse = gl.load(lse_ptr + t * H + row, mask=row < H, other=0.0)
    mean = gl.convert_layout(mean, gl.SliceLayout(1, _SCORES))
    lists = window_rows + t * W, W, main_rows + t * K, K
    weights = weights_ptr + t * 2 * H * places
    acc = _gradient(
        (window_ptr, main_ptr), lists, scale, q, grad, kv, ds_shared, lse, mean, weights, places, H
    )
    q.store(acc.to(gl.bfloat16))
    gl.store(grad_q_ptr + at, q.load(_ROW), mask=inside)
