"""The model of a stage with its first values: random ones, or those of a checkpoint."""

from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from openv41.config import ModelConfig
from openv41.io.checkpoint import DRAFTER, load_model
from openv41.io.hf_config import read_config
from openv41.model.causal_encoder_decoder import CausalEncoderDecoder
from openv41.model.init import init_weights
from openv41.train.contrastive import ContrastiveModel
from openv41.train.lora import adapt
from openv41.train.placement import StageModel
from openv41.train.replay_simulation import warn_without_cut
from openv41.train.stages import Stage


def make_model(
    stage: Stage,
    whole: ModelConfig,
    token_map: Int[Tensor, " V"] | None,
    *,
    base: Path | None,
    seed: int,
    device: torch.device,
) -> StageModel:
    """What a stage trains of a run for ``whole``, with its adapter if it has one.

    Weights are those of the checkpoint ``base``, dequantised, or else depend on the seed and the
    shapes alone; so do those of a drafter that the checkpoint lacks.
    """
    config, numerics = stage.own_model(whole), stage.train.rounding
    if stage.is_contrastive:
        pairs = ContrastiveModel(config, numerics, device=device, dtype=torch.float32)
        pairs.init(seed)
        return pairs
    warn_without_cut(config, stage.train)
    model = CausalEncoderDecoder(config, numerics, device=device, dtype=torch.float32)
    if token_map is not None and config.engram is not None:
        model.set_token_map(token_map)
    if base is None:
        init_weights(model, seed)
    else:
        _fill(model, base, seed, device)
    if stage.train.lora.rank:
        adapt(model, stage.train.lora, seed)
    return model


def _fill(model: CausalEncoderDecoder, base: Path, seed: int, device: torch.device) -> None:
    """Give a model the weights of a checkpoint, and a drafter its first ones."""
    has_drafter = model.drafter is not None and read_config(base).dspark is not None
    loaded = load_model(base, dtype=torch.float32, device=device, drafter=has_drafter)
    values = loaded.state_dict()
    if model.drafter is not None and not has_drafter:
        init_weights(model.drafter, seed)
        own = model.drafter.state_dict()
        values |= {f"{DRAFTER}{name}": value for name, value in own.items()}
    model.load_state_dict(values)
