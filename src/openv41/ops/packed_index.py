"""Index scores straight from the packed MXFP4 rows of a cache. Report §2.3.1, §2.4.4."""

import torch
from jaxtyping import Complex, Float, Int, UInt8
from torch import Tensor

from openv41.ops._dispatch import op
from openv41.ops.indexer import choose_candidates, index_scores, select_top_k
from openv41.ops.packed_rows import pack_rows, unpack_rows
from openv41.ops.rope import rotate


@op
def pack_index_queries(
    q: Float[Tensor, "T I J"],
    table: Complex[Tensor, "T pairs"],
    weights: Float[Tensor, "T I"],
    factor: float,
) -> tuple[UInt8[Tensor, "T I row"], Float[Tensor, "T I"]]:
    """Rotated queries as rows of MXFP4 numbers; their weights times a factor, in float32.

    The product with the factor is rounded to the dtype of the weights.
    """
    return pack_rows(rotate(q, table)), (weights * factor).float()


@op
def packed_index_scores(  # noqa: PLR0917 -- addresses come with what they address
    q: UInt8[Tensor, "B T I row"],
    weights: Float[Tensor, "B T I"],
    keys: UInt8[Tensor, "rows row"],
    table: Int[Tensor, "B pages"],
    visible: Int[Tensor, "B T"],
    per_page: int,
    num_entries: int,
    pools: Int[Tensor, "B T blocks"] | None = None,
    block_size: int = 8,
) -> Float[Tensor, "B T scored"]:
    """Score the first entries of each request as ``index_scores`` does; -inf from ``visible`` on.

    With ``pools``, score the entries of each query's blocks in their order instead, -inf for those
    of block -1: blocks * block_size entries, of which none from ``num_entries`` on is visible.

    A row is the codes of a vector followed by its scales, as ``unpack_rows`` reads it. Entry j of
    request b is row ``table[b, j // per_page] * per_page + j % per_page`` of the keys; pages behind
    the last visible entry are not looked up.
    """
    if pools is not None:
        return _pool_scores(q, weights, keys, table, visible, per_page, pools, block_size)
    entries = torch.arange(num_entries, device=keys.device)
    most = visible.amax(dim=1) if visible.shape[1] else visible.new_zeros(len(visible))
    known = torch.where(entries < most[:, None], entries, 0)  # [B, M]
    if not num_entries or not table.shape[1]:
        return weights.new_full((*weights.shape[:2], num_entries), -torch.inf, dtype=torch.float32)
    rows = table.long().gather(1, known // per_page) * per_page + known % per_page
    rows = torch.where(most[:, None] > 0, rows, 0)
    scores = index_scores(unpack_rows(q), weights.float(), unpack_rows(keys[rows]))
    return scores.masked_fill(entries >= visible[..., None], -torch.inf)


def _pool_scores(  # noqa: PLR0917 -- those of packed_index_scores
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    table: Tensor,
    visible: Tensor,
    per_page: int,
    pools: Tensor,
    size: int,
) -> Float[Tensor, "B T listed"]:
    """Scores of each query's candidates."""
    within = torch.arange(size, device=keys.device)
    entries = (pools[..., None] * size + within).flatten(2)  # negative: of block -1
    known = (entries >= 0) & (entries < visible[..., None])
    entries = torch.where(known, entries, 0)
    if not entries.numel() or not table.shape[1]:
        return weights.new_full(entries.shape, -torch.inf, dtype=torch.float32)
    pages = table.long()[:, None].expand(*entries.shape[:2], -1).gather(2, entries // per_page)
    rows = torch.where(known, pages * per_page + entries % per_page, 0)
    listed = unpack_rows(keys[rows]).flatten(0, 1)
    scores = index_scores(
        unpack_rows(q).flatten(0, 1)[:, None], weights.float().flatten(0, 1)[:, None], listed
    )
    return scores.view(entries.shape).masked_fill(~known, -torch.inf)


@op
def packed_index_choice(  # noqa: PLR0917 -- addresses come with what they address
    q: UInt8[Tensor, "T I row"],
    weights: Float[Tensor, "T I"],
    keys: UInt8[Tensor, "rows row"],
    table: Int[Tensor, " pages"],
    visible: Int[Tensor, " T"],
    per_page: int,
    num_entries: int,
    k: int,
    num_blocks: int = 0,
    block_size: int = 8,
) -> tuple[Int[Tensor, "T K"], Int[Tensor, "T blocks"]]:
    """Choose entries and candidate blocks for many queries of one request.

    As ``select_top_k`` and ``choose_candidates`` do with the scores of ``packed_index_scores``.
    """
    scores = packed_index_scores(
        q[None], weights[None], keys, table[None], visible[None], per_page, num_entries
    )[0]
    pool = choose_candidates(scores, visible, num_blocks, block_size)
    return select_top_k(scores, None, k, visible), pool
