"""The step against plain cross-entropy; what a bad loss leaves behind."""

import math
from dataclasses import replace

import pytest
import torch

from openv41.image_grid import ImageGrid
from openv41.layers.batch import Batch
from openv41.train import step as step_module
from openv41.train.config import OptimizerConfig, TrainConfig
from openv41.train.optimizer import Optimizers
from openv41.train.packed_batch import PackedBatch
from openv41.train.placement import distribute
from openv41.train.step import DivergedError, next_tokens, train_step
from tests.layers.mini import mini_model, random_ids

pytestmark = pytest.mark.unchecked

LENGTHS = (7, 1, 12)
CONFIG = TrainConfig(tokens=200, batch_tokens=20, sequence_length=20, warmup_tokens=0)


@pytest.fixture
def model():
    return mini_model(1, torch.float64)


def ids():
    return torch.tensor(random_ids(sum(LENGTHS)))


def test_targets_stay_within_their_documents():
    rows, targets = next_tokens(torch.arange(10, 16), (3, 1, 2))
    assert rows.tolist() == [0, 1, 4]
    assert targets.tolist() == [11, 12, 15]


def test_gradients_are_clipped_to_the_norm_of_all_of_them_together(model):
    optimizer = Optimizers(distribute(model), CONFIG.optimizer)
    model.embed.weight.grad = torch.zeros_like(model.embed.weight)
    model.head.weight.grad = torch.zeros_like(model.head.weight)
    model.embed.weight.grad[0, 0], model.head.weight.grad[1, 1] = 3.0, 4.0
    assert optimizer.clip_gradients(0.0) == pytest.approx(5)
    assert model.embed.weight.grad[0, 0] == pytest.approx(3)
    assert optimizer.clip_gradients(1.0) == pytest.approx(5)
    assert model.embed.weight.grad[0, 0] == pytest.approx(0.6, rel=1e-5)
    assert model.head.weight.grad[1, 1] == pytest.approx(0.8, rel=1e-5)


def test_a_step_moves_the_biases_by_its_own_loads(model):
    optimizer = Optimizers(distribute(model), CONFIG.optimizer)
    before = model.layers[3].moe.gate.bias.detach().clone()
    result = train_step(model, optimizer, PackedBatch(ids(), LENGTHS), CONFIG, 0)
    load = result.loads[3][0]
    assert load.sum() == sum(LENGTHS) * model.config.moe.top_k
    want = before + 0.001 * torch.sign(load.double().mean() - load)
    torch.testing.assert_close(model.layers[3].moe.gate.bias.detach(), want)


@pytest.mark.parametrize("place", ["loss", "gradient"])
def test_a_loss_that_is_not_finite_changes_nothing(model, monkeypatch, place):
    optimizer = Optimizers(distribute(model), CONFIG.optimizer)
    if place == "loss":
        monkeypatch.setattr(step_module.Sums, "loss", math.nan)
    else:
        model.head.weight.register_hook(lambda grad: grad * float("inf"))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(DivergedError, match=r"step 5: the loss is .*lower optimizer\.lr"):
        train_step(model, optimizer, PackedBatch(ids(), LENGTHS), CONFIG, 4)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(p.grad is None for p in model.parameters())


def test_parts_of_a_batch_give_the_step_of_the_whole():
    """4 x b == 1 x 4b: loss, losses of layers, gradient norm, parameters, loads and biases."""
    lengths = (5, 4, 6, 5)
    packed = PackedBatch(torch.tensor(random_ids(20, seed=9)), lengths)
    whole, parts = mini_model(2, torch.float64), mini_model(2, torch.float64)
    config = TrainConfig(tokens=200, batch_tokens=20, sequence_length=20, warmup_tokens=0)
    results = []
    for model, most in ((whole, 0), (parts, 6)):
        own = replace(config, micro_batch_tokens=most, update_rms_steps=1)
        optimizer = Optimizers(distribute(model), own.optimizer)
        results.append(train_step(model, optimizer, packed, own, 0))
    assert [len(p.lengths) for p in packed.split(6)] == [1, 1, 1, 1]
    first, second = results
    for name in ("loss", "indexer_loss", "balance_loss", "grad_norm"):
        assert getattr(second, name) == pytest.approx(getattr(first, name), rel=1e-9), name
    assert second.update_rms == pytest.approx(first.update_rms, rel=1e-6)
    assert all(torch.equal(second.loads[layer], load) for layer, load in first.loads.items())
    after = parts.state_dict()
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(after[name], value, rtol=1e-6, atol=1e-9, msg=name)
    assert torch.equal(whole.layers[3].moe.gate.bias, parts.layers[3].moe.gate.bias)


@pytest.mark.shapes
def test_each_modality_has_its_own_loss(model):
    """Documents with an image are told apart, and both means make up that of all."""
    lengths = (7, 1, 12)
    grid = ImageGrid(cols=3, rows=3, ratio=3)
    packed = PackedBatch(ids(), lengths, grids=((), (), (grid,)))
    sums = step_module.Sums(model, packed, CONFIG)
    sums.add(packed)
    losses = sums.by_modality()
    assert losses.keys() == {"text", "image"}
    assert (6 * losses["text"] + 11 * losses["image"]) / 17 == pytest.approx(sums.loss)
    text = PackedBatch(ids()[:7], (7,))
    alone = step_module.Sums(model, text, CONFIG)
    alone.add(text)
    assert alone.by_modality() == {"text": pytest.approx(losses["text"], rel=1e-9)}


def test_update_sizes_are_measured():
    """Muon and Sinkhorn move by 0.18 of the learning rate, AdamW's first step by all of it."""
    model = mini_model(4, torch.float64)
    config = replace(CONFIG, update_rms_steps=2, optimizer=OptimizerConfig(weight_decay=0.0))
    optimizer = Optimizers(distribute(model), config.optimizer)
    packed = PackedBatch(ids(), LENGTHS)
    assert train_step(model, optimizer, packed, config, 0).update_rms is None
    found = train_step(model, optimizer, packed, config, 1).update_rms
    assert 0.09 < found["tokens: sinkhorn"] < 0.181  # rows of tokens that do not occur stay
    assert found["backbone: muon by query heads"] == pytest.approx(0.18, rel=0.2)
    assert 0.3 < found["backbone: adamw"] < 1.01


def test_targets_count_by_their_weights(model):
    """The loss is sum(w nll) / sum(w), whatever the parts; so are its gradients."""
    weights = torch.tensor([0.0, 2.0, 0.0, 0.5, 1.0, 0.0, 0.0, *[1.0], *[0.0, 3.0] * 6])
    packed = PackedBatch(ids(), LENGTHS, weights)
    hidden = model(Batch.packed(ids(), LENGTHS)).hidden
    nll = -model.logits(hidden).log_softmax(-1)[torch.arange(19), ids()[1:]]
    counted = weights[1:].double()
    counted[[6, 7]] = 0  # a document's first token is no target
    want = (counted * nll).sum() / counted.sum()
    want.backward()
    gradient = model.head.weight.grad.clone()
    config = replace(CONFIG, balance_loss=0.0, indexer_loss=0.0)
    for most in (20, 8):
        model.zero_grad()
        sums = step_module.Sums(model, packed, config)
        for part in packed.split(most):
            sums.add(part)
        assert sums.loss == pytest.approx(want.item(), rel=1e-9)
        assert sums.by_modality() == {"text": pytest.approx(want.item(), rel=1e-9)}
        torch.testing.assert_close(model.head.weight.grad, gradient, rtol=1e-9, atol=1e-12)


def test_a_part_without_a_target_adds_nothing(model):
    packed = PackedBatch(ids(), LENGTHS, torch.tensor([*[0.0] * 8, *[1.0] * 12]))
    sums = step_module.Sums(model, packed, CONFIG)
    for part in packed.split(8):
        sums.add(part)
    assert math.isfinite(sums.loss)
    assert sums.total_weight == 11
