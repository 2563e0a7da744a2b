"""Routing of tokens to experts, and how even it is. Report §2.1.1."""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from openv41.ops._dispatch import op
from openv41.ops.deterministic import elementwise
from openv41.ops.linear import wide_linear
from openv41.ops.pairs import count_ids


@op
def router_scores(
    x: Float[Tensor, "T D"],
    weight: Float[Tensor, "E D"],
    temperature: float,
    *,
    deterministic: bool = False,
) -> Float[Tensor, "T E"]:
    """Affinity of each token to each expert: sqrt(softplus(x W^T / temperature)).

    At least float32, whatever the dtype of the input.
    """
    logits = wide_linear(x, weight, deterministic=deterministic)
    if temperature != 1:
        logits = logits / temperature
    smallest = torch.finfo(logits.dtype).tiny  # softplus may underflow; sqrt has no slope at zero
    positive = elementwise(logits, F.softplus) if deterministic else F.softplus(logits)
    return positive.clamp(min=smallest).sqrt()


@op
def choose_experts(
    scores: Float[Tensor, "T E"], bias: Float[Tensor, "T E"], top_k: int
) -> Int[Tensor, "T A"]:
    """Choose the experts with the highest score + bias, lowest id among equals, in id order.

    Every row gets ``top_k`` legal ids, also one of NaN, which then spoils no other row.
    """
    steered = scores + bias
    steered = steered.nan_to_num(nan=torch.finfo(steered.dtype).min)
    best_first = steered.sort(dim=1, descending=True, stable=True).indices
    return best_first[:, :top_k].sort(dim=1).values


@op
def expert_weights(
    scores: Float[Tensor, "T E"], expert_ids: Int[Tensor, "T A"], *, normalise: bool, scale: float
) -> Float[Tensor, "T A"]:
    """Weigh the chosen experts by their raw scores (the bias only steers the choice).

    Normalised to sum 1 where more than one is chosen, then scaled.
    """
    weights = scores.gather(1, expert_ids)
    if normalise and expert_ids.shape[1] > 1:
        weights = weights / (weights.sum(dim=1, keepdim=True) + 1e-20)
    return weights * scale


@op
def sequence_balance(
    scores: Float[Tensor, "T E"],
    expert_ids: Int[Tensor, "T A"],
    sequences: Int[Tensor, " T"],
    num_sequences: int,
) -> Float[Tensor, ""]:
    """Balance loss of each sequence, averaged over the tokens: 1 where all is even.

    Of one sequence it is sum_i f_i P_i: f_i is E / A times the share of its tokens that chose
    expert i, P_i the mean over its tokens of score_i / sum_j score_j. Only P has a gradient.
    ``sequences`` numbers the sequence of each token; one without tokens counts for nothing.
    """
    num_experts, top_k = scores.shape[1], expert_ids.shape[1]
    tokens = count_ids(sequences, num_sequences)[:, None]  # [sequences, 1]
    places = sequences[:, None] * num_experts + expert_ids
    picks = count_ids(places, num_sequences * num_experts)
    shares = scores / scores.sum(dim=1, keepdim=True)
    summed = shares.new_zeros(num_sequences, num_experts).index_add(0, sequences, shares)
    load = picks.view_as(summed).to(summed.dtype) * num_experts / (top_k * tokens.clamp(min=1))
    return (load * summed).sum() / max(1, len(scores))
