"""The losses of single layers in training: weights, gradients, figures, and what they achieve."""

from dataclasses import replace

import pytest
import torch

from openv41 import ops
from openv41.config import NUMERICS
from openv41.layers.batch import Batch
from openv41.train.config import TrainConfig
from openv41.train.data import EvaluationWindow
from openv41.train.evaluate import window_losses
from openv41.train.optimizer import Optimizers
from openv41.train.packed_batch import PackedBatch
from openv41.train.placement import distribute
from openv41.train.step import Sums, train_step, weighted
from tests.layers.mini import mini_model, random_ids
from tests.train.runs import short_config

pytestmark = pytest.mark.unchecked

LENGTHS = (9, 12)
CONFIG = TrainConfig(tokens=2100, batch_tokens=21, sequence_length=21, warmup_tokens=0)
OFF = replace(CONFIG, indexer_loss=0.0, balance_loss=0.0)


def short_model(seed, dtype=torch.float64, *, deterministic=False):
    numerics = replace(NUMERICS["f32"], deterministic=deterministic)
    return mini_model(seed, dtype, numerics, short_config())


def packed(seed=0):
    return PackedBatch(torch.tensor(random_ids(sum(LENGTHS), seed)), LENGTHS)


def gradients(model, config):
    """Of one backward, before clipping."""
    Optimizers(distribute(model), config.optimizer)
    Sums(model, packed(), config).add(packed())
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("deterministic", [False, True])
def test_backbone_gradients_are_those_of_the_language_model_alone(deterministic):
    """To the bit; the indexer has gradients if and only if its loss has a weight."""
    model = short_model(1, torch.float32, deterministic=deterministic)
    alone = gradients(model, OFF)
    both = gradients(model, replace(OFF, indexer_loss=0.5))
    indexer = {name for name, _ in model.named_parameters() if ".indexer." in name}
    assert len(indexer) == 2 * 4
    assert not indexer & alone.keys()
    assert both.keys() - alone.keys() == indexer
    assert all(both[name].any() for name in indexer)
    for name, grad in alone.items():
        assert torch.equal(both[name], grad), name


def test_weights_scale_the_gradients():
    model = short_model(2)
    alone, once = gradients(model, OFF), gradients(model, replace(CONFIG, balance_loss=1e-2))
    more = gradients(model, replace(CONFIG, indexer_loss=0.03, balance_loss=3e-2))
    for name in once:
        ours, thrice = once[name] - alone.get(name, 0), more[name] - alone.get(name, 0)
        torch.testing.assert_close(thrice, 3 * ours, rtol=1e-6, atol=1e-12)
    router = "layers.3.moe.gate.weight"
    assert (once[router] - alone[router]).any()


@pytest.mark.parametrize(
    ("config", "measured"),
    [(CONFIG, {"indexer", "balance"}), (OFF, set()), (replace(OFF, indexer_loss=1.0), {"indexer"})],
)
def test_a_step_reports_losses_before_their_weights(config, measured):
    model = short_model(3)
    losses = model(Batch.packed(packed().ids, LENGTHS), objectives=CONFIG.objectives).losses
    result = train_step(model, Optimizers(distribute(model), config.optimizer), packed(), config, 0)
    for name in ("indexer", "balance"):
        got = getattr(result, f"{name}_loss")
        want = getattr(losses, name).item() if name in measured else None
        assert got == pytest.approx(want, rel=1e-12)


def test_clipping_counts_their_gradients():
    model = short_model(4)
    config = replace(CONFIG, indexer_loss=1e6)
    norm = sum(grad.square().sum() for grad in gradients(model, config).values()) ** 0.5
    result = train_step(model, Optimizers(distribute(model), config.optimizer), packed(), config, 0)
    assert result.grad_norm == pytest.approx(norm.item(), rel=1e-9)
    assert result.grad_norm > 1e3


def test_accumulated_balance_and_indexer_losses_are_those_of_one_batch():
    """Parts of a batch, weighted by their tokens, have its gradients."""
    model = short_model(5)
    config = replace(CONFIG, balance_loss=0.1)
    ids = packed().ids

    def auxiliary(ids, lengths, weight):
        out = model(Batch.packed(ids, lengths), objectives=config.objectives)
        (weight * sum(weighted(out.losses, config))).backward()

    auxiliary(ids, LENGTHS, 1)
    want = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    for part in ids.split(LENGTHS):
        auxiliary(part, (len(part),), len(part) / len(ids))
    for name, grad in want.items():
        torch.testing.assert_close(model.get_parameter(name).grad, grad, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("teacher", ["own", "mean"])
def test_training_brings_the_indexer_closer_to_attention(teacher):
    """Beside the same steps without its loss, which leave the indexer as it is."""
    ends = {}
    for weight in (0.0, 1.0):
        model = short_model(6, torch.float32)
        optimizer = replace(CONFIG.optimizer, lr=0.01, clip_norm=0.0)
        config = replace(CONFIG, indexer_loss=weight, indexer_teacher=teacher, optimizer=optimizer)
        trained = Optimizers(distribute(model), optimizer)
        for step in range(12):
            train_step(model, trained, packed(), config, step)
        asked = replace(config, indexer_loss=1.0).objectives
        ends[weight] = model(Batch.packed(packed().ids, LENGTHS), objectives=asked).losses.indexer
    assert ends[1.0] < 0.8 * ends[0.0]


def test_evaluation_computes_neither(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("computed without being asked for")

    model, ids = short_model(7), packed().ids
    for name in ("attention_mass", "selected_scores", "sequence_balance"):
        monkeypatch.setattr(ops, name, refuse)
    with pytest.raises(AssertionError, match="without being asked for"):
        train_step(model, Optimizers(distribute(model), CONFIG.optimizer), packed(), CONFIG, 0)
    train_step(model, Optimizers(distribute(model), OFF.optimizer), packed(), OFF, 0)
    ((_, loss),) = window_losses(model, [EvaluationWindow(0, ids, 1)], forward_tokens=64)
    assert loss > 0
