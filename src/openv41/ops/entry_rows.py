"""From what was chosen to where it lies: entries of candidates, rows of entries. Report §2.3.2."""

import torch
from jaxtyping import Int
from torch import Tensor

from openv41.ops._dispatch import op


@op
def pool_entries(
    places: Int[Tensor, "T K"], pools: Int[Tensor, "T blocks"], block_size: int
) -> Int[Tensor, "T K"]:
    """Entries of places among each token's candidates; -1 stays.

    The candidates of a token are the entries of its blocks, in their order.
    """
    known = places.clamp(min=0)
    blocks = pools.gather(1, known // block_size)
    return torch.where(places < 0, -1, blocks * block_size + known % block_size)


@op
def page_rows(
    entries: Int[Tensor, "T K"], table: Int[Tensor, "T pages"], per_page: int
) -> Int[Tensor, "T K"]:
    """Rows of a store of entries whose pages ``table`` lists; -1 stays."""
    known = entries.clamp(min=0)
    pages = table.gather(1, known // per_page)
    return torch.where(entries < 0, -1, pages * per_page + known % per_page)
