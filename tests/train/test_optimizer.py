"""The optimizers of a run: groups, factors, freezing, and the switches of comparisons."""

from dataclasses import replace

import pytest
import torch

from openv41.model.causal_encoder_decoder import CausalEncoderDecoder
from openv41.presets import tiny
from openv41.train.config import OptimizerConfig
from openv41.train.muon import Muon
from openv41.train.optimizer import Optimizers, choose_rule
from openv41.train.parameter_rules import rule_of
from openv41.train.placement import distribute
from tests.layers.mini import mini_model


def settings_of(optimizers):
    return {
        g["name"]: (round(g["lr"], 9), g.get("weight_decay"), g.get("blocks"))
        for g in optimizers.groups
    }


def test_groups_carry_rule_rate_decay_and_heads():
    model = CausalEncoderDecoder(tiny(), device="meta")
    config = OptimizerConfig(
        weight_decay=0.5, token_lr_factor=2.0, engram_table_lr_factor=3.0, vision_lr_factor=0.5
    )
    optimizers = Optimizers(distribute(model), config)
    optimizers.set_lr(0.01)
    assert settings_of(optimizers) == {
        "backbone: adamw": (0.01, 0.5, None),
        "backbone: adamw without decay": (0.01, 0.0, None),
        "backbone: muon": (0.01, 0.5, 1),
        "backbone: muon by index heads": (0.01, 0.5, 2),
        "backbone: muon by query heads": (0.01, 0.5, 2),
        "tokens: sinkhorn": (0.02, None, None),
        "engram table: sinkhorn": (0.03, None, None),
        "vision encoder: adamw": (0.005, 0.5, None),
        "vision encoder: adamw without decay": (0.005, 0.0, None),
        "vision encoder: muon": (0.005, 0.5, 1),
        "vision encoder: muon by query, key, value": (0.005, 0.5, 3),
    }
    updated = {id(p) for p in optimizers.parameters()}
    for name, parameter in model.named_parameters():
        left_out = ".gate.bias" in name
        assert parameter.requires_grad == (id(parameter) in updated) == (not left_out), name


@pytest.mark.parametrize(
    ("change", "name", "update", "blocks"),
    [
        ({"head_wise": False}, "layers.0.attention.wq_b.weight", "muon", "one"),
        ({"head_wise": False}, "layers.2.attention.indexer.wq_b.weight", "muon", "one"),
        ({"matrix_update": "adamw"}, "layers.0.attention.wq_b.weight", "adamw", "one"),
        ({"matrix_update": "adamw"}, "layers.0.attention.wo_a.weight", "adamw", "one"),
        ({"token_update": "adamw"}, "embed.weight", "adamw", "one"),
        ({"token_update": "adamw"}, "layers.1.engram.table.weight", "adamw", "one"),
    ],
)
def test_comparisons_change_one_rule(change, name, update, blocks):
    config = OptimizerConfig(**change)
    assert choose_rule(name, config) == replace(rule_of(name), update=update, blocks=blocks)
    for other in ("norm.weight", "layers.0.attention.sink", "layers.0.moe.gate.bias"):
        assert choose_rule(other, config) == rule_of(other)


def test_tokens_that_adamw_updates_do_not_decay():
    optimizers = Optimizers(
        distribute(mini_model(0, torch.float32)), OptimizerConfig(token_update="adamw")
    )
    settings = settings_of(optimizers)
    assert settings["engram table: adamw without decay"][1] == 0.0


def test_each_update_reaches_its_parameters():
    """Sizes of the first step by hand: each rule moves an entry by its own amount."""
    model = mini_model(0, torch.float32)
    optimizers = Optimizers(
        distribute(model), OptimizerConfig(weight_decay=0.0, engram_table_lr_factor=2.0)
    )
    watched = {
        "layers.0.attention.wkv.weight": 0.18,
        "layers.0.attention.wq_b.weight": 0.18,
        "embed.weight": 0.18,
        "layers.1.engram.table.weight": 0.36,
        "norm.weight": 1.0,
    }
    parameters = dict(model.named_parameters())
    before = {name: parameters[name].detach().clone() for name in watched}
    for name in watched:
        parameters[name].grad = torch.randn_like(parameters[name])
    optimizers.set_lr(0.01)
    optimizers.step()
    for name, rms in watched.items():
        moved = (parameters[name].detach() - before[name]).square().mean().sqrt()
        assert moved == pytest.approx(0.01 * rms, rel=0.01), name
    optimizers.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_state_is_that_of_the_optimizer_in_charge():
    model = mini_model(0, torch.float32)
    optimizers = Optimizers(distribute(model), OptimizerConfig())
    matrix = model.layers[0].attention.wkv.weight
    matrix.grad = torch.randn_like(matrix)
    optimizers.step()
    [muon] = [part for part in optimizers.parts if isinstance(part, Muon)]
    assert optimizers.state(matrix)["momentum"] is muon.state[matrix]["momentum"]
    assert not optimizers.state(model.embed.weight)
