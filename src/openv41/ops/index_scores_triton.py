"""Index scores sum_h w_h relu(q_h . k), from rows of numbers and from packed MXFP4 rows.

A program keeps the heads of a few queries as one operand and passes tiles of keys by, so a key is
read, and unpacked, once for all of them. Per query and entry the work is 8192 operations: 8
queries of 131,072 entries each are 8.6 GF (11 us at 788 TFLOP/s) and 75 MB (17 us), 8192 queries
by 131,072 entries 8.8 TF (11 ms in bf16, 5.8 in FP8). Report §2.3.1, §2.4.4.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int, UInt8
from torch import Tensor

# Keys are unpacked to 2^-64 of their value and queries to 2^64: so scales fit bf16's exponents.
UP: tl.constexpr = tl.constexpr(2.0**64)
CODE_BYTES: tl.constexpr = tl.constexpr(64)  # of a packed row of 128 elements
ROW_BYTES: tl.constexpr = tl.constexpr(68)
NAN_BYTE: tl.constexpr = tl.constexpr(255)
NAN_BITS: tl.constexpr = tl.constexpr(0x7FC00000)
DIM: tl.constexpr = tl.constexpr(128)

# Two E2M1 codes of each of four bytes as bf16 times 2^-126, times a scale: low codes, then high.
UNPACK: tl.constexpr = tl.constexpr(
    """
    {
    .reg .b32 u, v, a, b;
    prmt.b32 u, $4, 0, 0x1404;
    prmt.b32 v, $4, 0, 0x3424;
    shr.b32 a, u, 6;
    and.b32 a, a, 0x01C001C0;
    lop3.b32 a, u, 0x80008000, a, 0xEA;
    mul.rn.bf16x2 $2, a, $5;
    shr.b32 a, v, 6;
    and.b32 a, a, 0x01C001C0;
    lop3.b32 a, v, 0x80008000, a, 0xEA;
    mul.rn.bf16x2 $3, a, $6;
    shr.b32 a, u, 2;
    shl.b32 b, u, 4;
    and.b32 a, a, 0x01C001C0;
    lop3.b32 a, b, 0x80008000, a, 0xEA;
    mul.rn.bf16x2 $0, a, $5;
    shr.b32 a, v, 2;
    shl.b32 b, v, 4;
    and.b32 a, a, 0x01C001C0;
    lop3.b32 a, b, 0x80008000, a, 0xEA;
    mul.rn.bf16x2 $1, a, $6;
    }
    """
)


class Tiling(NamedTuple):
    """Entries in a tile, queries of a program, tiles that a program passes by, and the launch."""

    entries: int
    queries: int
    tiles: int
    warps: int
    stages: int


@triton.jit
@no_type_check
def _head_sum(dots, weight, QUERIES: tl.constexpr, HEADS: tl.constexpr, ROUND: tl.constexpr):
    """[entries, queries * heads] products to [entries, queries] scores."""
    if ROUND:  # the product, the weighted product and the sum, as the released code does
        dots = dots.to(tl.bfloat16).to(tl.float32)
    parts = tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL) * weight[None, :]
    if ROUND:
        parts = parts.to(tl.bfloat16).to(tl.float32)
    return tl.sum(tl.reshape(parts, dots.shape[0], QUERIES, HEADS), 2)


@triton.jit
@no_type_check
def _scale_value(byte, SHIFT: tl.constexpr):
    """2^(byte - 127 + SHIFT) within float32's normal numbers, NaN for 255."""
    exponent = byte.to(tl.int32) + SHIFT
    bits = tl.minimum(tl.maximum(exponent, 1), 254) << 23
    return tl.where(byte == NAN_BYTE, NAN_BITS, bits).to(tl.float32, bitcast=True)


@triton.jit
@no_type_check
def _unpack(code, scale, ASM: tl.constexpr):
    """Numbers of the low and of the high codes of [rows, 64] bytes; scale is times 2^126."""
    if ASM:
        scale = scale.to(tl.bfloat16)
        low, high = tl.inline_asm_elementwise(
            UNPACK,
            "=r,=r,=r,=r,r,r,r",
            [code, scale],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        wide = code.to(tl.int32)
        low = ((wide & 7) << 22) | ((wide & 8) << 28)
        high = ((wide & 0x70) << 18) | ((wide & 0x80) << 24)
        low = (low.to(tl.float32, bitcast=True) * scale).to(tl.bfloat16)
        high = (high.to(tl.float32, bitcast=True) * scale).to(tl.bfloat16)
    return low, high


@triton.jit
@no_type_check
def _packed_rows(rows, at, mask, ASM: tl.constexpr):
    """Unpack rows at these byte offsets, even and odd columns apart, to 2^-64 of their value."""
    column = tl.arange(0, CODE_BYTES)
    code = tl.load(rows + at[:, None] + column[None, :], mask=mask[:, None], other=0)
    block = tl.arange(0, 4)
    byte = tl.load(rows + at[:, None] + (block + CODE_BYTES)[None, :], mask=mask[:, None], other=0)
    scale = _scale_value(byte, 62)
    scale = tl.broadcast_to(scale[:, :, None], at.shape[0], 4, 16)
    low, high = _unpack(code, tl.reshape(scale, at.shape[0], 64), ASM)
    return low, high


@triton.jit
@no_type_check
def _packed_scores(
    q,
    weights,
    keys,
    table,
    visible,
    out,
    T,
    width,
    table_stride,
    PER_PAGE: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    ENTRIES: tl.constexpr,
    TILES: tl.constexpr,
    ASM: tl.constexpr,
    DOT: tl.constexpr,  # dtype of the operands: the interpreter multiplies no bf16
):
    batch = tl.program_id(2).to(tl.int64)
    first = tl.program_id(1) * QUERIES
    lane = tl.arange(0, QUERIES * HEADS)
    query, head = first + lane // HEADS, lane % HEADS
    there = (query < T) & (head < I)
    at = (batch * T + query) * I + head
    weight = tl.load(weights + at, mask=there, other=0.0).to(tl.float32)
    q_even, q_odd = _packed_rows(q, at * ROW_BYTES, there, False)
    q_even = (q_even.to(tl.float32) * UP * UP).to(DOT)
    q_odd = (q_odd.to(tl.float32) * UP * UP).to(DOT)
    own = first + tl.arange(0, QUERIES)
    seen = tl.load(visible + batch * T + own, mask=own < T, other=0)
    most = tl.max(seen, 0)
    for tile in range(TILES):
        start = (tl.program_id(0) * TILES + tile) * ENTRIES
        entry = start + tl.arange(0, ENTRIES)
        if HAS_TABLE:
            page = tl.load(
                table + batch * table_stride + entry // PER_PAGE, mask=entry < most, other=0
            )
            row = page.to(tl.int64) * PER_PAGE + entry % PER_PAGE
        else:
            row = batch * table_stride + entry
        even, odd = _packed_rows(keys, row * ROW_BYTES, entry < most, ASM)
        even, odd = even.to(DOT), odd.to(DOT)
        dots = tl.dot(even, tl.trans(q_even))
        dots = tl.dot(odd, tl.trans(q_odd), dots)
        score = _head_sum(dots, weight, QUERIES, HEADS, False)
        score = tl.where(entry[:, None] < seen[None, :], score, float("-inf"))
        to = out + (batch * T + own)[None, :] * width + entry[:, None]
        tl.store(to, score, mask=(own < T)[None, :] & (entry < width)[:, None])


@triton.jit
@no_type_check
def _dense_scores(
    q,
    weights,
    keys,
    key_scales,
    visible,
    out,
    T,
    M,
    J,
    HAS_SCALES: tl.constexpr,
    HAS_VISIBLE: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    ENTRIES: tl.constexpr,
    TILES: tl.constexpr,
    WIDTH: tl.constexpr,
    ROUND: tl.constexpr,
    EVEN: tl.constexpr,
    DOT: tl.constexpr,  # dtype of the operands: the interpreter multiplies no bf16
):
    batch = tl.program_id(2).to(tl.int64)
    first = tl.program_id(1) * QUERIES
    lane = tl.arange(0, QUERIES * HEADS)
    query, head = first + lane // HEADS, lane % HEADS
    there = (query < T) & (head < I)
    at = (batch * T + query) * I + head
    weight = tl.load(weights + at, mask=there, other=0.0).to(tl.float32)
    if ROUND:
        weight = weight.to(tl.bfloat16).to(tl.float32)
    column = tl.arange(0, WIDTH)
    wide = there[:, None] & (column < J)[None, :]
    queries = tl.load(q + at[:, None] * J + column[None, :], mask=wide, other=0.0).to(DOT)
    own = first + tl.arange(0, QUERIES)
    seen = tl.zeros((QUERIES,), tl.int64) + M
    if HAS_VISIBLE:
        seen = tl.load(visible + batch * T + own, mask=own < T, other=0).to(tl.int64)
    most = tl.max(seen, 0)
    for tile in range(TILES):
        start = (tl.program_id(0) * TILES + tile) * ENTRIES
        entry = start + tl.arange(0, ENTRIES)
        row = batch * M + entry
        mask = (entry < most)[:, None]
        if not EVEN:
            mask = mask & (column < J)[None, :]
        key = tl.load(keys + row[:, None] * J + column[None, :], mask=mask, other=0.0)
        dots = tl.dot(key.to(DOT), tl.trans(queries), input_precision="ieee")
        score = _head_sum(dots, weight, QUERIES, HEADS, ROUND)
        if HAS_SCALES:
            scale = tl.load(key_scales + row, mask=entry < most, other=0.0)
            score = score * scale[:, None]
        if HAS_VISIBLE:
            score = tl.where(entry[:, None] < seen[None, :], score, float("-inf"))
        to = out + (batch * T + own)[None, :] * M + entry[:, None]
        mask = (own < T)[None, :] & (entry < M)[:, None]
        tl.store(to, score.to(out.dtype.element_ty), mask=mask)


def dot_dtype(x: Tensor):
    """What products of this tensor are made of: its numbers, or float32 in the interpreter."""
    known = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    return known.get(x.dtype, tl.float8e4nv) if x.is_cuda else tl.float32


def _heads(num: int) -> int:
    return max(16, int(triton.next_power_of_2(num)))


def packed_tiling(batches: int, tokens: int, heads: int, width: int) -> Tiling:
    """Fill the chip a few times over; as many queries to a tile as the registers allow."""
    queries = min(triton.next_power_of_2(tokens), max(1, 128 // heads))
    tiles = max(1, min(16, batches * triton.cdiv(tokens, queries) * width // (128 * 132 * 8)))
    return Tiling(entries=128, queries=queries, tiles=tiles, warps=4, stages=3)


def dense_tiling(tokens: int, heads: int, width: int, itemsize: int) -> Tiling:
    """Small for float32, whose products do not run on tensor cores; a wide tile else."""
    if itemsize == 4:
        return Tiling(entries=32, queries=1, tiles=4, warps=4, stages=1)
    queries = min(triton.next_power_of_2(tokens), max(1, 256 // heads))
    return Tiling(entries=64, queries=queries, tiles=8, warps=4, stages=3 if width <= 128 else 2)


def packed_scores(
    q: UInt8[Tensor, "B T I row"],
    weights: Float[Tensor, "B T I"],
    keys: UInt8[Tensor, "rows row"],
    table: Int[Tensor, "B pages"] | None,
    visible: Int[Tensor, "B T"],
    per_page: int,
    width: int,
    tiling: Tiling | None = None,
    *,
    asm: bool | None = None,
) -> Float[Tensor, "B T M"]:
    """Scores of packed rows; without a table each request has ``per_page`` rows, in order."""
    batches, tokens, num = q.shape[:3]
    out = weights.new_empty(batches, tokens, width, dtype=torch.float32)
    if not out.numel():
        return out
    heads = _heads(num)
    tiling = tiling or packed_tiling(batches, tokens, heads, width)
    grid = (
        triton.cdiv(width, tiling.entries * tiling.tiles),
        triton.cdiv(tokens, tiling.queries),
        batches,
    )
    _packed_scores[grid](
        q.contiguous(),
        weights.contiguous(),
        keys,
        table,
        visible.contiguous(),
        out,
        tokens,
        width,
        per_page if table is None else table.stride(0),
        PER_PAGE=1 if table is None else per_page,
        HAS_TABLE=table is not None,
        I=num,
        HEADS=heads,
        QUERIES=tiling.queries,
        ENTRIES=tiling.entries,
        TILES=tiling.tiles,
        ASM=q.is_cuda if asm is None else asm,
        DOT=tl.bfloat16 if q.is_cuda else tl.float32,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )
    return out


def dense_scores(
    q: Float[Tensor, "B T I J"],
    weights: Float[Tensor, "B T I"],
    keys: Float[Tensor, "B M J"],
    key_scales: Float[Tensor, "B M"] | None = None,
    visible: Int[Tensor, "B T"] | None = None,
    *,
    rounded: bool = False,
    tiling: Tiling | None = None,
    out: Float[Tensor, "B T M"] | None = None,
) -> Float[Tensor, "B T M"]:
    """Scores of rows of numbers; -inf from ``visible`` on; ``rounded`` as in ``index_scores``."""
    batches, tokens, num, dim = q.shape
    width = keys.shape[1]
    if out is None:
        dtype = torch.bfloat16 if rounded else torch.float32
        out = weights.new_empty(batches, tokens, width, dtype=dtype)
    if not out.numel():
        return out
    heads = _heads(num)
    padded = max(32, triton.next_power_of_2(dim))
    tiling = tiling or dense_tiling(tokens, heads, padded, q.element_size())
    grid = (
        triton.cdiv(width, tiling.entries * tiling.tiles),
        triton.cdiv(tokens, tiling.queries),
        batches,
    )
    _dense_scores[grid](
        q.contiguous(),
        weights.contiguous(),
        keys.contiguous(),
        key_scales,
        visible,
        out,
        tokens,
        width,
        dim,
        HAS_SCALES=key_scales is not None,
        HAS_VISIBLE=visible is not None,
        I=num,
        HEADS=heads,
        QUERIES=tiling.queries,
        ENTRIES=tiling.entries,
        TILES=tiling.tiles,
        WIDTH=padded,
        ROUND=rounded,
        EVEN=padded == dim,
        DOT=dot_dtype(q),
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )
    return out
