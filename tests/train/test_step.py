"""The step against plain cross-entropy; what a bad loss leaves behind."""

import pytest
import torch

from openv41.layers.batch import Batch
from openv41.train import step as step_module
from openv41.train.config import TrainConfig
from openv41.train.data import PackedBatch
from openv41.train.optimizer import Optimizers
from openv41.train.step import DivergedError, backward, next_tokens, summed_loss, train_step
from tests.layers.mini import mini_model, random_ids

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


@pytest.mark.parametrize("logits_at_once", [1, 300, 1 << 22])
def test_loss_and_gradients_equal_plain_cross_entropy(model, monkeypatch, logits_at_once):
    monkeypatch.setattr(step_module, "LOGITS_AT_ONCE", logits_at_once)
    Optimizers(model, CONFIG.optimizer)
    tokens = ids()
    rows, targets = next_tokens(tokens, LENGTHS)
    hidden = model(Batch.packed(tokens, LENGTHS)).hidden
    want = torch.nn.functional.cross_entropy(model.logits(hidden)[rows], targets)
    want.backward(retain_graph=True)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    got = backward(model, hidden, rows, targets)
    assert got == pytest.approx(want.item(), rel=1e-12)
    for name, parameter in model.named_parameters():
        if gradients[name] is None:
            assert parameter.grad is None, name
        else:
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-9, atol=1e-12)
    summed = summed_loss(model, hidden, rows, targets)
    assert summed == pytest.approx(want.item() * len(targets), rel=1e-12)


def test_gradients_are_clipped_to_the_norm_of_all_of_them_together(model):
    optimizer = Optimizers(model, CONFIG.optimizer)
    model.embed.weight.grad = torch.zeros_like(model.embed.weight)
    model.head.weight.grad = torch.zeros_like(model.head.weight)
    model.embed.weight.grad[0, 0], model.head.weight.grad[1, 1] = 3.0, 4.0
    assert step_module.clip_gradients(optimizer, 0.0) == pytest.approx(5)
    assert model.embed.weight.grad[0, 0] == pytest.approx(3)
    assert step_module.clip_gradients(optimizer, 1.0) == pytest.approx(5)
    assert model.embed.weight.grad[0, 0] == pytest.approx(0.6, rel=1e-5)
    assert model.head.weight.grad[1, 1] == pytest.approx(0.8, rel=1e-5)


def test_a_step_moves_the_biases_by_its_own_loads(model):
    optimizer = Optimizers(model, CONFIG.optimizer)
    before = model.layers[3].moe.gate.bias.detach().clone()
    result = train_step(model, optimizer, PackedBatch(ids(), LENGTHS), CONFIG, 0)
    load = result.loads[3][0]
    assert load.sum() == sum(LENGTHS) * model.config.moe.top_k
    want = before + 0.001 * torch.sign(load.double().mean() - load)
    torch.testing.assert_close(model.layers[3].moe.gate.bias.detach(), want)


@pytest.mark.parametrize("place", ["loss", "gradient"])
def test_a_loss_that_is_not_finite_changes_nothing(model, monkeypatch, place):
    optimizer = Optimizers(model, CONFIG.optimizer)
    if place == "loss":
        monkeypatch.setattr(step_module, "backward", lambda *_: float("nan"))
    else:
        model.head.weight.register_hook(lambda grad: grad * float("inf"))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(DivergedError, match=r"step 5: the loss is .*lower optimizer\.lr"):
        train_step(model, optimizer, PackedBatch(ids(), LENGTHS), CONFIG, 4)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(p.grad is None for p in model.parameters())
