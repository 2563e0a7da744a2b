"""Launches ``index_prefill.cu``: the choice for many queries of one request. Report §2.3.1."""

import ctypes

import torch
from torch import Tensor

from openv41.ops import top_k_cuda
from openv41.ops.cuda_library import load
from openv41.ops.indexer_triton import choose_candidates, select_top_k

SOURCE = "index_prefill.cu"
HEADS, QUERIES, TILE = 32, 8, 64  # of a block of threads, and the keys it passes at once
NEAR = 16  # scores whose best is written beside them
KEY_BYTES = 132  # of a key as E4M3 numbers, with its scale


def refuse(q: Tensor, keys: Tensor, num_entries: int, k: int) -> str | None:
    """Say what the kernels cannot take."""
    if q.shape[1] != HEADS or q.data_ptr() % 4 or keys.data_ptr() % 4:
        return f"{q.shape[1]} heads, or rows do not start at a word"
    scores = torch.empty(0, num_entries, dtype=torch.float32, device=q.device)
    return top_k_cuda.refuse(scores, min(k, num_entries), None) or (
        "it is not to be had" if load(SOURCE) is None else None
    )


def choose(  # noqa: PLR0917 -- those of packed_index_choice
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    table: Tensor,
    visible: Tensor,
    per_page: int,
    num_entries: int,
    chosen: Tensor,
    pool: Tensor,
    block_size: int,
    workspace: int,
) -> None:
    """Fill ``chosen`` and ``pool`` as ``packed_index_choice`` does, a few queries at a time."""
    tokens, k, num_blocks = len(q), chosen.shape[1], pool.shape[1]
    q, weights, visible = q.contiguous(), weights.float().contiguous(), visible.long().contiguous()
    padded = -(-num_entries // TILE) * TILE
    codes = torch.empty(padded, 128, dtype=torch.uint8, device=keys.device)
    scales = torch.empty(padded, dtype=torch.float32, device=keys.device)
    place_keys(keys, table, codes, scales, per_page, num_entries)
    near = -(-num_entries // NEAR) if top_k_cuda.fits_groups(num_entries, NEAR, k) else 0
    of_blocks = (num_entries // 2 + 16 * num_blocks) if num_blocks else 0
    left = workspace - KEY_BYTES * padded
    count = torch.cuda.get_device_properties(q.device).multi_processor_count
    most = max(1, left // (4 * (num_entries + near) + of_blocks) // QUERIES)
    piece, splits = queries_at_once(most, -(-tokens // QUERIES), count)
    out = torch.empty(min(piece, tokens), num_entries, dtype=torch.float32, device=q.device)
    best = out.new_empty(len(out), near) if near else None
    for first in range(0, tokens, piece):
        part = slice(first, min(tokens, first + piece))
        rows = part.stop - first
        if rows < piece:
            splits = queries_at_once(-(-rows // QUERIES), -(-rows // QUERIES), count)[1]
        scores, seen = out[:rows], visible[part]
        score(q[part], weights[part], codes, scales, seen, scores, best, splits)
        if best is not None:
            top_k_cuda.choose_grouped(scores, best, seen, chosen[part], NEAR)
        else:
            chosen[part] = select_top_k.run(scores, None, k, seen)
        if num_blocks:
            pool[part] = choose_candidates.run(scores, seen, num_blocks, block_size)


def queries_at_once(most: int, wanted: int, programs: int) -> tuple[int, int]:
    """Queries of a call, at most so many blocks of them, and the parts into which keys are cut.

    All programs shall have work to the end: as few calls as there must be, then the fewest idle.
    """
    calls = -(-wanted // min(most, wanted))
    best = (0.0, 0, 0)
    for blocks in range(-(-wanted // calls), min(most, wanted) + 1):
        for parts in range(1, max(2, 4 * programs // blocks)):
            waves = -(-blocks * parts // programs)
            share = blocks * parts / (waves * programs) - 0.002 * waves
            best = max(best, (share, -blocks, parts))
    return -best[1] * QUERIES, best[2]


def place_keys(  # noqa: PLR0917
    keys: Tensor, table: Tensor, codes: Tensor, scales: Tensor, per_page: int, num_entries: int
) -> None:
    """Turn the rows of a request's pages into E4M3 numbers, with a scale for each row."""
    table = table if table.dtype in {torch.int32, torch.int64} else table.long()
    table = table.contiguous()
    _call(
        "index_prefill_keys",
        (keys, table, codes, scales),
        (int(table.dtype == torch.int64), per_page, num_entries),
    )


def score(  # noqa: PLR0917
    q: Tensor,
    weights: Tensor,
    codes: Tensor,
    scales: Tensor,
    visible: Tensor,
    out: Tensor,
    best: Tensor | None,
    splits: int,
) -> None:
    """Scores up to each query's last visible entry, and the best of each ``NEAR`` of them."""
    tensors = q, weights, codes, scales, visible, out, best
    _call("index_prefill_scores", tensors, (len(q), out.shape[1], splits))


def _call(name: str, tensors: tuple[Tensor | None, ...], sizes: tuple[int, ...]) -> None:
    library = load(SOURCE)
    assert library is not None, f"{SOURCE} is not to be had"
    with torch.cuda.device(tensors[0].device if tensors[0] is not None else None):
        call(library, name, tensors, sizes, torch.cuda.current_stream().cuda_stream)


def call(
    library: ctypes.CDLL,
    name: str,
    tensors: tuple[Tensor | None, ...],
    sizes: tuple[int, ...],
    stream: int | None,
) -> None:
    """Call a function of the source; raises what CUDA says."""
    status = getattr(library, name)(
        *(ctypes.c_void_p(None if x is None else x.data_ptr()) for x in tensors),
        *(ctypes.c_int(n) for n in sizes),
        ctypes.c_void_p(stream),
    )
    if status:
        raise RuntimeError(f"{SOURCE}: the launch failed with CUDA error {status}")
