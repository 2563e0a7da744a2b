"""The contrastive loss against loops, the towers, and that images find their texts."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from openv41.config import NUMERICS
from openv41.image_grid import ImageGrid
from openv41.train.config import OptimizerConfig, TrainConfig
from openv41.train.contrastive import (
    Pairs,
    TextTower,
    retrieval_accuracy,
    sigmoid_contrastive_loss,
)
from openv41.train.contrastive_step import contrastive_step
from openv41.train.optimizer import Optimizers
from openv41.train.packed_batch import PackedBatch
from openv41.train.parameter_rules import CONTRASTIVE_RULES, RULES, pattern_of
from openv41.train.placement import distribute
from openv41.train.step import DivergedError
from tests.close import assert_close
from tests.layers.mini import VISION, VOCAB
from tests.oracles.contrastive import contrastive
from tests.train.digit_pairs import digit_model, digits

NAMES = ("images", "texts", "log temperature", "bias")


def features(images, texts, width=5):
    return [torch.randn(n, width, dtype=torch.float64, requires_grad=True) for n in (images, texts)]


def scalars(*values):
    return [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in values]


@pytest.mark.parametrize(("num", "texts", "first"), [(1, 1, 0), (4, 4, 0), (3, 7, 2), (3, 7, 4)])
def test_loss_and_gradients_against_loops(num, texts, first):
    given = [*features(num, texts), *scalars(math.log(10), -1.5)]
    loss = sigmoid_contrastive_loss(*given, first=first)
    loss.backward()
    want, *gradients = contrastive(*(g.detach().numpy() for g in given), first=first)
    assert_close("loss", loss, torch.tensor(want, dtype=torch.float64), rtol=1e-12)
    for name, tensor, gradient in zip(NAMES, given, gradients, strict=True):
        assert_close(
            name,
            tensor.grad,
            torch.as_tensor(gradient, dtype=torch.float64),
            rtol=1e-10,
            atol=1e-13,
        )


def test_parts_beside_gathered_texts_make_up_the_whole():
    """Two processes with half of the images each, and the features of all texts."""
    images, texts = features(6, 6)
    rest = scalars(2.0, -3.0)
    whole = sigmoid_contrastive_loss(images, texts, *rest)
    halves = [sigmoid_contrastive_loss(images[n : n + 3], texts, *rest, first=n) for n in (0, 3)]
    assert_close("loss", sum(halves) / 2, whole, rtol=1e-12)
    want = torch.autograd.grad(whole, [images, texts, *rest], retain_graph=True)
    got = torch.autograd.grad(sum(halves) / 2, [images, texts, *rest])
    for one, other in zip(got, want, strict=True):
        assert_close("gradient", one, other, rtol=1e-10, atol=1e-14)


def test_a_fresh_model_expects_almost_no_pair():
    """Temperature 10 and bias -10: each of n texts but its own costs an image next to nothing."""
    model = digit_model(dtype=torch.float64)
    assert model.log_temperature.item() == pytest.approx(math.log(10))
    assert model.bias.item() == -10
    images, texts = (torch.eye(4, dtype=torch.float64)[[i, i + 1]] for i in (0, 2))  # orthogonal
    loss = sigmoid_contrastive_loss(images, texts, model.log_temperature, model.bias)
    want = math.log1p(math.exp(10)) + math.log1p(math.exp(-10))
    assert loss.item() == pytest.approx(want, rel=1e-12)


@torch.no_grad()
def test_the_text_tower_sees_both_sides_of_its_own_text():
    tower = TextTower(VOCAB, VISION, NUMERICS["f32"], dtype=torch.float64)
    for parameter in tower.parameters():
        parameter.normal_(0, 0.5)
    ids = torch.tensor([5, 6, 7, 8, 9, 10, 11])
    together = tower(ids, (3, 4)).split([3, 4])
    for own, part in zip(ids.split([3, 4]), together, strict=True):
        assert_close("alone", part, tower(own, (len(own),)), rtol=1e-9, atol=1e-12)
    other = tower(torch.tensor([5, 6, 8]), (3,))
    assert (other[0] != together[0][0]).any()  # the first token knows the last
    swapped = tower(torch.tensor([6, 5, 7]), (3,))
    assert (swapped[2] - together[0][2]).abs().max() > 1e-6  # and the order of the others


def test_the_table_has_every_parameter_once():
    names = {pattern_of(name) for name, _ in digit_model().named_parameters()}
    encoder = {name for name in RULES if name.startswith("vision.encoder.")}
    assert names - encoder == set(CONTRASTIVE_RULES)
    assert names & set(RULES) == encoder


def test_pairs_are_the_learned_tokens_of_each_document():
    grids = tuple((ImageGrid(1, n, 1),) for n in (2, 1))
    packed = PackedBatch(
        torch.tensor([0, 3, 8, 1, 0, 3, 9, 7, 1]),
        (4, 5),
        torch.tensor([0.0, 0, 1, 1, 0, 0, 1, 1, 1]),
        torch.zeros(3, 3, 2, 2, dtype=torch.uint8),
        grids,
    )
    pairs = Pairs.of(packed)
    assert (pairs.ids.tolist(), pairs.lengths) == ([8, 1, 9, 7, 1], (2, 3))
    assert pairs.grids == (grids[0][0], grids[1][0])
    with pytest.raises(AssertionError, match="a document with several images"):
        Pairs.of(replace(packed, grids=(grids[0] * 2, grids[1])))


def test_an_image_may_find_another_text_that_reads_the_same():
    texts = torch.eye(3)
    pairs = Pairs(
        torch.zeros(3, 3, 1, 1, dtype=torch.uint8),
        (ImageGrid(1, 1, 1),) * 3,
        torch.tensor([5, 6, 5, 6, 4]),
        (2, 2, 1),
    )
    assert retrieval_accuracy(texts, texts, pairs) == 1
    assert retrieval_accuracy(texts[[1, 0, 2]], texts, pairs) == 1  # the first two read alike
    assert retrieval_accuracy(texts[[2, 0, 1]], texts, pairs) == pytest.approx(1 / 3)


def settings(steps, lr):
    return TrainConfig(
        tokens=100 * steps,
        batch_tokens=100,
        sequence_length=100,
        warmup_tokens=0,
        update_rms_steps=0,
        optimizer=OptimizerConfig(lr=lr, vision_lr_factor=1.0),
    )


def learn(batches, config):
    """A fresh model after a step on each batch, and what the steps found."""
    model = digit_model()
    optimizer = Optimizers(distribute(model), config.optimizer)
    steps = enumerate(batches)
    return model, [contrastive_step(model, optimizer, b, config, step) for step, b in steps]


def test_images_find_their_texts():
    """Within a batch that comes again; ten texts, so that chance is about one in ten."""
    _, results = learn([digits(np.arange(16))] * 40, settings(40, 0.03))
    assert results[0].retrieval < 0.4
    assert results[-1].retrieval > 0.9
    assert results[-1].loss < results[0].loss - 3


@pytest.mark.prove
def test_images_of_other_writers_find_their_texts(record_proof):
    """Training on 1,400 digits; 300 others, 30 at a time."""
    chooser, steps = np.random.default_rng(2), 500
    batches = (digits(chooser.choice(1400, 32)) for _ in range(steps))
    model, results = learn(batches, settings(steps, 0.05))
    scores = []
    with torch.no_grad():
        for start in range(1400, 1700, 30):
            pairs = Pairs.of(digits(np.arange(start, start + 30)))
            scores.append(retrieval_accuracy(*model(pairs), pairs))
    score = sum(scores) / len(scores)
    assert score > 0.75
    record_proof(steps=steps, heldout_retrieval=score, chance=0.1, last_loss=results[-1].loss)


def test_a_loss_that_is_not_finite_changes_nothing():
    model = digit_model()
    config = settings(1, 0.01)
    optimizer = Optimizers(distribute(model), config.optimizer)
    with torch.no_grad():
        model.text.projection.weight[0, 0] = math.nan
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(DivergedError, match="step 1: the loss is nan"):
        contrastive_step(model, optimizer, digits(np.arange(4)), config, 0)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.nan_to_num(), before[name].nan_to_num()), name
        assert parameter.grad is None
