"""Kernels of the routing of a few tokens, which launches dominate. Report §2.1.1.

A program chooses for one token, best expert after best expert; another finds the places of a few
pairs by comparing them with all others. Floors are those of an empty launch.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from openv41.ops._dispatch import kernel

MOST_EXPERTS = 1024  # that a program holds
MOST_PAIRS = 4096  # that are all compared
BLOCK, CHUNK = 16, 256  # pairs of a program, and those that it compares them with at a time


@triton.jit
@no_type_check
def _route(
    logits,
    bias,
    chosen,
    weights,
    experts,
    top_k,
    temperature,
    scale,
    smallest,
    lowest,
    NORMALISE: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    ids = tl.arange(0, EXPERTS)
    is_expert = ids < experts
    x = tl.load(logits + token * experts + ids, mask=is_expert, other=0.0) / temperature
    power = tl.exp(tl.minimum(x, 20.0))
    more = 1.0 + power
    # The logarithm of 1 + power, also where power is lost in the sum.
    lost = more == 1.0
    log = tl.where(lost, power, tl.log(more) * (power / tl.where(lost, 1.0, more - 1.0)))
    score = tl.sqrt(tl.maximum(tl.where(x > 20.0, x, log), smallest))
    score = tl.where(x == x, score, x)  # noqa: PLR0124 -- not where NaN
    steered = score + tl.load(bias + ids, mask=is_expert, other=0.0).to(tl.float32)
    steered = tl.where(steered == steered, steered, lowest)  # noqa: PLR0124 -- likewise
    steered = tl.where(is_expert, steered, -float("inf"))
    is_chosen = ids < 0
    for _ in range(top_k):
        best = tl.min(tl.where(steered == tl.max(steered, 0), ids, EXPERTS), 0)
        is_chosen = is_chosen | (ids == best)
        steered = tl.where(ids == best, -float("inf"), steered)
    if NORMALISE:
        score = score / (tl.sum(tl.where(is_chosen, score, 0.0), 0) + 1e-20)
    place = token * top_k + tl.cumsum(is_chosen.to(tl.int32), 0) - 1
    tl.store(chosen + place, ids.to(tl.int64), mask=is_chosen)
    tl.store(weights + place, score * scale, mask=is_chosen)


@triton.jit
@no_type_check
def _order(ids, order, counts, pairs, experts, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(ids + pair, mask=pair < pairs, other=0)
    place = tl.zeros((BLOCK,), tl.int32)
    count = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, pairs, CHUNK):
        other = start + tl.arange(0, CHUNK)
        taken = tl.load(ids + other, mask=other < pairs, other=experts)[None, :]
        is_before = (taken < expert[:, None]) | (
            (taken == expert[:, None]) & (other[None, :] < pair[:, None])
        )
        place += tl.sum(is_before.to(tl.int32), 1)
        count += tl.sum((taken == pair[:, None]).to(tl.int32), 1)  # as the number of an expert
    tl.store(order + place, pair.to(tl.int64), mask=pair < pairs)
    tl.store(counts + pair, count.to(tl.int64), mask=pair < experts)


def _refuse(logits: Tensor, bias: Tensor, *_: object, normalise: bool) -> str | None:
    if logits.dtype != torch.float32 or bias.dtype != torch.float32:
        return f"logits and bias are {logits.dtype} and {bias.dtype}"
    if logits.shape[1] > MOST_EXPERTS:
        return f"there are {logits.shape[1]} experts, more than {MOST_EXPERTS}"
    return None


@kernel(refuse=_refuse)
@torch.no_grad()
def route(
    logits: Float[Tensor, "T E"],
    bias: Float[Tensor, " E"],
    top_k: int,
    temperature: float,
    scale: float,
    *,
    normalise: bool,
) -> tuple[Int[Tensor, "T A"], Float[Tensor, "T A"]]:
    """A token in a program."""
    tokens, experts = logits.shape
    chosen = torch.empty(tokens, top_k, dtype=torch.int64, device=logits.device)
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    limits = torch.finfo(logits.dtype)
    if chosen.numel():
        _route[(tokens,)](
            logits.contiguous(),
            bias.contiguous(),
            chosen,
            weights,
            experts,
            top_k,
            float(temperature),
            float(scale),
            limits.tiny,
            limits.min,
            NORMALISE=normalise and top_k > 1,
            EXPERTS=triton.next_power_of_2(experts),
            num_warps=1 if experts <= 128 else 4,
        )
    return chosen, weights


def _refuse_order(expert_ids: Tensor, num_experts: int) -> str | None:
    if expert_ids.numel() > MOST_PAIRS:
        return f"there are {expert_ids.numel()} pairs, more than {MOST_PAIRS}"
    return None


@kernel(refuse=_refuse_order)
def order_pairs(
    expert_ids: Int[Tensor, "T A"], num_experts: int
) -> tuple[Int[Tensor, " pairs"], Int[Tensor, " E"]]:
    """A few pairs, and a few experts' counts, in a program."""
    pairs = expert_ids.numel()
    order = torch.empty(pairs, dtype=torch.int64, device=expert_ids.device)
    counts = torch.empty(num_experts, dtype=torch.int64, device=expert_ids.device)
    _order[(triton.cdiv(max(pairs, num_experts), BLOCK),)](
        expert_ids.contiguous(),
        order,
        counts,
        pairs,
        num_experts,
        BLOCK=BLOCK,
        CHUNK=CHUNK,
        num_warps=4,
    )
    return order, counts
