"""Index scores, the choice of entries and the candidate pool. Report §2.3.1, §2.3.2."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from openv41.ops._dispatch import op
from openv41.ops.deterministic import TILE_WIDTH, fixed_product, whole_tiles


@op
def index_scores(
    q: Float[Tensor, "B T I J"],
    weights: Float[Tensor, "B T I"],
    keys: Float[Tensor, "B M J"],
    score_dtype: torch.dtype = torch.float32,
    *,
    deterministic: bool = False,
) -> Float[Tensor, "B T M"]:
    """Score every entry for every query: sum_h w_h relu(q_h . k).

    The weights carry the constant J^-0.5 I^-0.5 and may be negative. ``score_dtype`` bfloat16
    rounds the product, the weighted product and the sum, as the released code does.
    """
    if deterministic:
        return _fixed_scores(q, weights, keys, score_dtype)
    if score_dtype == torch.bfloat16:
        dots = torch.einsum("btij,bmj->btim", q.to(score_dtype), keys.to(score_dtype))
        return (dots.relu() * weights.to(score_dtype)[..., None]).sum(dim=2)
    wide = torch.promote_types(q.dtype, score_dtype)
    dots = torch.einsum("btij,bmj->btim", q.to(wide), keys.to(wide)).relu_()
    return (weights.to(wide)[:, :, None] @ dots)[:, :, 0]


def _fixed_scores(
    q: Float[Tensor, "B T I J"],
    weights: Float[Tensor, "B T I"],
    keys: Float[Tensor, "B M J"],
    score_dtype: torch.dtype,
) -> Float[Tensor, "B T M"]:
    """Score tile by tile of entries, and add the heads one after the other."""
    wide = (
        score_dtype if score_dtype == torch.bfloat16 else torch.promote_types(q.dtype, score_dtype)
    )
    q, weights, keys = q.to(wide), weights.to(wide), keys.to(wide)
    tiles = whole_tiles(keys.mT).mT.split(TILE_WIDTH, dim=1)
    dots = [
        torch.cat([fixed_product(rows, tile[b]) for tile in tiles], dim=-1)
        for b, rows in enumerate(q.flatten(1, 2))
    ]
    heads = torch.stack(dots)[..., : keys.shape[1]].unflatten(1, q.shape[1:3]).relu()
    total = torch.zeros_like(heads[:, :, 0])
    for head, weight in zip(heads.unbind(2), weights.unbind(2), strict=True):
        total = total + weight[..., None] * head
    return total


@op
def select_top_k(
    scores: Float[Tensor, "T M"], allowed: Bool[Tensor, "T M"], k: int
) -> Int[Tensor, "T K"]:
    """Choose the k best allowed entries: highest score first, lowest index among equals.

    Returns entry ids in ascending order with -1 behind the last; K is min(k, M). Entries that
    score -inf are never chosen.
    """
    k = min(k, scores.shape[1])
    scores = scores.masked_fill(~allowed, -torch.inf)
    if k == 0:
        return ids_of(keep_top_k(scores, k), k)
    best, ids = scores.topk(k, dim=1)
    last = best[:, -1:]
    if bool((((scores >= last) & (last > -torch.inf)).sum(dim=1) > k).any()):
        return ids_of(keep_top_k(scores, k), k)  # a tie at the boundary: the lowest index wins
    past = scores.shape[1]
    ids = ids.masked_fill(best == -torch.inf, past).sort(dim=1).values
    return ids.masked_fill(ids == past, -1)


def keep_top_k(scores: Float[Tensor, "T M"], k: int) -> Bool[Tensor, "T M"]:
    """Mark the k highest scores of each row, lowest index among equals, never -inf."""
    if k >= scores.shape[1]:
        return scores > -torch.inf
    if k == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    last = scores.topk(k, dim=1).values[:, -1:]  # [T, 1]
    above = scores > last
    equal = (scores == last) & (last > -torch.inf)
    room = k - above.sum(dim=1, keepdim=True)
    return above | (equal & (equal.cumsum(dim=1) <= room))


def ids_of(chosen: Bool[Tensor, "T M"], k: int) -> Int[Tensor, "T K"]:
    """List the marked columns of each row in ascending order, -1 behind the last."""
    rows, columns = chosen.nonzero(as_tuple=True)
    place = (chosen.cumsum(dim=1) - 1)[rows, columns]
    ids = torch.full((len(chosen), k), -1, dtype=torch.int64, device=chosen.device)
    ids[rows, place] = columns
    return ids


@op
def choose_candidates(
    scores: Float[Tensor, "T M"],
    visible: Int[Tensor, " T"],
    num_blocks: int,
    block_size: int,
) -> Bool[Tensor, "T M"]:
    """Keep the entries of the best blocks: the pool that Reindex layers search.

    A block scores its best visible entry. The block of the newest visible entry is always in and
    takes one of the places; a block without a visible entry never is.
    """
    best = block_scores(scores, visible, block_size)
    kept = keep_top_k(best, num_blocks)
    return kept.repeat_interleave(block_size, dim=1)[:, : scores.shape[1]]


def block_scores(
    scores: Float[Tensor, "T M"], visible: Int[Tensor, " T"], block_size: int
) -> Float[Tensor, "T _"]:
    """Best visible score of each block; the block of the newest visible entry scores inf."""
    entries = torch.arange(scores.shape[1], device=scores.device)
    seen = scores.masked_fill(entries >= visible[:, None], -torch.inf)
    short = -scores.shape[1] % block_size
    blocks = torch.nn.functional.pad(seen, (0, short), value=-torch.inf)
    best: Tensor = blocks.unflatten(1, (-1, block_size)).amax(dim=2)
    newest = (visible - 1).div(block_size, rounding_mode="floor")[:, None]  # -1: nothing visible
    pinned = torch.arange(best.shape[1], device=scores.device) == newest
    return best.masked_fill(pinned, torch.inf)
