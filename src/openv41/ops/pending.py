"""Main-KV compression of a decode step: groups that began before it. Report §2.3, Eq. (1)."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from openv41.ops._dispatch import op
from openv41.ops.compressor import pool_group


@op
def pool_pending(  # noqa: PLR0917 -- rows come with where they go
    kv: Float[Tensor, "T C"],
    gate: Float[Tensor, "T C"],
    ring: Float[Tensor, "S columns"],
    own: Int[Tensor, " T"],
    previous: Int[Tensor, " T"],
    members: Int[Tensor, "T 2"],
) -> Float[Tensor, "T C"]:
    """Store a row [kv, gate] per token, then ``pool_group`` of two rows for each.

    ``own`` and ``previous`` are the rows of the ring of a token and of the position before it;
    ``members`` are rows of [previous, new]. What a token without a previous position pools is
    anything. Two tokens with one row of the ring bring the same numbers.
    """
    new = torch.cat([kv, gate], dim=-1)
    ring[own] = new.to(ring.dtype)
    rows = torch.cat([ring[previous].to(new.dtype), new])
    pairs, gates = rows[members].chunk(2, dim=-1)
    return pool_group(pairs, gates)
