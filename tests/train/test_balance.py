"""The sign rule of the routing biases, by hand."""

import math

import pytest
import torch

from openv41.train.balance import measure_balance, update_biases
from tests.layers.mini import mini_model

TEXT = [4, 0, 2, 2, 2]  # mean 2
IMAGE = [0, 0, 0, 0, 5]  # mean 1


def loads(model, image):
    return {layer: torch.tensor([TEXT, image]) for layer in range(model.config.num_layers)}


def test_busy_experts_sink_and_idle_ones_rise():
    model = mini_model(0)
    gates = [layer.moe.gate for layer in model.layers]
    before = [(g.bias.clone(), g.bias_vl.clone()) for g in gates]
    update_biases(model, loads(model, IMAGE), 0.25)
    for gate, (bias, bias_vl) in zip(gates, before, strict=True):
        assert torch.equal(gate.bias, bias + torch.tensor([-0.25, 0.25, 0, 0, 0]))
        assert torch.equal(gate.bias_vl, bias_vl + torch.tensor([0.25, 0.25, 0.25, 0.25, -0.25]))


def test_a_step_without_images_leaves_their_bias():
    model = mini_model(0)
    before = [layer.moe.gate.bias_vl.clone() for layer in model.layers]
    update_biases(model, loads(model, [0] * 5), 0.25)
    for layer, bias_vl in zip(model.layers, before, strict=True):
        assert torch.equal(layer.moe.gate.bias_vl, bias_vl)


def test_a_mean_that_is_no_integer():
    model = mini_model(0)
    before = model.layers[0].moe.gate.bias.clone()
    uneven = {n: torch.tensor([[2, 3, 2, 2, 2], [0] * 5]) for n in range(9)}  # mean 2.2
    update_biases(model, uneven, 1.0)
    move = model.layers[0].moe.gate.bias - before
    torch.testing.assert_close(move, torch.tensor([1.0, -1, 1, 1, 1], dtype=move.dtype))


def test_one_bias_for_both_follows_the_load_of_all():
    model = mini_model(0)
    gates = [layer.moe.gate for layer in model.layers]
    before = [(g.bias.clone(), g.bias_vl.clone()) for g in gates]
    update_biases(model, loads(model, IMAGE), 0.25, by_modality=False)  # [4, 0, 2, 2, 7], mean 3
    move = torch.tensor([-0.25, 0.25, 0.25, 0.25, -0.25])
    for gate, (bias, bias_vl) in zip(gates, before, strict=True):
        assert torch.equal(gate.bias, bias + move)
        assert torch.equal(gate.bias_vl, bias_vl + move)


def test_balance_is_measured_per_layer_and_kind():
    even = torch.tensor([[3, 3], [9, 0]])
    skewed = torch.tensor([[1, 5], [4, 4]])
    found = measure_balance({0: even, 1: skewed})
    assert found["text"].max_over_mean == pytest.approx([1, 5 / 3])
    assert found["image"].max_over_mean == pytest.approx([2, 1])
    uneven = -(math.log2(1 / 6) / 6 + math.log2(5 / 6) * 5 / 6)
    assert found["text"].entropy == pytest.approx([1, uneven])
    assert found["image"].entropy == pytest.approx([0, 1])
    assert measure_balance({0: torch.tensor([[1, 1], [0, 0]])}).keys() == {"text"}
