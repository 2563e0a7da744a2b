"""The packed kernel for 64 heads of 512 channels on Hopper, its layouts chosen. Report §2.3.1.

Triton gives both warpgroups the same scores to compute where another product follows. Here they
share the columns, and a block of rows is dequantised into one buffer while the matrix units work
on the other: about 2,600 cycles of products and 600 of softmax per 64 rows, 18 us per query.
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

HEADS, CHANNELS, ROWS, WARPS = 64, 512, 64, 8
_H: gl.constexpr = gl.constexpr(HEADS)
_C: gl.constexpr = gl.constexpr(CHANNELS)
_K: gl.constexpr = gl.constexpr(ROWS)
_HALF: gl.constexpr = gl.constexpr(CHANNELS // 2)
# A warp reads whole rows, a thread eight codes or pairs of codes; what it makes of them is stored
# without conflicts of banks.
_ROW: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
_SCALES: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [8, 1], [1, 0])
_MAIN: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 32, 1], [8, 1, 1], [2, 1, 0])
_WINDOW: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 16, 2], [8, 1, 1], [2, 1, 0])
_SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16])
_SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 128, 16])
_PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
_SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@gluon.jit
@no_type_check
def list_block(rows_ptr, block, count, layout: gl.constexpr):
    """Listed rows of a block; -1 before the list and behind it."""
    at = block * _K + gl.arange(0, _K, layout)
    return gl.load(rows_ptr + at, mask=(at >= 0) & (at < count), other=-1)


@gluon.jit
@no_type_check
def _copy_main(main_ptr, stride, rows_ptr, block, count, codes_into, scales_into):
    """Start to copy codes and scales of a block of main KV rows."""
    rows = list_block(rows_ptr, block, count, gl.SliceLayout(1, _ROW))
    row = main_ptr + rows.to(gl.int64)[:, None] * stride
    columns = gl.arange(0, _HALF, gl.SliceLayout(0, _ROW))
    async_copy.async_copy_global_to_shared(
        codes_into, row + columns[None, :], mask=(rows >= 0)[:, None]
    )
    rows = list_block(rows_ptr, block, count, gl.SliceLayout(1, _SCALES))
    row = main_ptr + rows.to(gl.int64)[:, None] * stride + _HALF
    groups = gl.arange(0, _C // 16, gl.SliceLayout(0, _SCALES))
    async_copy.async_copy_global_to_shared(
        scales_into, row + groups[None, :], mask=(rows >= 0)[:, None]
    )
    async_copy.commit_group()


@gluon.jit
@no_type_check
def _put(even, odd, even_into, odd_into):
    even = gl.convert_layout(gl.reshape(even, [_K, _HALF]), _ROW)
    odd = gl.convert_layout(gl.reshape(odd, [_K, _HALF]), _ROW)
    even_into.store(even)
    odd_into.store(odd)


@gluon.jit
@no_type_check
def _put_main(codes_in, scales_in, even_into, odd_into, FP4: gl.constexpr, FACTOR: gl.constexpr):
    """Dequantise copied main KV into shared memory."""
    codes, scales = codes_in.load(_ROW), scales_in.load(gl.SliceLayout(2, _MAIN))
    codes = gl.convert_layout(gl.reshape(codes, [_K, _C // 16, 8]), _MAIN)
    factor = (scales.to(gl.float8e4nv, bitcast=True).to(gl.float32) * FACTOR).to(gl.bfloat16)
    even, odd = gl.inline_asm_elementwise(
        FP4,
        "=r,=r,=r,=r,r,r,r",
        [codes, factor[:, :, None]],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=4,
    )
    _put(even, odd, even_into, odd_into)


@gluon.jit
@no_type_check
def _put_window(
    window_ptr, bytes_ptr, stride, rows_ptr, block, count, even_into, odd_into, FP8: gl.constexpr
):
    """Read and dequantise window KV into shared memory; ``stride`` is in units of 16 bytes."""
    rows = list_block(rows_ptr, block, count, gl.SliceLayout(1, _ROW))
    row = window_ptr + rows.to(gl.int64)[:, None] * (stride * 8)
    columns = gl.arange(0, _HALF, gl.SliceLayout(0, _ROW))
    codes = gl.load(row + columns[None, :], mask=(rows >= 0)[:, None], other=0)
    codes = gl.convert_layout(gl.reshape(codes, [_K, _C // 32, 16]), _WINDOW)
    scale_layout: gl.constexpr = gl.SliceLayout(2, _WINDOW)
    rows = gl.convert_layout(rows, gl.SliceLayout(1, scale_layout))
    groups = gl.arange(0, _C // 32, gl.SliceLayout(0, scale_layout))
    row = bytes_ptr + rows.to(gl.int64)[:, None] * (stride * 16) + _C
    byte = gl.load(row + groups[None, :], mask=(rows >= 0)[:, None], other=0).to(gl.int32)
    bits = gl.where(byte == 0, 0x00400000, gl.where(byte == 255, 0x7FC00000, byte << 23))
    factor = bits.to(gl.float32, bitcast=True).to(gl.bfloat16)
    even, odd = gl.inline_asm_elementwise(
        FP8,
        "=r,=r,r,r",
        [codes, factor[:, :, None]],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=2,
    )
    _put(even, odd, even_into, odd_into)


@gluon.jit
@no_type_check
def _load_q(q_ptr, q_t, q_h, t, first_head, H, even_into, odd_into):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    heads = first_head + gl.arange(0, _H, gl.SliceLayout(1, layout))
    columns = gl.arange(0, _C, gl.SliceLayout(0, layout))
    at = q_ptr + t * q_t + heads[:, None] * q_h + columns[None, :]
    q = gl.load(at, mask=(heads < H)[:, None], other=0.0)
    even, odd = gl.split(gl.reshape(q, [_H, _HALF, 2]))
    even_into.store(even)
    odd_into.store(odd)


@gluon.jit
@no_type_check
def _put_block(stores, lists, block, near, staged, even_into, odd_into, codecs):
    """Dequantise a block of a query's lists: window KV, or main KV that was copied before."""
    window_ptr, bytes_ptr, window_stride, _, _ = stores
    async_copy.wait_group(0)
    if block < near:
        _put_window(
            window_ptr, bytes_ptr, window_stride, lists[0], block, lists[1],
            even_into, odd_into, codecs[1],
        )  # fmt: skip
    else:
        _put_main(staged[0], staged[1], even_into, odd_into, codecs[0], codecs[2])


@gluon.jit
@no_type_check
def softmax(s, present, scale, top, total):
    """Running softmax: weights of a block and the factor of what was before."""
    s = gl.where(present[None, :], s * scale, -float("inf"))
    new = gl.maximum(top, gl.max(s, 1))
    p = gl.exp2(s - new[:, None])
    shrink = gl.exp2(top - new)
    return p, shrink, new, total * shrink[:, None] + p


@gluon.jit
@no_type_check
def _sums(stores, lists, scale, buffers, none, top, total, codecs):
    """Attention over a part of the lists of one query, not yet divided."""
    q_even, q_odd, even, odd, p_shared, codes, scales = buffers
    window_rows, W, main_rows, K, first, last, near = lists
    main_ptr, main_stride = stores[3], stores[4]
    staged = (codes, scales)
    sum_even = gl.full([_H, _HALF], 0.0, gl.float32, _SUMS)
    sum_odd = gl.full([_H, _HALF], 0.0, gl.float32, _SUMS)
    _copy_main(main_ptr, main_stride, main_rows, first - near, K, codes, scales)
    _put_block(stores, lists, first, near, staged, even.index(0), odd.index(0), codecs)
    _copy_main(main_ptr, main_stride, main_rows, first + 1 - near, K, codes, scales)
    fence_async_shared()
    for block in range(first, last):
        now, then = (block - first) & 1, (block - first + 1) & 1
        s = warpgroup_mma(
            q_even, even.index(now).permute((1, 0)), none, use_acc=False, is_async=True
        )
        s = warpgroup_mma(q_odd, odd.index(now).permute((1, 0)), s, is_async=True)
        if block + 1 < last:
            _put_block(
                stores, lists, block + 1, near, staged, even.index(then), odd.index(then), codecs
            )
        _copy_main(main_ptr, main_stride, main_rows, block + 2 - near, K, codes, scales)
        present = list_block(window_rows, block, W, gl.SliceLayout(0, _SCORES)) >= 0
        present |= list_block(main_rows, block - near, K, gl.SliceLayout(0, _SCORES)) >= 0
        s = warpgroup_mma_wait(0, deps=(s,))
        p, shrink, top, total = softmax(s, present, scale, top, total)
        p_shared.store(p.to(gl.bfloat16))
        fence_async_shared()
        shrink = gl.convert_layout(shrink, gl.SliceLayout(1, _SUMS))[:, None]
        sum_even = warpgroup_mma(p_shared, even.index(now), sum_even * shrink, is_async=True)
        sum_odd = warpgroup_mma(p_shared, odd.index(now), sum_odd * shrink, is_async=True)
        sum_even, sum_odd = warpgroup_mma_wait(0, deps=(sum_even, sum_odd))
    return sum_even, sum_odd, top, gl.sum(total, 1)


@gluon.jit
@no_type_check
def _write(out_ptr, row, heads_left, first_head, even, odd, factor):
    """Store the sums of even and odd columns in their order."""
    factor = gl.convert_layout(factor, gl.SliceLayout(1, _SUMS))[:, None]
    kind: gl.constexpr = out_ptr.dtype.element_ty
    both = gl.join((even * factor).to(kind), (odd * factor).to(kind))
    both = gl.reshape(both, [_H, _C])
    layout: gl.constexpr = both.type.layout
    heads = gl.arange(0, _H, gl.SliceLayout(1, layout))
    columns = gl.arange(0, _C, gl.SliceLayout(0, layout))
    into = out_ptr + (row + first_head + heads)[:, None] * _C + columns[None, :]
    gl.store(into, both, mask=(heads < heads_left)[:, None])


@gluon.jit
@no_type_check
def attend(
    out_ptr,
    lse_ptr,
    q_ptr,
    q_t,
    q_h,
    H,
    window_ptr,
    bytes_ptr,
    window_stride,
    main_ptr,
    main_stride,
    window_rows,
    W,
    main_rows,
    K,
    sink_ptr,
    scale,
    IS_WHOLE: gl.constexpr,
    FP4: gl.constexpr,
    FP8: gl.constexpr,
    FACTOR: gl.constexpr,
    SHRUNK: gl.constexpr,
    NONE: gl.constexpr,
):
    """As ``_attend`` of the kernel for every size; a program per query, 64 heads and part."""
    t, part, parts = gl.program_id(0).to(gl.int64), gl.program_id(2), gl.num_programs(2)
    first_head = gl.program_id(1) * _H
    q_even = gl.allocate_shared_memory(gl.bfloat16, [_H, _HALF], _SHARED)
    q_odd = gl.allocate_shared_memory(gl.bfloat16, [_H, _HALF], _SHARED)
    even = gl.allocate_shared_memory(gl.bfloat16, [2, _K, _HALF], _SHARED)
    odd = gl.allocate_shared_memory(gl.bfloat16, [2, _K, _HALF], _SHARED)
    p_shared = gl.allocate_shared_memory(gl.bfloat16, [_H, _K], _SHARED)
    codes = gl.allocate_shared_memory(gl.uint8, [_K, _HALF], _PLAIN)
    scales = gl.allocate_shared_memory(gl.uint8, [_K, _C // 16], _PLAIN)
    _load_q(q_ptr, q_t, q_h, t, first_head, H, q_even, q_odd)
    near, far = (W + _K - 1) // _K, (K + _K - 1) // _K
    share = (near + far + parts - 1) // parts
    first = part * share
    last = gl.minimum(first + share, near + far)
    top = gl.full([_H], 2 * NONE, gl.float32, gl.SliceLayout(1, _SCORES))
    none = gl.full([_H, _K], 0.0, gl.float32, _SCORES)
    sum_even, sum_odd, top, count = _sums(
        (window_ptr, bytes_ptr, window_stride, main_ptr, main_stride),
        (window_rows + t * W, W, main_rows + t * K, K, first, last, near),
        scale,
        (q_even, q_odd, even, odd, p_shared, codes, scales),
        none,
        top,
        none,
        (FP4, FP8, FACTOR),
    )
    heads = first_head + gl.arange(0, _H, gl.SliceLayout(1, _SCORES))
    if IS_WHOLE:
        sink = gl.load(sink_ptr + heads, mask=heads < H, other=0.0).to(gl.float32)
        sink = gl.minimum(gl.maximum(sink * 1.4426950408889634, NONE), -NONE)
        new = gl.maximum(top, sink)
        shrink = gl.exp2(top - new)
        factor = shrink / (count * shrink + gl.exp2(sink - new))
    else:
        factor = 1 / gl.where(count > 0, count, 1.0)
        lse = gl.where(count > 0, top + gl.log2(gl.where(count > 0, count, 1.0)), 2 * NONE)
        gl.store(lse_ptr + (t * parts + part) * H + heads, lse, mask=heads < H)
    row = (t * parts + part) * H
    _write(out_ptr, row, H - first_head, first_head, sum_even, sum_odd, factor * SHRUNK)
