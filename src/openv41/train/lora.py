"""LoRA: a low-rank update of chosen linear layers over a frozen model.

A layer computes with W + alpha / rank * B A. B starts at zero, so that the first step sees the
model as it was. Stacked experts have an A and a B each.
"""

import json
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from openv41.errors import CheckpointError, ConfigError, InputError
from openv41.io.checkpoint import Checkpoint, load_checkpoint
from openv41.io.checkpoint_hash import checkpoint_hash
from openv41.io.tensor_files import read_metadata, read_tensors, write_tensors
from openv41.layers.quantized_linear import Linear, QuantizedTable, QuantizedWeight
from openv41.model.causal_encoder_decoder import CausalEncoderDecoder
from openv41.train.config import LoraConfig
from openv41.train.parameter_rules import is_adapter, pattern_of

FORMAT = "openv41-lora-1"


class LowRankUpdate(nn.Module):
    """What is added to a weight: scale * B A."""

    def __init__(
        self,
        a: Float[Tensor, "... rank columns"],
        b: Float[Tensor, "... rows rank"],
        scale: float,
    ) -> None:
        super().__init__()
        self.a, self.b, self.scale = nn.Parameter(a), nn.Parameter(b), scale

    def forward(self) -> Float[Tensor, "... rows columns"]:
        """The update itself, as large as the weight."""
        return self.scale * (self.b @ self.a)


def adapt(model: CausalEncoderDecoder, config: LoraConfig, seed: int) -> None:
    """Give every linear layer that a target names an update of zero; A is random.

    A target is the end of a layer's name, or a pattern of it with *: ``wq_a``, ``experts.*``,
    ``layers.3.attention.w*``. Raises ConfigError for one that names no linear layer.
    """
    layers = linear_layers(model)
    problems = [
        f"targets names {target!r}, which is no linear layer; there are "
        + ", ".join(dict.fromkeys(map(pattern_of, layers)))
        for target in config.targets
        if not any(_is_named(name, target) for name in layers)
    ]
    widest = max(
        min(layer.weight.shape[-2:]) for layer in layers.values() if layer.weight is not None
    )
    if config.rank > widest:
        problems.append(f"rank is {config.rank}; the widest layer has {widest}, which is all of it")
    if problems:
        raise ConfigError("lora", problems)
    generator = torch.Generator(model.norm.weight.device).manual_seed(seed)
    for name, layer in layers.items():
        if any(_is_named(name, target) for target in config.targets):
            layer.update = _start(layer, config, generator)


def linear_layers(model: CausalEncoderDecoder) -> dict[str, Linear | QuantizedWeight]:
    """Linear layers by name; the stacked experts are three of them."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, Linear | QuantizedWeight) and not isinstance(module, QuantizedTable)
    }


def updates(model: CausalEncoderDecoder) -> dict[str, LowRankUpdate]:
    """Updates by the name of their layer."""
    return {
        name.removesuffix(".update"): module
        for name, module in model.named_modules()
        if isinstance(module, LowRankUpdate)
    }


@torch.no_grad()
def merged_state(model: CausalEncoderDecoder) -> dict[str, Tensor]:
    """State of the model as if it had been trained as a whole: every update is in its weight."""
    state = {name: t for name, t in model.state_dict().items() if not is_adapter(name)}
    for name, update in updates(model).items():
        state[f"{name}.weight"] = state[f"{name}.weight"] + update()
    return state


def merge(model: CausalEncoderDecoder) -> None:
    """Put every update into its weight and take it away."""
    state, layers = merged_state(model), linear_layers(model)
    for name in updates(model):
        layers[name].update = None
    model.load_state_dict(state)


def save_adapter(
    model: CausalEncoderDecoder, path: Path, config: LoraConfig, base: str | None
) -> None:
    """Write A and B alone; ``base`` is the hash of the checkpoint that they belong to."""
    tensors = {n: p.detach() for n, p in model.named_parameters() if is_adapter(n)}
    about = {"format": FORMAT, "base": base, "lora": asdict(config)}
    write_tensors(path, tensors, {"adapter": json.dumps(about)})


def load_adapted(checkpoint: Path, adapter: Path) -> Checkpoint:
    """Load a checkpoint in float32 with all that belongs to it, and a saved adapter on its model.

    Raises CheckpointError where the adapter belongs to another checkpoint.
    """
    about = _read_about(adapter)
    found = checkpoint_hash(checkpoint)
    if about["base"] != found:
        raise CheckpointError(
            f"{adapter} belongs to a checkpoint of hash {about['base']}, {checkpoint} has {found}; "
            "name the one that the adapter was trained on"
        )
    loaded = load_checkpoint(checkpoint, dtype=torch.float32)
    load_adapter(loaded.model, adapter)
    return loaded


def load_adapter(model: CausalEncoderDecoder, path: Path) -> None:
    """Put a saved adapter onto a model of the same shapes."""
    lora = _read_about(path)["lora"]
    scale, tensors = lora["alpha"] / lora["rank"], read_tensors(path)
    layers, device = linear_layers(model), model.norm.weight.device
    for name in sorted({key.rpartition(".update.")[0] for key in tensors}):
        a, b = (tensors[f"{name}.update.{part}"].to(device) for part in "ab")
        weight = layers[name].weight if name in layers else None
        if weight is None or weight.shape != (*b.shape[:-1], a.shape[-1]):
            shape = "is not there" if weight is None else f"has the shape {tuple(weight.shape)}"
            raise CheckpointError(
                f"{path}: {name} has an update of {tuple(b.shape)} x {tuple(a.shape)}, the "
                f"model's layer {shape}; load the model that the adapter was trained on"
            )
        layers[name].update = LowRankUpdate(a, b, scale)


def _read_about(path: Path) -> dict[str, Any]:
    try:
        about: dict[str, Any] = json.loads(read_metadata(path)["adapter"])
    except (KeyError, ValueError):
        about = {}
    if about.get("format") != FORMAT:
        raise InputError(f"{path} is no LoRA adapter ({FORMAT}); name one that 'train' wrote")
    return about


def _is_named(name: str, target: str) -> bool:
    return fnmatchcase(name, target) or fnmatchcase(name, f"*.{target}")


def _start(
    layer: Linear | QuantizedWeight, config: LoraConfig, generator: torch.Generator
) -> LowRankUpdate:
    """A uniform in +-1/sqrt(columns), as torch fills linear layers; B zero."""
    weight = layer.weight
    assert weight is not None, "LoRA is for float weights"
    *stack, rows, columns = weight.shape
    a, b = (
        weight.new_empty(*stack, config.rank, columns),
        weight.new_zeros(*stack, rows, config.rank),
    )
    a.uniform_(-(columns**-0.5), columns**-0.5, generator=generator)
    return LowRankUpdate(a, b, config.alpha / config.rank)
