"""Sparse attention that reads packed caches and multiplies in bfloat16. Report §2.3.1, §2.4.4.

A program holds the heads of one query, dequantises a block of rows in registers and uses it for
scores and sums. Few queries share their rows among several programs, whose results a second
kernel joins in one order. 256 queries of 64 heads over 128 + 512 rows read 88 MB and take 21.5 GF:
27 us at 788 TFLOP/s; 8192 take 872 us.

Keys are held at 2^-8 of their value, so that scale and shift of the E2M1 bits are one bfloat16
factor; scores and sums are multiplied by 2^8, which is exact.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from openv41.ops import packed_sparse_attention_cuda as cuda
from openv41.ops import packed_sparse_attention_hopper_triton as hopper
from openv41.ops._dispatch import kernel
from openv41.ops.listed_rows_triton import LOG2E, NONE, fits_hopper, join_sink, read_list
from openv41.ops.packed_sparse_attention_hopper_triton import WARPS
from openv41.ops.rope import rotate

SHRUNK: tl.constexpr = tl.constexpr(256.0)  # keys are held at 1 / SHRUNK
FP4_FACTOR: tl.constexpr = tl.constexpr(2.0**126 / 256)
PROGRAMS = 132  # one per multiprocessor
# A register of four bytes, a factor per byte: the low nibbles' numbers, then the high nibbles'.
# The bits of an E2M1 number, put where a bfloat16 has its last exponent bits and its first
# fraction bit, are that number times 2^-126, also where it is subnormal.
FP4: tl.constexpr = tl.constexpr("""
{
.reg .b32 x, y, a, b;
prmt.b32 x, $4, 0, 0x4140;
prmt.b32 y, $4, 0, 0x4342;
shl.b32 a, x, 6;
shl.b32 b, x, 12;
and.b32 b, b, 0x80008000;
lop3.b32 a, a, 0x01C001C0, b, 0xEA;
mul.rn.bf16x2 $0, a, $5;
shl.b32 a, y, 6;
shl.b32 b, y, 12;
and.b32 b, b, 0x80008000;
lop3.b32 a, a, 0x01C001C0, b, 0xEA;
mul.rn.bf16x2 $1, a, $6;
shl.b32 a, x, 2;
shl.b32 b, x, 8;
and.b32 b, b, 0x80008000;
lop3.b32 a, a, 0x01C001C0, b, 0xEA;
mul.rn.bf16x2 $2, a, $5;
shl.b32 a, y, 2;
shl.b32 b, y, 8;
and.b32 b, b, 0x80008000;
lop3.b32 a, a, 0x01C001C0, b, 0xEA;
mul.rn.bf16x2 $3, a, $6;
}
""")
# A register of two pairs of E4M3 bytes, a factor per pair. The bits make bfloat16 numbers that are
# 2^-120 of their value; 0x7780 is 2^112.
FP8: tl.constexpr = tl.constexpr("""
{
.reg .b32 a, b, c;
mov.b32 c, 0x77807780;
shl.b32 a, $2, 4;
shl.b32 b, $2, 8;
and.b32 b, b, 0x80008000;
lop3.b32 a, a, 0x07F007F0, b, 0xEA;
mul.rn.bf16x2 a, a, c;
mul.rn.bf16x2 $0, a, $3;
shr.b32 a, $2, 4;
and.b32 b, $2, 0x80008000;
lop3.b32 a, a, 0x07F007F0, b, 0xEA;
mul.rn.bf16x2 a, a, c;
mul.rn.bf16x2 $1, a, $3;
}
""")


class Tiling(NamedTuple):
    """Sizes of a program: heads, rows read at a time; and in how many parts lists are cut."""

    heads: int
    rows: int
    warps: int
    stages: int
    parts: int
    on_hopper: bool = False  # the kernel whose layouts are chosen for it


def tiling_of(q: Tensor, listed: int, *, deterministic: bool) -> Tiling:
    """Fill the multiprocessors; a query's bits depend on nothing else if they have to."""
    heads = min(64, max(16, triton.next_power_of_2(q.shape[1])))
    rows, warps, stages = (64, 8, 3) if heads == 64 else (32, 4, 3)
    if q.element_size() == 4:
        heads, rows, warps, stages = 16, 16, 4, 1
    programs = len(q) * triton.cdiv(q.shape[1], heads)
    blocks = max(1, triton.cdiv(listed, rows))
    parts = 1 if deterministic else min(blocks, max(1, PROGRAMS // max(programs, 1)))
    parts = triton.cdiv(blocks, triton.cdiv(blocks, parts))
    return Tiling(heads, rows, warps, stages, parts, fits_hopper(q))


def _refuse(q, window, window_rows, main, main_rows, sink, scale, turn=None, **_) -> str | None:
    """Say what the kernel cannot take."""
    width = q.shape[2]
    if q.dtype not in {torch.float32, torch.bfloat16}:
        return f"queries are {q.dtype}"
    if width not in {64, 128, 256, 512}:
        return f"a row has {width} channels, not a power of two from 64 to 512"
    bytes_of = window.shape[1], main.shape[1]
    if bytes_of != (width + width // 32, width // 2 + width // 16):
        return f"rows have {bytes_of[0]} and {bytes_of[1]} bytes"
    if (
        window.stride(1) != 1
        or main.stride(1) != 1
        or window.data_ptr() % 2
        or window.stride(0) % 2
    ):
        return "bytes of a row are apart"
    return None


@kernel(refuse=_refuse)
def packed_sparse_attention(
    q: Tensor,
    window: Tensor,
    window_rows: Tensor,
    main: Tensor,
    main_rows: Tensor,
    sink: Tensor,
    scale: float,
    turn: Tensor | None = None,
    *,
    deterministic: bool = False,
) -> Tensor:
    """Read each listed row once, packed; what joins the parts rotates them."""
    given = q, window, window_rows, main, main_rows, sink, scale
    if fits_hopper(q) and not cuda.refuse(given, deterministic=deterministic):
        out = cuda.attend(given, deterministic=deterministic)
    else:
        listed = window_rows.shape[1] + main_rows.shape[1]
        tiling = tiling_of(q, listed, deterministic=deterministic)
        if tiling.parts > 1:
            return attend(*given, tiling, turn)
        out = attend(*given, tiling)
    return out if turn is None else rotate(out, turn, deterministic=deterministic)


def attend(
    q, window, window_rows, main, main_rows, sink, scale, tiling: Tiling, turn: Tensor | None = None
) -> Tensor:
    """The op with chosen sizes; the sums of several parts are rotated by ``turn``."""
    (count, heads, width), parts = q.shape, tiling.parts
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not out.numel():
        return out
    sums = out if parts == 1 else out.new_empty(count, parts, heads, width, dtype=torch.float32)
    lse = out.new_empty(count, parts, heads, dtype=torch.float32)
    given = {
        "q_ptr": q if q.stride(2) == 1 else q.contiguous(),
        "window_ptr": window.view(torch.int16),
        "main_ptr": main,
        "window_rows": window_rows.contiguous(),
        "main_rows": main_rows.contiguous(),
        "sink_ptr": sink,
        "out_ptr": sums,
        "lse_ptr": lse,
        "scale": scale * LOG2E * SHRUNK.value,
        "H": heads,
        "W": window_rows.shape[1],
        "K": main_rows.shape[1],
        "main_stride": main.stride(0),
        "IS_WHOLE": parts == 1,
    }
    given["q_t"], given["q_h"], _ = given["q_ptr"].stride()
    grid = count, triton.cdiv(heads, tiling.heads), parts
    step = 8 if window.stride(0) % 16 == 0 else 1  # known to be whole, rows are read in one go
    if tiling.on_hopper and step == 8:
        hopper.attend[grid](
            **given,
            bytes_ptr=window,
            window_stride=window.stride(0) // 16,
            FP4=FP4.value,
            FP8=FP8.value,
            FACTOR=FP4_FACTOR.value,
            SHRUNK=SHRUNK.value,
            NONE=NONE.value,
            num_warps=WARPS,
        )
    else:
        _attend[grid](
            **given,
            window_stride=window.stride(0) // (2 * step),
            STEP=step,
            C=width,
            BLOCK_H=tiling.heads,
            BLOCK_K=tiling.rows,
            IN_REGISTERS=q.is_cuda and q.dtype == torch.bfloat16,
            num_warps=tiling.warps,
            num_stages=tiling.stages,
        )
    if parts > 1:
        pairs = 0 if turn is None else turn.shape[1]
        turns = lse if turn is None else torch.view_as_real(turn.resolve_conj()).contiguous()
        _join[count, heads](
            *(sums, lse, sink, turns, out, heads, parts),
            C=width,
            PARTS=triton.next_power_of_2(parts),
            PAIRS=pairs,
        )
    return out


@triton.jit
@no_type_check
def _e2m1(codes):
    """Values of E2M1 codes."""
    exponent, fraction = (codes >> 1) & 3, (codes & 1).to(tl.float32)
    normal = (1 + fraction * 0.5) * tl.exp2(exponent.to(tl.float32) - 1)
    value = tl.where(exponent == 0, fraction * 0.5, normal)
    return tl.where((codes & 8) == 0, value, -value)


@triton.jit
@no_type_check
def _e4m3(codes):
    """Values of E4M3 codes, NaN included."""
    exponent, fraction = (codes >> 3) & 15, (codes & 7).to(tl.float32)
    normal = (1 + fraction * 0.125) * tl.exp2(exponent.to(tl.float32) - 7)
    value = tl.where(exponent == 0, fraction * 0.001953125, normal)
    value = tl.where((codes & 127) == 127, float("nan"), value)
    return tl.where((codes & 128) == 0, value, -value)


@triton.jit
@no_type_check
def _main(main_ptr, stride, rows, C: tl.constexpr, IN_REGISTERS: tl.constexpr):
    """Even and odd columns of main KV rows, [K, C/16, 8] each; row -1 is zero."""
    groups = tl.arange(0, C // 16)
    row = main_ptr + rows.to(tl.int64)[:, None] * stride
    present = rows[:, None] >= 0
    codes = tl.load(row + tl.arange(0, C // 2)[None, :], mask=present, other=0)
    codes = tl.reshape(codes, [rows.shape[0], C // 16, 8])
    scales = tl.load(row + C // 2 + groups[None, :], mask=present, other=0)
    if IN_REGISTERS:
        factor = scales.to(tl.float8e4nv, bitcast=True).to(tl.float32) * FP4_FACTOR
        even, odd = tl.inline_asm_elementwise(
            FP4,
            "=r,=r,=r,=r,r,r,r",
            [codes, factor.to(tl.bfloat16)[:, :, None]],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        factor = (_e4m3(scales.to(tl.int32)) / SHRUNK)[:, :, None]
        codes = codes.to(tl.int32)
        even, odd = _e2m1(codes & 15) * factor, _e2m1(codes >> 4) * factor
    return even, odd


@triton.jit
@no_type_check
def _window(window_ptr, stride, rows, C: tl.constexpr, IN_REGISTERS: tl.constexpr):
    """Even and odd columns of window KV rows, [K, C/32, 16] each; row -1 is zero."""
    groups = tl.arange(0, C // 32)
    row = window_ptr + rows.to(tl.int64)[:, None] * stride
    present = rows[:, None] >= 0
    codes = tl.load(row + tl.arange(0, C // 2)[None, :], mask=present, other=0)  # two to a number
    codes = tl.reshape(codes, [rows.shape[0], C // 32, 16])
    pairs = tl.load(row + C // 2 + groups[None, :] // 2, mask=present, other=0).to(tl.int32)
    byte = (pairs >> ((groups & 1) * 8)[None, :]) & 255
    bits = tl.where(byte == 0, 0x00400000, tl.where(byte == 255, 0x7FC00000, byte << 23))
    factor = bits.to(tl.float32, bitcast=True)
    if IN_REGISTERS:
        even, odd = tl.inline_asm_elementwise(
            FP8,
            "=r,=r,r,r",
            [codes, factor.to(tl.bfloat16)[:, :, None]],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        factor = (factor / SHRUNK)[:, :, None]
        codes = codes.to(tl.int32)
        even, odd = _e4m3(codes & 255) * factor, _e4m3((codes >> 8) & 255) * factor
    return even, odd


@triton.jit
@no_type_check
def _fold(q, even, odd, rows, scale, top, total, acc, C: tl.constexpr):
    """Take a block of rows into a running softmax."""
    kv = tl.reshape(tl.join(even, odd), [even.shape[0], C]).to(q.dtype)
    s = tl.dot(q, tl.trans(kv), input_precision="ieee") * scale
    s = tl.where(rows[None, :] >= 0, s, -float("inf"))
    new = tl.maximum(top, tl.max(s, 1))
    p = tl.exp2(s - new[:, None])
    shrink = tl.exp2(top - new)
    total = total * shrink + tl.sum(p, 1)
    acc = tl.dot(p.to(q.dtype), kv, acc * shrink[:, None], input_precision="ieee")
    return new, total, acc


@triton.jit
@no_type_check
def _attend(
    q_ptr,
    window_ptr,
    main_ptr,
    window_rows,
    main_rows,
    sink_ptr,
    out_ptr,
    lse_ptr,
    scale,
    H,
    W,
    K,
    q_t,
    q_h,
    window_stride,
    main_stride,
    STEP: tl.constexpr,
    C: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    IN_REGISTERS: tl.constexpr,
):
    t, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(2), tl.num_programs(2)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    columns = tl.arange(0, C)[None, :]
    at = q_ptr + t * q_t + heads[:, None] * q_h + columns
    q = tl.load(at, mask=heads[:, None] < H, other=0.0)
    top = tl.full([BLOCK_H], 2 * NONE, tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, C], tl.float32)
    near, far = tl.cdiv(W, BLOCK_K), tl.cdiv(K, BLOCK_K)
    share = tl.cdiv(near + far, parts)
    first = part * share
    for block in range(tl.minimum(first, near), tl.minimum(first + share, near)):
        rows = read_list(window_rows + t * W, block * BLOCK_K, W, BLOCK_K)
        even, odd = _window(window_ptr, window_stride * STEP, rows, C, IN_REGISTERS)
        top, total, acc = _fold(q, even, odd, rows, scale, top, total, acc, C)
    last = tl.minimum(first + share - near, far)
    for block in range(tl.maximum(first - near, 0), last):
        rows = read_list(main_rows + t * K, block * BLOCK_K, K, BLOCK_K)
        even, odd = _main(main_ptr, main_stride, rows, C, IN_REGISTERS)
        top, total, acc = _fold(q, even, odd, rows, scale, top, total, acc, C)
    if IS_WHOLE:
        factor, _ = join_sink(sink_ptr, heads, H, top, total)
    else:
        factor = 1 / tl.where(total > 0, total, 1)
        lse = tl.where(total > 0, top + tl.log2(tl.where(total > 0, total, 1)), 2 * NONE)
        tl.store(lse_ptr + (t * parts + part) * H + heads, lse, mask=heads < H)
    sums = acc * (factor * SHRUNK)[:, None]
    into = out_ptr + ((t * parts + part) * H + heads[:, None]) * C + columns
    tl.store(into, sums.to(out_ptr.dtype.element_ty), mask=heads[:, None] < H)


@triton.jit
@no_type_check
def _join(
    sums_ptr,
    lse_ptr,
    sink_ptr,
    turns_ptr,
    out_ptr,
    H,
    parts,
    C: tl.constexpr,
    PARTS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Weigh the parts of a query's head by their denominators, the sink among them; rotate."""
    t, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    part, columns = tl.arange(0, PARTS), tl.arange(0, C)
    at = (t * parts + part) * H + head
    lse = tl.load(lse_ptr + at, mask=part < parts, other=2 * NONE)
    sink = tl.load(sink_ptr + head).to(tl.float32)
    sink = tl.minimum(tl.maximum(sink * 1.4426950408889634, NONE), -NONE)
    top = tl.maximum(tl.max(lse, 0), sink)
    weights = tl.exp2(lse - top)
    total = tl.sum(weights, 0) + tl.exp2(sink - top)
    sums = tl.load(
        sums_ptr + at[:, None] * C + columns[None, :], mask=part[:, None] < parts, other=0.0
    )
    out = (tl.sum(sums * weights[:, None], 0) / total).to(out_ptr.dtype.element_ty)
    if PAIRS > 0:
        even, odd = tl.split(tl.reshape(out.to(tl.float32), (C // 2, 2)))
        pair = tl.arange(0, C // 2) - (C // 2 - PAIRS)
        at = turns_ptr + 2 * (t * PAIRS + pair)
        real = tl.load(at, mask=pair >= 0, other=1.0)
        imaginary = tl.load(at + 1, mask=pair >= 0, other=0.0)
        turned = tl.where(pair >= 0, even * real - odd * imaginary, even)
        other = tl.where(pair >= 0, odd * real + even * imaginary, odd)
        out = tl.reshape(tl.join(turned, other), (C,)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (t * H + head) * C + columns, out)
