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
ROW_BYTES = 68  # of a packed row of 128 elements
ROW_WORDS = 17  # 16 of codes, one of scales
WORDS: tl.constexpr = tl.constexpr(16)
TO_NORMAL: tl.constexpr = tl.constexpr(2.0**126)  # what codes as float32 bits lack
NAN_BYTE: tl.constexpr = tl.constexpr(255)
NAN_BITS: tl.constexpr = tl.constexpr(0x7FC00000)

# Code k of two words, k = 0..7, as two bf16 numbers times 2^-126, times the scales of the words.
UNPACK: tl.constexpr = tl.constexpr(
    """
    {
    .reg .b32 u, v, a, b;
    prmt.b32 u, $8, $9, 0x5410;
    prmt.b32 v, $8, $9, 0x7632;
    shl.b32 a, u, 6;
    and.b32 a, a, 0x01C001C0;
    shl.b32 b, u, 12;
    lop3.b32 a, b, 0x80008000, a, 0xEA;
    mul.rn.bf16x2 $0, a, $10;
    shl.b32 a, u, 2;
    and.b32 a, a, 0x01C001C0;
    shl.b32 b, u, 8;
    lop3.b32 a, b, 0x80008000, a, 0xEA;
    mul.rn.bf16x2 $1, a, $10;
    shr.b32 a, u, 2;
    and.b32 a, a, 0x01C001C0;
    shl.b32 b, u, 4;
    lop3.b32 a, b, 0x80008000, a, 0xEA;
    mul.rn.bf16x2 $2, a, $10;
    shr.b32 a, u, 6;
    and.b32 a, a, 0x01C001C0;
    lop3.b32 a, u, 0x80008000, a, 0xEA;
    mul.rn.bf16x2 $3, a, $10;
    shl.b32 a, v, 6;
    and.b32 a, a, 0x01C001C0;
    shl.b32 b, v, 12;
    lop3.b32 a, b, 0x80008000, a, 0xEA;
    mul.rn.bf16x2 $4, a, $10;
    shl.b32 a, v, 2;
    and.b32 a, a, 0x01C001C0;
    shl.b32 b, v, 8;
    lop3.b32 a, b, 0x80008000, a, 0xEA;
    mul.rn.bf16x2 $5, a, $10;
    shr.b32 a, v, 2;
    and.b32 a, a, 0x01C001C0;
    shl.b32 b, v, 4;
    lop3.b32 a, b, 0x80008000, a, 0xEA;
    mul.rn.bf16x2 $6, a, $10;
    shr.b32 a, v, 6;
    and.b32 a, a, 0x01C001C0;
    lop3.b32 a, v, 0x80008000, a, 0xEA;
    mul.rn.bf16x2 $7, a, $10;
    }
    """
)


class Tiling(NamedTuple):
    """Entries in a tile, queries of a program, tiles that a program passes by, and the launch.

    A product of queries and keys is turned to have the keys as its second operand: with at most 32
    rows of queries it then takes both from registers.
    """

    entries: int
    queries: int
    tiles: int
    warps: int
    stages: int
    turned: bool = False


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
def _code(word, scale, K: tl.constexpr):
    """Code ``K`` of each word times the scale, which is times 2^126; the asm in plain Triton."""
    code = word >> (4 * K)
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * scale


@triton.jit
@no_type_check
def _packed_rows(rows, at, mask, ASM: tl.constexpr, DOT: tl.constexpr):
    """Unpack rows that start at these words, to 2^-64 of their value: columns 8 j + k by k."""
    column = tl.arange(0, WORDS)
    place = tl.multiple_of(rows + at[:, None] + column[None, :], (4, 4))  # bytes: no more is sure
    word = tl.load(place, mask=mask[:, None], other=0)
    scales = tl.load(rows + at + WORDS, mask=mask, other=0)
    byte = (scales[:, None] >> ((column // 4) * 8)[None, :]) & 255
    scale = _scale_value(byte, 62)
    if ASM:
        v0, v1, v2, v3, v4, v5, v6, v7 = tl.inline_asm_elementwise(
            UNPACK,
            "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r",
            [word, scale.to(tl.bfloat16)],
            dtype=(tl.bfloat16,) * 8,
            is_pure=True,
            pack=2,
        )
    else:
        v0, v1 = _code(word, scale, 0).to(DOT), _code(word, scale, 1).to(DOT)
        v2, v3 = _code(word, scale, 2).to(DOT), _code(word, scale, 3).to(DOT)
        v4, v5 = _code(word, scale, 4).to(DOT), _code(word, scale, 5).to(DOT)
        v6, v7 = _code(word, scale, 6).to(DOT), _code(word, scale, 7).to(DOT)
    return v0, v1, v2, v3, v4, v5, v6, v7


@triton.jit
@no_type_check
def _raised(x, DOT: tl.constexpr, TURNED: tl.constexpr):
    """Queries, from 2^-64 to 2^64 of their value, as an operand."""
    x = (x.to(tl.float32) * UP * UP).to(DOT)
    return x if TURNED else tl.trans(x)


@triton.jit
@no_type_check
def _product(key, query, dots, TURNED: tl.constexpr):
    """Add products of keys and queries; of queries and keys, if turned."""
    return tl.dot(query, tl.trans(key), dots) if TURNED else tl.dot(key, query, dots)


@triton.jit
@no_type_check
def _packed_scores(
    q,
    weights,
    keys,
    table,
    visible,
    pools,
    out,
    T,
    width,
    table_stride,
    row_words,  # no constant: the compiler then knows that rows start at any word
    PER_PAGE: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    BLOCK: tl.constexpr,  # entries of a candidate block; 0: all entries in order
    I: tl.constexpr,  # noqa: E741
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    ENTRIES: tl.constexpr,
    TILES: tl.constexpr,
    ASM: tl.constexpr,
    TURNED: tl.constexpr,
    DOT: tl.constexpr,  # dtype of the operands: the interpreter multiplies no bf16
):
    batch = tl.program_id(2).to(tl.int64)
    first = tl.program_id(1) * QUERIES
    lane = tl.arange(0, QUERIES * HEADS)
    query, head = first + lane // HEADS, lane % HEADS
    there = (query < T) & (head < I)
    at = (batch * T + query) * I + head
    weight = tl.load(weights + at, mask=there, other=0.0).to(tl.float32)
    q0, q1, q2, q3, q4, q5, q6, q7 = _packed_rows(q, at * row_words, there, False, tl.float32)
    q0, q1 = _raised(q0, DOT, TURNED), _raised(q1, DOT, TURNED)
    q2, q3 = _raised(q2, DOT, TURNED), _raised(q3, DOT, TURNED)
    q4, q5 = _raised(q4, DOT, TURNED), _raised(q5, DOT, TURNED)
    q6, q7 = _raised(q6, DOT, TURNED), _raised(q7, DOT, TURNED)
    own = first + tl.arange(0, QUERIES)
    seen = tl.load(visible + batch * T + own, mask=own < T, other=0)
    most = tl.max(seen, 0)
    for tile in range(TILES):
        start = (tl.program_id(0) * TILES + tile) * ENTRIES
        slot = start + tl.arange(0, ENTRIES)
        entry = slot
        if BLOCK:
            listed = pools + (batch * T + first) * (width // BLOCK) + slot // BLOCK
            block = tl.load(listed, mask=slot < width, other=-1)
            entry = tl.where(block < 0, most, block * BLOCK + slot % BLOCK)
        if HAS_TABLE:
            page = tl.load(
                table + batch * table_stride + entry // PER_PAGE, mask=entry < most, other=0
            )
            row = page.to(tl.int64) * PER_PAGE + entry % PER_PAGE
        else:
            row = batch * table_stride + entry
        k0, k1, k2, k3, k4, k5, k6, k7 = _packed_rows(keys, row * row_words, entry < most, ASM, DOT)
        if TURNED:
            dots = tl.zeros((QUERIES * HEADS, ENTRIES), tl.float32)
        else:
            dots = tl.zeros((ENTRIES, QUERIES * HEADS), tl.float32)
        dots = _product(k0, q0, dots, TURNED)
        dots = _product(k1, q1, dots, TURNED)
        dots = _product(k2, q2, dots, TURNED)
        dots = _product(k3, q3, dots, TURNED)
        dots = _product(k4, q4, dots, TURNED)
        dots = _product(k5, q5, dots, TURNED)
        dots = _product(k6, q6, dots, TURNED)
        dots = _product(k7, q7, dots, TURNED)
        if TURNED:
            parts = tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL) * weight[:, None]
            score = tl.trans(tl.sum(tl.reshape(parts, QUERIES, HEADS, ENTRIES), 1))
        else:
            score = _head_sum(dots, weight, QUERIES, HEADS, False)
        score = tl.where(entry[:, None] < seen[None, :], score, float("-inf"))
        to = out + (batch * T + own)[None, :] * width + slot[:, None]
        tl.store(to, score, mask=(own < T)[None, :] & (slot < width)[:, None])


@triton.jit
@no_type_check
def _to_fp8(
    rows,
    table,
    codes,
    scales,
    num,
    row_words,
    PER_PAGE: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Packed rows as E4M3 numbers under one power of two per row.

    Exact where a block's scale is at least 2^-14 of the row's largest; smaller blocks lose bits.
    """
    entry = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = entry < num
    row = entry
    if HAS_TABLE:
        page = tl.load(table + entry // PER_PAGE, mask=inside, other=0).to(tl.int64)
        row = page * PER_PAGE + entry % PER_PAGE
    at = row * row_words
    column = tl.arange(0, WORDS)
    place = tl.multiple_of(rows + at[:, None] + column[None, :], (4, 4))
    word = tl.load(place, mask=inside[:, None], other=0)
    packed = tl.load(rows + at + WORDS, mask=inside, other=0)
    byte = (packed[:, None] >> ((column // 4) * 8)[None, :]) & 255
    largest = tl.max(tl.where(word != 0, byte, 0), 1)
    largest = tl.where(tl.max(byte, 1) == NAN_BYTE, NAN_BYTE, largest)
    bits = tl.minimum(tl.maximum(largest - 6, 1), 254) << 23
    bits = tl.where(largest == NAN_BYTE, NAN_BITS, bits)
    tl.store(scales + entry, bits.to(tl.float32, bitcast=True), mask=inside)
    down = tl.maximum(byte - largest[:, None] + (127 + 6), 1) << 23  # 2^6 times the block's share
    scale = tl.minimum(down, (127 + 6) << 23).to(tl.float32, bitcast=True)
    to = codes + entry[:, None] * 128 + column[None, :] * 8
    for k in tl.static_range(8):
        value = (_code(word, TO_NORMAL, k) * scale).to(codes.dtype.element_ty)
        tl.store(to + k, value, mask=inside[:, None])


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
        if HAS_SCALES:  # on its way during the product
            scale = tl.load(key_scales + row, mask=entry < most, other=0.0)
        key = tl.load(keys + row[:, None] * J + column[None, :], mask=mask, other=0.0)
        dots = tl.dot(key.to(DOT), tl.trans(queries), input_precision="ieee")
        score = _head_sum(dots, weight, QUERIES, HEADS, ROUND)
        if HAS_SCALES:
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
    pools: Int[Tensor, "B T blocks"] | None = None,
    block_size: int = 8,
) -> Float[Tensor, "B T M"]:
    """Scores of packed rows; without a table each request has ``per_page`` rows, in order."""
    batches, tokens, num = q.shape[:3]
    out = weights.new_empty(batches, tokens, width, dtype=torch.float32)
    if not out.numel():
        return out
    heads = _heads(num)
    tiling = tiling or packed_tiling(batches, tokens, heads, width)
    if pools is not None:
        tiling, pools = tiling._replace(queries=1), pools.contiguous()
    grid = (
        triton.cdiv(width, tiling.entries * tiling.tiles),
        triton.cdiv(tokens, tiling.queries),
        batches,
    )
    _packed_scores[grid](
        q.contiguous().view(torch.int32),
        weights.contiguous(),
        keys.view(torch.int32),
        table,
        visible.contiguous(),
        pools,
        out,
        tokens,
        width,
        per_page if table is None else table.stride(0),
        ROW_WORDS,
        PER_PAGE=1 if table is None else per_page,
        HAS_TABLE=table is not None,
        BLOCK=0 if pools is None else block_size,
        I=num,
        HEADS=heads,
        QUERIES=tiling.queries,
        ENTRIES=tiling.entries,
        TILES=tiling.tiles,
        ASM=q.is_cuda if asm is None else asm,
        TURNED=tiling.turned,
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


def to_fp8(
    rows: UInt8[Tensor, "rows row"],
    num: int,
    table: Int[Tensor, " pages"] | None = None,
    per_page: int = 1,
) -> tuple[Float[Tensor, "M J"], Float[Tensor, " M"]]:
    """The first packed rows, or those of a table's pages, as E4M3 numbers and one scale each."""
    codes = torch.empty(num, 128, dtype=torch.float8_e4m3fn, device=rows.device)
    scales = torch.empty(num, dtype=torch.float32, device=rows.device)
    if num:
        _to_fp8[(triton.cdiv(num, 64),)](
            *(rows.contiguous().view(torch.int32), table, codes, scales, num, ROW_WORDS),
            PER_PAGE=per_page,
            HAS_TABLE=table is not None,
            ROWS=64,
        )
    return codes, scales
