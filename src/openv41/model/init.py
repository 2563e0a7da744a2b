"""Initial values: every standard deviation in one table. Report §2.5."""

import torch
from torch import nn

from openv41.layers.embedding import Embedding
from openv41.layers.engram import Engram
from openv41.layers.experts import Gate
from openv41.layers.latent_attention import LatentAttention
from openv41.layers.quantized_linear import Linear, QuantizedWeight, RMSNorm
from openv41.layers.single_pass_mhc import SinglePassMHC
from openv41.model.image_tower import ImageTower

STD = 0.02


@torch.no_grad()
def init_weights(model: nn.Module, seed: int) -> None:
    """Fill every parameter; the values depend on the seed and the model's shapes alone."""
    generator = torch.Generator(device=next(model.parameters()).device).manual_seed(seed)
    for module in model.modules():
        _init_module(module, generator)


def _init_module(module: nn.Module, generator: torch.Generator) -> None:
    """Matrices normal(STD), norms and mHC scales one, biases, bases and sinks zero."""
    match module:
        case Linear() | QuantizedWeight() | Embedding():
            assert module.weight is not None, "stored codes cannot be initialised"
            module.weight.normal_(0, STD, generator=generator)
            if isinstance(module, Linear) and module.bias is not None:
                module.bias.zero_()
        case RMSNorm():
            module.weight.fill_(1)
        case SinglePassMHC():
            module.fn.normal_(0, STD, generator=generator)
            module.base.zero_()
            module.scale.fill_(1)
        case Gate():
            module.weight.normal_(0, STD, generator=generator)
            module.bias.zero_()
            module.bias_vl.zero_()
        case LatentAttention():
            module.sink.zero_()
        case ImageTower():
            for mark in (module.start, module.newline, module.end):
                mark.normal_(0, STD, generator=generator)
        case Engram():
            module.q_weight.fill_(1)
            module.k_weight.fill_(1)
