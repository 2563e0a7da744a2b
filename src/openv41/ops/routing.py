"""Routing of a few tokens: their experts, and the order of their pairs. Report §2.1.1."""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from openv41.ops._dispatch import op
from openv41.ops.experts import choose_experts, expert_weights
from openv41.ops.pairs import places_of, sort_by_expert
from openv41.ops.routed import Routed


@op
def route(
    logits: Float[Tensor, "T E"],
    bias: Float[Tensor, " E"],
    top_k: int,
    temperature: float,
    scale: float,
    *,
    normalise: bool,
) -> Routed:
    """Experts of each token, their weights and the order of the pairs, from x W^T: no gradient.

    As ``router_scores``, ``choose_experts``, ``expert_weights`` and ``sort_by_expert`` one after
    the other.
    """
    smallest = torch.finfo(logits.dtype).tiny
    scores = F.softplus(logits / temperature).clamp(min=smallest).sqrt()
    chosen = choose_experts(scores, bias.expand_as(scores), top_k)
    weights = expert_weights(scores, chosen, normalise=normalise, scale=scale)
    order, counts = sort_by_expert(chosen, len(bias))
    return Routed(chosen, weights, order, places_of(order), counts)


@op
def order_pairs(
    expert_ids: Int[Tensor, "T A"], num_experts: int
) -> tuple[Int[Tensor, " pairs"], Int[Tensor, " E"]]:
    """What ``sort_by_expert`` does, of a few thousand pairs at most."""
    return sort_by_expert(expert_ids, num_experts)
