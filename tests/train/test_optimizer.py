"""Every parameter stands in the table once, and its group is treated as the table says."""

import re

import pytest
import torch

from openv41.model.causal_encoder_decoder import CausalEncoderDecoder
from openv41.presets import PRESETS
from openv41.train.config import OptimizerConfig
from openv41.train.optimizer import PARAMETER_GROUPS, group_of, make_optimizer, set_lr
from tests.layers.mini import mini_model


@pytest.mark.parametrize("name", ["tiny", "thin", "released"])
def test_the_table_is_exactly_the_model(name):
    model = CausalEncoderDecoder(PRESETS[name](), device="meta")
    found = {re.sub(r"\.\d+\.", ".*.", n, count=1) for n, _ in model.named_parameters()}
    absent = {n for n in PARAMETER_GROUPS if n.startswith("vision.") and model.vision is None}
    assert found == set(PARAMETER_GROUPS) - absent


def test_an_unknown_parameter_is_an_error():
    with pytest.raises(AssertionError, match=r"layers\.0\.attention\.wq\.weight is in no row"):
        group_of("layers.0.attention.wq.weight")


def test_only_matrices_decay_and_factors_reach_their_groups():
    model = mini_model(0, torch.float32)
    config = OptimizerConfig(weight_decay=0.5, embedding_lr_factor=2.0, engram_table_lr_factor=3.0)
    optimizer = make_optimizer(model, config)
    set_lr(optimizer, 0.01)
    groups = {g["name"]: (g["weight_decay"], round(g["lr"], 9)) for g in optimizer.param_groups}
    assert groups == {
        "embedding": (0.0, 0.02),
        "engram table": (0.0, 0.03),
        "matrix": (0.5, 0.01),
        "vector": (0.0, 0.01),
    }
    trained = {id(p) for g in optimizer.param_groups for p in g["params"]}
    for name, parameter in model.named_parameters():
        left_out = ".indexer." in name or ".gate.bias" in name
        assert parameter.requires_grad == (id(parameter) in trained) == (not left_out), name


def test_matrices_are_two_dimensional_and_vectors_one_dimensional_or_gate_norms():
    model = mini_model(0, torch.float32)
    for name, parameter in model.named_parameters():
        if group_of(name) == "matrix":
            assert parameter.ndim >= 2, name
        if group_of(name) == "vector":
            assert parameter.ndim == 1 or name.endswith(("q_weight", "k_weight")), name


def test_adamw_by_hand():
    """First step: the moments' bias corrections cancel, so each entry moves by lr (and decays)."""
    model = mini_model(0, torch.float32)
    optimizer = make_optimizer(model, OptimizerConfig(lr=0.1, weight_decay=0.5))
    matrix, embedding = model.layers[0].attention.wkv.weight, model.embed.weight
    before = matrix.detach().clone(), embedding.detach().clone()
    matrix.grad = torch.full_like(matrix, 0.3)
    embedding.grad = torch.zeros_like(embedding)
    embedding.grad[5] = -2.0
    set_lr(optimizer, 0.1)
    optimizer.step()
    torch.testing.assert_close(matrix, before[0] * (1 - 0.1 * 0.5) - 0.1)
    before[1][5] += 0.1
    torch.testing.assert_close(embedding, before[1])
