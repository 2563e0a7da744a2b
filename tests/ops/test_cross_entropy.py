"""The language model's loss against a loop in float64, and its gradients."""

import math

import pytest
import torch

from openv41 import ops
from openv41.ops import linear_loss

T, D, V = 7, 5, 11


def inputs(dtype=torch.float64):
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(T, D, generator=generator, dtype=torch.float64)
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64)
    targets = torch.randint(V, (T,), generator=generator)
    weights = torch.rand(T, generator=generator, dtype=torch.float64)
    return hidden.to(dtype).requires_grad_(), weight.requires_grad_(), targets, weights


def oracle(hidden, weight, targets):
    losses = []
    for row, target in zip(hidden.tolist(), targets.tolist(), strict=True):
        scores = [math.fsum(a * b for a, b in zip(row, w, strict=True)) for w in weight.tolist()]
        top = max(scores)
        losses.append(top + math.log(math.fsum(math.exp(s - top) for s in scores)) - scores[target])
    return losses


@pytest.mark.parametrize("logits_at_once", [1, 3 * V, 1 << 22])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_loss_and_its_gradients(monkeypatch, logits_at_once, weighted):
    monkeypatch.setattr(linear_loss, "LOGITS_AT_ONCE", logits_at_once)
    monkeypatch.setattr(linear_loss, "LEAST_ROWS", 1)
    hidden, weight, targets, weights = inputs()
    given = weights if weighted else None
    found = ops.linear_cross_entropy(hidden, weight, targets, given)
    losses = oracle(hidden, weight, targets)
    assert found.each.tolist() == pytest.approx(losses, rel=1e-12)
    want = math.fsum(w * x for w, x in zip(weights.tolist(), losses, strict=True))
    assert found.summed.item() == pytest.approx(want if weighted else math.fsum(losses), rel=1e-12)
    assert not found.each.requires_grad
    torch.autograd.gradcheck(
        lambda h, w: ops.linear_cross_entropy(h, w, targets, given).summed, (hidden, weight)
    )


def test_the_gradient_is_that_of_what_follows():
    """A loss that is scaled later has scaled gradients, and both sides may lack one."""
    hidden, weight, targets, _ = inputs()
    once = torch.autograd.grad(
        ops.linear_cross_entropy(hidden, weight, targets).summed, (hidden, weight)
    )
    scaled = ops.linear_cross_entropy(hidden, weight, targets).summed * -3
    for plain, more in zip(once, torch.autograd.grad(scaled, (hidden, weight)), strict=True):
        torch.testing.assert_close(more, -3 * plain)
    only = ops.linear_cross_entropy(hidden.detach(), weight, targets).summed
    torch.testing.assert_close(torch.autograd.grad(only, weight)[0], once[1])


def test_narrow_rows_are_widened_and_get_narrow_gradients():
    hidden, weight, targets, _ = inputs(torch.bfloat16)
    found = ops.linear_cross_entropy(hidden, weight.detach().float(), targets)
    assert found.each.dtype == torch.float32
    assert found.each.tolist() == pytest.approx(oracle(hidden.double(), weight, targets), rel=1e-5)
    [slope] = torch.autograd.grad(found.summed, hidden)
    assert slope.dtype == torch.bfloat16


def test_no_targets_are_no_loss():
    hidden, weight, targets, _ = inputs()
    found = ops.linear_cross_entropy(hidden[:0], weight, targets[:0])
    assert found.summed.item() == 0
    assert not torch.autograd.grad(found.summed, weight)[0].any()
