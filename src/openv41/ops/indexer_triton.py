"""The kernels of the indexer: scores, choice, candidates. Report §2.3.1, §2.3.2."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from openv41.ops import selected_scores_triton, top_k_cuda, top_k_triton
from openv41.ops._dispatch import kernel, wants_gradient
from openv41.ops.divergence_triton import SelectionDivergence
from openv41.ops.index_scores_triton import dense_scores

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDEST = 128  # heads of a query, and channels of a key
BLOCKS_AT_ONCE = 512
MOST_SELECTED = 8192  # entries of a query, in the divergence


def _refuse_scores(q, weights, keys, *others, deterministic=False) -> str | None:
    """Say what the scoring kernels cannot take; ``others`` may end with the dtype of scores."""
    score_dtype = others[-1] if others and isinstance(others[-1], torch.dtype) else torch.float32
    if deterministic:
        return "the deterministic mode has its own order of sums"
    if q.dtype not in DTYPES or keys.dtype != q.dtype:
        return f"queries are {q.dtype} and keys {keys.dtype}"
    if score_dtype not in {torch.float32, torch.bfloat16} or weights.dtype not in DTYPES:
        return f"scores are {score_dtype}, weights {weights.dtype}"
    if max(q.shape[-2:]) > WIDEST:
        return f"there are {q.shape[-2]} heads of {q.shape[-1]} channels, more than {WIDEST}"
    return None


@kernel(refuse=_refuse_scores)
@torch.no_grad()
def index_scores(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    score_dtype: torch.dtype = torch.float32,
    *,
    deterministic: bool = False,
) -> Tensor:
    """Pass the keys by the heads of several queries."""
    rounded = score_dtype == torch.bfloat16
    if rounded:
        q, keys = q.to(score_dtype), keys.to(score_dtype)
    return dense_scores(q, weights, keys, rounded=rounded)


@kernel(refuse=_refuse_scores, has_backward=True)
def selected_scores(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    rows: Tensor,
    score_dtype: torch.dtype = torch.float32,
    *,
    deterministic: bool = False,
) -> Tensor:
    """Gather and score in one kernel; the rows of a query are distinct."""
    rounded = score_dtype == torch.bfloat16
    if not len(keys) or not rows.numel():
        nothing = 0 * (q.sum() + weights.sum() + keys.sum())  # has a gradient, of zeros
        return torch.full(rows.shape, -torch.inf, device=q.device) + nothing.float()
    if rounded:
        q, keys = q.to(score_dtype), keys.to(score_dtype)
    inputs = [x.contiguous() for x in (q, weights, keys, rows)]
    if wants_gradient(*inputs):
        out: Tensor = selected_scores_triton.SelectedScores.apply(*inputs, rounded)
        return out
    return selected_scores_triton.forward(*inputs, rounded=rounded)


def _refuse_divergence(scores, mass) -> str | None:
    """Say what the divergence kernels cannot take."""
    if scores.dtype not in DTYPES or mass.dtype not in DTYPES:
        return f"scores are {scores.dtype}, masses {mass.dtype}"
    if wants_gradient(mass):
        return "the masses want a gradient"
    if scores.shape[1] > MOST_SELECTED:
        return f"a query has {scores.shape[1]} entries, more than {MOST_SELECTED}"
    return None


@kernel(refuse=_refuse_divergence, has_backward=True)
def selection_divergence(scores: Tensor, mass: Tensor) -> Tensor:
    """A query at a time."""
    out: Tensor = SelectionDivergence.apply(scores, mass)
    return out


def _refuse_choice(scores, allowed, k, visible=None) -> str | None:
    """Say what the choosing kernel cannot take."""
    if scores.dtype not in DTYPES:
        return f"scores are {scores.dtype}"
    if min(k, scores.shape[1]) > top_k_triton.MOST_K and scores.shape[1] > top_k_triton.CHUNK:
        return f"k is {k}, more than {top_k_triton.MOST_K}"
    return None


@kernel(refuse=_refuse_choice)
@torch.no_grad()
def select_top_k(
    scores: Tensor, allowed: Tensor | None, k: int, visible: Tensor | None = None
) -> Tensor:
    """Search for the k-th score, chunk by chunk; in CUDA C++ where it can be had."""
    k = min(k, scores.shape[1])
    if scores.is_cuda and not top_k_cuda.refuse(scores, k, allowed):
        return top_k_cuda.choose(scores, k, visible)
    return top_k_triton.choose(scores, k, visible, allowed)


@triton.jit
@no_type_check
def _block_scores(
    scores, visible, out, M, blocks, parts, row_stride, SIZE: tl.constexpr, BLOCKS: tl.constexpr
):
    row = (tl.program_id(0) // parts).to(tl.int64)
    block = (tl.program_id(0) % parts) * BLOCKS + tl.arange(0, BLOCKS)
    seen = tl.minimum(tl.load(visible + row), M)
    newest = (tl.load(visible + row) + SIZE - 1) // SIZE - 1  # -1: nothing visible
    best = tl.full((BLOCKS,), float("-inf"), tl.float32)
    for within in range(SIZE):
        entry = block * SIZE + within
        score = tl.load(scores + row * row_stride + entry, mask=entry < seen, other=float("-inf"))
        best = tl.maximum(best, score.to(tl.float32))
    best = tl.where(block == newest, float("inf"), best)
    tl.store(out + row * blocks + block, best, mask=block < blocks)


def _refuse_candidates(scores, visible, num_blocks, block_size) -> str | None:
    blocks = -(-scores.shape[1] // max(1, block_size))
    return _refuse_choice(scores.new_empty(0, blocks), None, num_blocks)


@kernel(refuse=_refuse_candidates)
@torch.no_grad()
def choose_candidates(scores: Tensor, visible: Tensor, num_blocks: int, block_size: int) -> Tensor:
    """The best of each block, then the choice among them."""
    rows, num = scores.shape
    blocks = triton.cdiv(num, block_size)
    if scores.stride(1) != 1:
        scores = scores.contiguous()
    best = torch.empty(rows, blocks, dtype=torch.float32, device=scores.device)
    if best.numel():
        parts = triton.cdiv(blocks, BLOCKS_AT_ONCE)
        _block_scores[(rows * parts,)](
            *(scores, visible.contiguous(), best, num, blocks, parts, scores.stride(0)),
            SIZE=block_size,
            BLOCKS=BLOCKS_AT_ONCE,
        )
    return select_top_k.run(best, None, num_blocks)
