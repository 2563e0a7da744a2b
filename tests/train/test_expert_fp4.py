"""Experts that train with weights rounded as the released checkpoint stores them."""

import copy
from dataclasses import replace

import pytest
import torch

from openv41.config import NUMERICS
from openv41.io.checkpoint import load_model, save_model
from openv41.layers.batch import Batch
from openv41.model.causal_encoder_decoder import CausalEncoderDecoder
from openv41.model.init import init_weights
from openv41.ops import quantize
from openv41.train.config import TrainConfig
from tests.close import assert_close
from tests.io.tiny_checkpoint import make_checkpoint
from tests.layers.mini import mini_model, random_ids
from tests.oracles import formats

QAT = TrainConfig(numerics="f32qat", expert_fp4=True).rounding
IDS = [random_ids(n, seed=n) for n in (13, 9)]
STACKS = ("w1", "w3", "w2")


def stacks(model):
    return [getattr(layer.moe.experts, name) for layer in model.layers for name in STACKS]


@torch.no_grad()
def hidden(model, documents=IDS):
    return model(Batch.from_documents(documents)).hidden


def test_forward_is_that_of_the_exported_experts(tmp_path):
    """Exported in the released format and loaded again, experts alone: equal to the bit."""
    stored = load_model(make_checkpoint(tmp_path), dtype=torch.float32)
    config = stored.config
    model = CausalEncoderDecoder(config, QAT, dtype=torch.float32)
    model.set_token_map(stored.token_map)
    init_weights(model, 5)
    save_model(model, tmp_path / "out", variant="released")
    loaded = load_model(tmp_path / "out")
    exported = CausalEncoderDecoder(config, NUMERICS["f32qat"], dtype=torch.float32)
    exported.load_state_dict(model.state_dict())
    exported.set_token_map(stored.token_map)
    for own, given in zip(stacks(exported), stacks(loaded), strict=True):
        assert given.is_stored
        own.store(given.codes, given.scales)
    ids = [[token % config.vocab_size for token in document] for document in IDS]
    got = hidden(model, ids)
    assert torch.equal(got, hidden(exported, ids))
    model_off = copy.deepcopy(exported)
    plain = CausalEncoderDecoder(config, NUMERICS["f32qat"], dtype=torch.float32)
    plain.load_state_dict(model.state_dict())
    plain.set_token_map(stored.token_map)
    assert not torch.allclose(got, hidden(plain, ids), rtol=1e-3), "the rounding can be seen"
    for layer in model_off.layers:
        layer.moe.experts.numerics = QAT
    assert torch.equal(got, hidden(model_off, ids)), "codes are not rounded again"


@pytest.mark.parametrize("rounding", ["fake", "exact"])
def test_rounded_values_are_the_oracles(rounding):
    model = mini_model(4, torch.float64, replace(NUMERICS["f32"], expert_weights=rounding))
    plain = mini_model(4, torch.float64)
    with torch.no_grad():
        for stack in stacks(plain):
            rows = stack.weight.flatten(0, 1)
            for row in rows:
                row.copy_(torch.tensor(formats.fake_mxfp4(row.tolist())))
    assert_close("hidden", hidden(model), hidden(plain), rtol=1e-10, atol=1e-10)


def test_gradients_pass_straight_through():
    """They are those of a plain model that has the rounded weights."""
    model = mini_model(4, torch.float64, replace(NUMERICS["f32"], expert_weights="fake"))
    plain = mini_model(4, torch.float64)
    with torch.no_grad():
        for stack in stacks(plain):
            stack.weight.copy_(quantize.fake_fp4_rows(stack.weight))
    for one in (model, plain):
        one(Batch.from_documents(IDS)).hidden.square().sum().backward()
    for got, want in zip(stacks(model), stacks(plain), strict=True):
        assert want.weight.grad.abs().max() > 0
        assert_close("gradient", got.weight.grad, want.weight.grad, rtol=1e-9, atol=1e-12)


def test_off_leaves_the_forward_alone():
    assert TrainConfig().rounding == NUMERICS["f32"]
    assert TrainConfig(numerics="f32qat").rounding == NUMERICS["f32qat"]
    assert replace(QAT, expert_weights="off") == NUMERICS["f32qat"]


def test_each_stack_is_rounded_once_in_a_forward(monkeypatch):
    model, calls = mini_model(4, torch.float64, QAT), []
    rounded = quantize.fake_fp4_rows

    def count(w):
        calls.append(w.shape)
        return rounded(w)

    monkeypatch.setattr(quantize, "fake_fp4_rows", count)
    hidden(model)
    assert len(calls) == 3 * model.config.num_layers
    first, *_ = stacks(model)
    first.store(*quantize.quantize_fp4_rows(first.weight.detach()))
    calls.clear()
    hidden(model)
    assert len(calls) == 3 * model.config.num_layers - 1, "codes are not rounded again"
