"""The kernels of scores and choices from packed rows. Report §2.3.1, §2.4.4.

A choice for many queries turns the keys into E4M3 numbers once and scores as many queries at a time
as fit into WORKSPACE; by the CUDA kernels where they can be had. 8192 queries by 131,072 entries
are 8.8 TF, 6.7 ms at 1305 TFLOP/s.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
from torch import Tensor

from openv41.ops import index_prefill_cuda, packed_index_cuda
from openv41.ops._dispatch import kernel
from openv41.ops.index_scores_triton import ROW_BYTES, dense_scores, packed_scores, to_fp8
from openv41.ops.indexer_triton import choose_candidates, select_top_k
from openv41.ops.top_k_triton import CHUNK, LEAST_KEPT

WORKSPACE = 240 << 20  # bytes beside inputs and outputs


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
