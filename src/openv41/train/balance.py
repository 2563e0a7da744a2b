"""Load balance of the experts by their routing biases. Report §2.1.1."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from openv41.layers.experts import MixtureOfExperts
from openv41.model.causal_encoder_decoder import CausalEncoderDecoder

KINDS = ("text", "image")  # rows of the loads


@torch.no_grad()
def update_biases(
    model: CausalEncoderDecoder,
    loads: Mapping[int, Int[Tensor, "2 E"]],
    speed: float,
    *,
    by_modality: bool = True,
) -> None:
    """Apply bias += speed * sign(mean load - load), for text and for images apart.

    ``loads`` are the tokens that each expert of a layer got in one optimizer step. A kind of token
    that did not occur leaves its bias as it is, and so does a layer that is not among the loads.
    Without ``by_modality`` both biases follow the load of all tokens, which is the comparison that
    the report's design is measured against.
    """
    for module in model.modules():
        if not isinstance(module, MixtureOfExperts) or module.layer not in loads:
            continue
        load = loads[module.layer].to(module.gate.bias.device, torch.float64)
        if not by_modality:
            load = load.sum(dim=0, keepdim=True).expand(2, -1)
        move = speed * torch.sign(load.mean(dim=1, keepdim=True) - load)  # [2, E]
        for bias, row in zip((module.gate.bias, module.gate.bias_vl), move, strict=True):
            bias.add_(row.to(bias.dtype))


@dataclass(frozen=True, slots=True)
class Balance:
    """How even one kind of token was spread, per layer."""

    max_over_mean: list[float]  # 1 is perfect
    entropy: list[float]  # of the loads, over that of an even spread: 1 is perfect


def measure_balance(loads: Mapping[int, Int[Tensor, "2 E"]]) -> dict[str, Balance]:
    """Balance of "text" and of "image" tokens; a kind that did not occur is left out."""
    found: dict[str, Balance] = {}
    if not loads:  # a model without experts
        return found
    for kind, name in enumerate(KINDS):
        load = torch.stack([both[kind] for both in loads.values()]).double()  # [layers, E]
        if load.sum():
            share = load / load.sum(dim=1, keepdim=True)
            entropy = torch.special.entr(share).sum(dim=1) / math.log(load.shape[1])
            worst = load.amax(dim=1) / load.mean(dim=1)
            found[name] = Balance(worst.tolist(), entropy.tolist())
    return found
