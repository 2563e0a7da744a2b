"""Kernels of the routing of a few tokens, which launches dominate. Report §2.1.1.

A program chooses best expert after best expert, for all tokens where it can hold their scores: it
then knows the places of all pairs from sums along both sides of what is chosen. Else programs
choose for one token each, and others find the places of a few pairs by comparing them with all
others. Floors are those of an empty launch.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from openv41.ops._dispatch import kernel
from openv41.ops.pairs import places_of, sort_by_expert
from openv41.ops.routed import Routed

MOST_EXPERTS = 1024  # that a program holds
MOST_PAIRS = 4096  # that are all compared
MOST_SCORES = 1 << 13  # of all tokens, that one program holds
BLOCK, CHUNK = 16, 256  # pairs of a program, and those that it compares them with at a time


@triton.jit
@no_type_check
def _choose(x, bias, ids, is_expert, top_k, smallest, lowest, EXPERTS: tl.constexpr):
    """Scores of rows of logits [tokens, experts], and which experts each row chooses."""
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
    taken = tl.zeros(x.shape, tl.int32)
    for _ in range(top_k):
        best = tl.max(steered, 1)[:, None]
        first = tl.min(tl.where(steered == best, ids, EXPERTS), 1)[:, None]
        taken = taken | (ids == first).to(tl.int32)
        steered = tl.where(ids == first, -float("inf"), steered)
    return score, taken


@triton.jit
@no_type_check
def _route(
    logits,
    bias,
    chosen,
    weights,
    order,
    places,
    counts,
    tokens,
    experts,
    top_k,
    temperature,
    scale,
    smallest,
    lowest,
    NORMALISE: tl.constexpr,
    ORDER: tl.constexpr,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """``TOKENS`` tokens; with ``ORDER`` they are all that there are."""
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    ids = tl.arange(0, EXPERTS)[None, :]
    is_token, is_expert = token < tokens, ids < experts
    x = tl.load(logits + token * experts + ids, mask=is_token & is_expert, other=0.0) / temperature
    score, taken = _choose(x, bias, ids, is_expert, top_k, smallest, lowest, EXPERTS)
    taken = tl.where(is_token, taken, 0)
    is_chosen = taken > 0
    if NORMALISE:
        total = tl.sum(tl.where(is_chosen, score, 0.0), 1)
        score = score / (total + 1e-20)[:, None]
    pair = token * top_k + tl.cumsum(taken, 1) - 1
    tl.store(chosen + pair, (ids + token * 0).to(tl.int64), mask=is_chosen)
    tl.store(weights + pair, score * scale, mask=is_chosen)
    if ORDER:
        count = tl.sum(taken, 0)[None, :]
        place = tl.cumsum(count, 1) - count + tl.cumsum(taken, 0) - 1
        tl.store(order + place, pair, mask=is_chosen)
        tl.store(places + pair, place.to(tl.int64), mask=is_chosen)
        tl.store(counts + ids, count.to(tl.int64), mask=is_expert)


@triton.jit
@no_type_check
def _order(ids, order, places, counts, pairs, experts, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
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
    tl.store(places + pair, place.to(tl.int64), mask=pair < pairs)
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
) -> Routed:
    """All tokens in one program, or a token in a program and then the order."""
    tokens, experts = logits.shape
    chosen = torch.empty(tokens, top_k, dtype=torch.int64, device=logits.device)
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    order, places = torch.empty_like(chosen.flatten()), torch.empty_like(chosen.flatten())
    counts = chosen.new_empty(experts)
    if not chosen.numel():
        return Routed(chosen, weights, order, places, counts.zero_())
    limits, width = torch.finfo(logits.dtype), triton.next_power_of_2(experts)
    held = triton.next_power_of_2(tokens)
    is_whole = held * width <= MOST_SCORES
    held = held if is_whole else 1
    _route[(triton.cdiv(tokens, held),)](
        logits.contiguous(),
        bias.contiguous(),
        *(chosen, weights, order, places, counts),
        *(tokens, experts, top_k),
        float(temperature),
        float(scale),
        limits.tiny,
        limits.min,
        NORMALISE=normalise and top_k > 1,
        ORDER=is_whole,
        TOKENS=held,
        EXPERTS=width,
        num_warps=min(16, max(1, held * width // 256)),
    )
    if not is_whole:
        order, places, counts = _sorted(chosen, experts)
    return Routed(chosen, weights, order, places, counts)


def _sorted(ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Order, places and counts of the pairs."""
    pairs, ids = ids.numel(), ids.contiguous()
    if pairs > MOST_PAIRS:
        order, counts = sort_by_expert(ids, experts)
        return order, places_of(order), counts
    order, places = (torch.empty(pairs, dtype=torch.int64, device=ids.device) for _ in range(2))
    counts = torch.empty(experts, dtype=torch.int64, device=ids.device)
    grid = (triton.cdiv(max(pairs, experts), BLOCK),)
    _order[grid](
        *(ids, order, places, counts, pairs, experts), BLOCK=BLOCK, CHUNK=CHUNK, num_warps=4
    )
    return order, places, counts


def _refuse_order(expert_ids: Tensor, num_experts: int) -> str | None:
    if expert_ids.numel() > MOST_PAIRS:
        return f"there are {expert_ids.numel()} pairs, more than {MOST_PAIRS}"
    return None


@kernel(refuse=_refuse_order)
def order_pairs(
    expert_ids: Int[Tensor, "T A"], num_experts: int
) -> tuple[Int[Tensor, " pairs"], Int[Tensor, " E"]]:
    """A few pairs, and a few experts' counts, in a program."""
    order, _, counts = _sorted(expert_ids, num_experts)
    return order, counts
