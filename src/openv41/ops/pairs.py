"""From tokens to (token, expert) pairs, sorted by expert, and back. Report §2.1.1."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from openv41.ops._dispatch import op
from openv41.ops.precision import widened


def count_ids(ids: Int[Tensor, "..."], num: int) -> Int[Tensor, " num"]:
    """How often each of ``num`` ids occurs; what stays on a GPU, where ``bincount`` waits."""
    flat = ids.flatten()
    if not flat.is_cuda:
        return torch.bincount(flat, minlength=num)
    none = flat.new_zeros(num)
    return none.scatter_add_(0, flat, torch.ones_like(flat))


def sort_by_expert(
    expert_ids: Int[Tensor, "T A"], num_experts: int
) -> tuple[Int[Tensor, " pairs"], Int[Tensor, " E"]]:
    """Order the (token, choice) pairs by expert, stably; and count the pairs of each expert."""
    flat = expert_ids.flatten()
    return flat.argsort(stable=True), count_ids(flat, num_experts)


def places_of(order: Int[Tensor, " pairs"]) -> Int[Tensor, " pairs"]:
    """Where each pair stands in an order."""
    numbers = torch.arange(order.shape[0], device=order.device)
    return torch.empty_like(order).scatter_(0, order, numbers)


@op
def take_pairs(
    x: Float[Tensor, "T D"], order: Int[Tensor, " pairs"], top_k: int
) -> Float[Tensor, "pairs D"]:
    """The token of each pair, in this order."""
    return x.index_select(0, order // top_k)


@op
def combine(
    outputs: Float[Tensor, "pairs D"], order: Int[Tensor, " pairs"], top_k: int
) -> Float[Tensor, "T D"]:
    """Undo ``order`` and sum each token's pairs, in at least float32."""
    wide = widened(outputs)
    return wide.index_select(0, places_of(order)).view(-1, top_k, wide.shape[1]).sum(dim=1)
