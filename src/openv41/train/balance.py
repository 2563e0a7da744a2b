"""Load balance of the experts by their routing biases. Report §2.1.1."""

from collections.abc import Mapping

import torch
from jaxtyping import Int
from torch import Tensor

from openv41.layers.experts import MixtureOfExperts
from openv41.model.causal_encoder_decoder import CausalEncoderDecoder


@torch.no_grad()
def update_biases(
    model: CausalEncoderDecoder, loads: Mapping[int, Int[Tensor, "2 E"]], speed: float
) -> None:
    """Apply bias += speed * sign(mean load - load), for text and for images apart.

    ``loads`` are the tokens that each expert of a layer got in one optimizer step. A kind of token
    that did not occur leaves its bias as it is.
    """
    for module in model.modules():
        if not isinstance(module, MixtureOfExperts):
            continue
        load = loads[module.layer].to(torch.float64)
        move = speed * torch.sign(load.mean(dim=1, keepdim=True) - load)  # [2, E]
        for bias, row in zip((module.gate.bias, module.gate.bias_vl), move, strict=True):
            bias.add_(row.to(bias.dtype))


def worst_load(loads: Mapping[int, Int[Tensor, "2 E"]]) -> float:
    """Largest load of a text expert over the mean load of its layer; 1 is perfect balance."""
    text = torch.stack([load[0] for load in loads.values()]).double()  # [layers, E]
    return float((text.amax(dim=1) / text.mean(dim=1)).max())
