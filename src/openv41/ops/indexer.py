"""Index scores, the choice of entries and the candidate pool. Report §2.3.1, §2.3.2."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from openv41.ops._dispatch import op
from openv41.ops.deterministic import TILE_WIDTH, fixed_product, whole_tiles
from openv41.ops.precision import cast, widened

QUERIES_AT_ONCE = 512  # queries whose selected keys are held at one time


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
    rows = cast(q, wide).flatten(1, 2)  # [B, T*I, J]
    dots = torch.bmm(rows, cast(keys, wide).mT).relu_().view(-1, q.shape[2], keys.shape[1])
    return torch.bmm(cast(weights, wide).view(-1, 1, q.shape[2]), dots).view(*q.shape[:2], -1)


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
def selected_scores(
    q: Float[Tensor, "T I J"],
    weights: Float[Tensor, "T I"],
    keys: Float[Tensor, "M J"],
    rows: Int[Tensor, "T K"],
    score_dtype: torch.dtype = torch.float32,
    *,
    deterministic: bool = False,
) -> Float[Tensor, "T K"]:
    """Score the rows that each query lists, as ``index_scores`` does; -inf where a row is -1.

    A query lists a row at most once. The backward gathers the keys again, piece by piece: only one
    piece of them is alive.
    """
    if not len(keys) or not rows.numel():
        nothing = 0 * (q.sum() + weights.sum() + keys.sum())  # has a gradient, of zeros
        return widened(weights.new_full(rows.shape, -torch.inf)) + nothing

    def score(q: Tensor, weights: Tensor, keys: Tensor, rows: Tensor) -> Tensor:
        listed = keys.index_select(0, rows.clamp(min=0).flatten()).view(*rows.shape, -1)
        scores = index_scores(
            q[:, None], weights[:, None], listed, score_dtype, deterministic=deterministic
        )
        return widened(scores[:, 0]).masked_fill(rows < 0, -torch.inf)

    pieces = zip(*(x.split(QUERIES_AT_ONCE) for x in (q, weights, rows)), strict=True)
    found = [
        checkpoint(score, q, weights, keys, rows, use_reentrant=False, preserve_rng_state=False)
        for q, weights, rows in pieces
    ]
    return torch.cat(found)


@op
def selection_divergence(
    scores: Float[Tensor, "T K"], mass: Float[Tensor, "T K"]
) -> Float[Tensor, ""]:
    """KL(teacher || student) over the selected entries of each query, summed over the queries.

    The teacher is ``mass`` over its sum, the student the softmax of ``scores``; the place of no
    entry scores -inf. A query without entries, or without mass, adds nothing.
    """
    limits = torch.finfo(scores.dtype)
    teacher = F.normalize(mass, p=1, dim=1, eps=limits.tiny)
    student = scores.clamp(min=limits.min).log_softmax(dim=1)
    return (torch.xlogy(teacher, teacher) - teacher * student).sum()


@op
def select_top_k(
    scores: Float[Tensor, "T M"],
    allowed: Bool[Tensor, "T M"] | None,
    k: int,
    visible: Int[Tensor, " T"] | None = None,
) -> Int[Tensor, "T K"]:
    """Choose the k best allowed entries: highest score first, lowest index among equals.

    Returns entry ids in ascending order with -1 behind the last; K is min(k, M). Entries that
    score -inf are never chosen, nor those from ``visible`` on, of each query. Scores are no NaN.
    """
    k = min(k, scores.shape[1])
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    if visible is not None:
        entries = torch.arange(scores.shape[1], device=scores.device)
        scores = scores.masked_fill(entries >= visible[:, None], -torch.inf)
    past = scores.shape[1]
    if k == 0:
        return ids_of(keep_top_k(scores, k), k)
    best, ids = scores.topk(min(k + 1, past), dim=1)
    tied = (best[:, k - 1 : k] == best[:, k:]) & (best[:, k:] > -torch.inf)  # [T, 1], or [T, 0]
    ids = ids[:, :k].masked_fill(best[:, :k] == -torch.inf, past).sort(dim=1).values
    ids = ids.masked_fill(ids == past, -1)
    if bool(tied.any()):  # at the boundary: the lowest index wins
        rows = tied.nonzero()[:, 0]
        ids[rows] = ids_of(keep_top_k(scores[rows], k), k)
    return ids


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
) -> Int[Tensor, "T blocks"]:
    """Choose the best blocks of entries, ascending, then -1: the pool of Reindex layers.

    A block scores its best visible entry. The block of the newest visible entry is always in and
    takes one of the places; a block without a visible entry never is.
    """
    best = block_scores(scores, visible, block_size)
    return select_top_k(best, None, num_blocks)


def mark_blocks(
    pools: Int[Tensor, "*queries blocks"], total: int
) -> Bool[Tensor, "*queries total"]:
    """Mark the blocks that each query's pool lists."""
    marks = torch.zeros(*pools.shape[:-1], total + 1, dtype=torch.bool, device=pools.device)
    marks.scatter_(-1, torch.where(pools < 0, total, pools), value=True)
    return marks[..., :total]


def pool_mask(
    pools: Int[Tensor, "T blocks"], num_entries: int, block_size: int
) -> Bool[Tensor, "T M"]:
    """Mark the entries of each query's blocks."""
    marks = mark_blocks(pools, -(-num_entries // block_size))
    return marks.repeat_interleave(block_size, dim=1)[:, :num_entries]


def mask_pool(mask: Bool[Tensor, "T M"], block_size: int) -> Int[Tensor, "T blocks"]:
    """List the blocks that hold a marked entry: the inverse of ``pool_mask``."""
    padded = torch.nn.functional.pad(mask, (0, -mask.shape[1] % block_size))
    marks = padded.unflatten(1, (-1, block_size)).any(dim=2)
    return ids_of(marks, int(marks.sum(dim=1).max()) if marks.numel() else 0)


def merge_pools(
    pools: Int[Tensor, "B T blocks"], num_entries: int, block_size: int, group: int
) -> tuple[Int[Tensor, "B union"], Bool[Tensor, "B T union"]]:
    """List the entries of neighbours' pools, ascending, and say whose pool holds which.

    They come in whole groups of ``group`` blocks: an entry keeps its place within its group. An
    entry that is in nobody's pool is not to be read; -1 fills up.
    """
    total = -(-num_entries // (block_size * group)) * group
    marks = mark_blocks(pools, total)  # [B, T, blocks]
    groups = marks.any(dim=1).unflatten(1, (-1, group)).any(dim=2)
    chosen = ids_of(groups, int(groups.sum(dim=1).max()) if groups.numel() else 0)
    width = group * block_size
    within = torch.arange(width, device=pools.device)
    entries = chosen[..., None] * width + within
    entries = entries.masked_fill(chosen[..., None] < 0, -1).flatten(1)  # [B, union]
    places = (entries.clamp(min=0) // block_size)[:, None].expand(*pools.shape[:2], -1)
    return entries, marks.gather(2, places) & (entries >= 0)[:, None]


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
