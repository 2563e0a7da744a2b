"""The kernels of scores and choices from packed rows. Report §2.3.1, §2.4.4.

A choice for many queries turns the keys into E4M3 numbers once and scores as many queries at a time
as fit into WORKSPACE; by the CUDA kernels where they can be had. 8192 queries by 131,072 entries
are 8.8 TF, 6.7 ms at 1305 TFLOP/s.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from openv41.ops import index_prefill_cuda, packed_index_cuda
from openv41.ops._dispatch import kernel
from openv41.ops.cache_writers_triton import _as, _packed
from openv41.ops.index_scores_triton import ROW_BYTES, dense_scores, packed_scores, to_fp8
from openv41.ops.indexer_triton import choose_candidates, select_top_k
from openv41.ops.top_k_triton import CHUNK, LEAST_KEPT

WORKSPACE = 240 << 20  # bytes beside inputs and outputs


@triton.jit
@no_type_check
def _pack_queries(
    q,
    turns,
    weights,
    packed,
    scaled,
    factor,
    token_stride,
    heads,
    ON_GPU: tl.constexpr,
    IS_BF16: tl.constexpr,
    PAIRS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Some heads of a token as [heads, blocks, pairs of a block]."""
    WIDTH: tl.constexpr = BLOCKS * 32
    ROW: tl.constexpr = BLOCKS * 17
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_head = head < heads
    column = tl.arange(0, WIDTH)[None]
    at = q + token * token_stride + head[:, None] * WIDTH + column
    loaded = tl.load(at, mask=is_head[:, None], other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(loaded, (HEADS, BLOCKS, 16, 2)))
    turn = tl.arange(0, BLOCKS)[:, None] * 16 + tl.arange(0, 16)[None, :] - (WIDTH // 2 - PAIRS)
    angle = turns + (token * PAIRS + turn) * 2
    real = tl.load(angle, mask=turn >= 0, other=1.0)[None]
    imaginary = tl.load(angle + 1, mask=turn >= 0, other=0.0)[None]
    is_turned = (turn >= 0)[None]
    first = tl.where(is_turned, _as(even * real - odd * imaginary, IS_BF16, ON_GPU), even)
    second = tl.where(is_turned, _as(even * imaginary + odd * real, IS_BF16, ON_GPU), odd)
    byte, even_code, odd_code, _, _ = _packed(first, second, 2, ON_GPU)
    codes = tl.reshape((even_code | (odd_code << 4)).to(tl.uint8), (HEADS, WIDTH // 2))
    row = packed + (token * heads + head[:, None]) * ROW
    tl.store(row + tl.arange(0, WIDTH // 2)[None], codes, mask=is_head[:, None])
    scales = row + WIDTH // 2 + tl.arange(0, BLOCKS)[None]
    tl.store(scales, byte.to(tl.uint8), mask=is_head[:, None])
    weight = tl.load(weights + token * heads + head, mask=is_head, other=0.0).to(tl.float32)
    tl.store(scaled + token * heads + head, _as(weight * factor, IS_BF16, ON_GPU), mask=is_head)


def _refuse_queries(q, table, weights, factor) -> str | None:
    """Say what the kernel cannot take."""
    width = q.shape[2]
    if q.dtype not in {torch.float32, torch.bfloat16} or weights.dtype != q.dtype:
        return f"queries are {q.dtype}, weights {weights.dtype}"
    if width & (width - 1) or not 32 <= width <= 1024:
        return f"queries of {width} numbers, not a power of two from 32 to 1024"
    return None if table.dtype == torch.complex64 else f"the table is {table.dtype}"


@kernel(refuse=_refuse_queries)
@torch.no_grad()
def pack_index_queries(
    q: Tensor, table: Tensor, weights: Tensor, factor: float
) -> tuple[Tensor, Tensor]:
    """A few heads of a token in a program."""
    (tokens, heads, width), q = q.shape, q.contiguous()
    packed = torch.empty(tokens, heads, width // 32 * 17, dtype=torch.uint8, device=q.device)
    scaled = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    each = max(1, 1024 // width)
    if scaled.numel():
        _pack_queries[tokens, triton.cdiv(heads, each)](
            q,
            torch.view_as_real(table.resolve_conj()).contiguous(),
            weights.contiguous(),
            packed,
            scaled,
            float(factor),
            q.stride(0),
            heads,
            ON_GPU=q.is_cuda,
            IS_BF16=q.dtype == torch.bfloat16,
            PAIRS=table.shape[1],
            HEADS=each,
            BLOCKS=width // 32,
            num_warps=2,
        )
    return packed, scaled


def _refuse(q, weights, keys, table, visible, per_page, num_entries, *_) -> str | None:
    """Say what the kernel cannot take."""
    if q.shape[3] != ROW_BYTES or keys.shape[1] != ROW_BYTES:
        return f"packed rows are of {q.shape[3]} and {keys.shape[1]} bytes, not {ROW_BYTES}"
    if q.shape[2] > 128:
        return f"{q.shape[2]} heads are more than a program holds"
    if keys.stride(1) != 1 or keys.stride(0) != ROW_BYTES:
        return "keys are not contiguous"
    if keys.storage_offset() % 4:
        return "keys do not start at a word"
    return None


@kernel(refuse=_refuse)
@torch.no_grad()
def packed_index_scores(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    table: Tensor,
    visible: Tensor,
    per_page: int,
    num_entries: int,
    pools: Tensor | None = None,
    block_size: int = 8,
) -> Tensor:
    """Unpack each key in registers; by the CUDA kernel where it can be had."""
    width = num_entries if pools is None else pools.shape[2] * block_size
    given = q, weights, keys, table, visible, per_page, width
    if q.is_cuda and not packed_index_cuda.refuse(
        q, keys, per_page, None if pools is None else block_size
    ):
        return packed_index_cuda.scores(*given, pools)
    return packed_scores(*given, pools=pools, block_size=block_size)


def _refuse_choice(
    q, weights, keys, table, visible, per_page, num_entries, k, num_blocks=0, block_size=8
) -> str | None:
    """Say what the kernels cannot take."""
    parts = (q[None], weights, keys, table, visible, per_page, num_entries)
    scores = weights.new_empty(0, num_entries, dtype=torch.float32)
    return (
        _refuse(*parts)
        or select_top_k.refuse(scores, None, k)
        or choose_candidates.refuse(scores, visible, num_blocks, block_size)
    )


@kernel(refuse=_refuse_choice)
@torch.no_grad()
def packed_index_choice(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    table: Tensor,
    visible: Tensor,
    per_page: int,
    num_entries: int,
    k: int,
    num_blocks: int = 0,
    block_size: int = 8,
    *,
    workspace: int = WORKSPACE,
) -> tuple[Tensor, Tensor]:
    """Score a few queries at a time with all entries, and choose before the next."""
    tokens, heads = q.shape[:2]
    device = keys.device
    k, blocks = min(k, num_entries), min(num_blocks, -(-num_entries // block_size))
    chosen = torch.full((tokens, k), -1, dtype=torch.int64, device=device)
    pool = torch.full((tokens, blocks), -1, dtype=torch.int64, device=device)
    if not num_entries or not tokens:
        return chosen, pool
    if q.is_cuda and not index_prefill_cuda.refuse(q, keys, num_entries, k):
        index_prefill_cuda.choose(
            *(q, weights, keys, table, visible, per_page, num_entries),
            *(chosen, pool, block_size, workspace),
        )
        return chosen, pool
    key_codes, key_scales = to_fp8(keys, num_entries, table.contiguous(), per_page)
    piece = _queries_at_once(workspace - 132 * num_entries, num_entries, heads, k, blocks)
    scores = torch.empty(min(piece, tokens), num_entries, dtype=torch.float32, device=device)
    for first in range(0, tokens, piece):
        part = slice(first, min(tokens, first + piece))
        seen, out = visible[part], scores[: part.stop - first]
        codes, scales = to_fp8(q[part].flatten(0, 1), (part.stop - first) * heads)
        dense_scores(
            codes.view(1, -1, heads, 128),
            (weights[part].float() * scales.view(-1, heads))[None],
            key_codes[None],
            key_scales[None],
            seen[None],
            out=out[None],
        )
        chosen[part] = select_top_k.run(out, None, k, seen)
        if blocks:
            pool[part] = choose_candidates.run(out, seen, num_blocks, block_size)
    return chosen, pool


def _queries_at_once(left: int, entries: int, heads: int, k: int, blocks: int) -> int:
    """Queries whose scores, and what is kept of them, fit into the bytes left."""
    kept = -(-entries // CHUNK) * max(LEAST_KEPT, 2 * k) * 8 if entries > CHUNK else 0
    of_blocks = (entries // 2 + 16 * blocks) if blocks else 0
    each = entries * 4 + kept + of_blocks + heads * 136
    return max(1, left // each)
