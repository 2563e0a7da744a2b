"""The loss of distillation against a loop in float64, and its gradients."""

import math

import pytest
import torch

from openv41 import ops
from openv41.ops import linear_loss

T, D, WIDTH, V = 7, 5, 3, 11


def inputs(dtype=torch.float64):
    """Hidden rows and head of a student, and of a narrower teacher."""
    generator = torch.Generator().manual_seed(4)
    shapes = (T, D), (V, D), (T, WIDTH), (V, WIDTH)
    made = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    return made[0].to(dtype).requires_grad_(), made[1].requires_grad_(), *made[2:]


def softmax(hidden, weight):
    scores = [math.fsum(a * b for a, b in zip(hidden, w, strict=True)) for w in weight]
    whole = math.fsum(map(math.exp, scores))
    return [math.exp(score) / whole for score in scores]


def oracle(hidden, weight, teacher_hidden, teacher_weight):
    losses = []
    for row, other in zip(hidden.tolist(), teacher_hidden.tolist(), strict=True):
        p, q = softmax(row, weight.tolist()), softmax(other, teacher_weight.tolist())
        terms = (a * (math.log(a) - math.log(b)) for a, b in zip(p, q, strict=True))
        losses.append(math.fsum(terms))
    return losses


@pytest.mark.parametrize("logits_at_once", [1, 3 * V, 1 << 22])
def test_the_loss_and_its_gradients(monkeypatch, logits_at_once):
    monkeypatch.setattr(linear_loss, "LOGITS_AT_ONCE", logits_at_once)
    monkeypatch.setattr(linear_loss, "LEAST_ROWS", 1)
    hidden, weight, *teacher = inputs()
    found = ops.linear_reverse_kl(hidden, weight, *teacher)
    losses = oracle(hidden, weight, *teacher)
    assert found.each.tolist() == pytest.approx(losses, rel=1e-12)
    assert found.summed.item() == pytest.approx(math.fsum(losses), rel=1e-12)
    assert not found.each.requires_grad
    torch.autograd.gradcheck(
        lambda h, w: ops.linear_reverse_kl(h, w, *teacher).summed, (hidden, weight)
    )


def test_the_gradient_is_that_of_autograd_scaled_by_what_follows():
    hidden, weight, *teacher = inputs()
    log_p = (hidden @ weight.T).log_softmax(1)
    log_q = (teacher[0] @ teacher[1].T).log_softmax(1)
    plain = torch.nn.functional.kl_div(log_q, log_p, log_target=True, reduction="sum")
    want = torch.autograd.grad(plain, (hidden, weight))
    scaled = ops.linear_reverse_kl(hidden, weight, *teacher).summed * -3
    for own, other in zip(torch.autograd.grad(scaled, (hidden, weight)), want, strict=True):
        torch.testing.assert_close(own, -3 * other)
    only = ops.linear_reverse_kl(hidden.detach(), weight, *teacher).summed
    torch.testing.assert_close(torch.autograd.grad(only, weight)[0], want[1])


def test_the_teacher_gets_no_gradient():
    hidden, weight, *teacher = inputs()
    for tensor in teacher:
        tensor.requires_grad_()
    summed = ops.linear_reverse_kl(hidden, weight, *teacher).summed
    assert torch.autograd.grad(summed, teacher, allow_unused=True) == (None, None)


def test_only_one_piece_of_logits_is_made_at_a_time(monkeypatch):
    monkeypatch.setattr(linear_loss, "LOGITS_AT_ONCE", 3 * V)
    monkeypatch.setattr(linear_loss, "LEAST_ROWS", 1)
    plain, sizes = torch.nn.functional.linear, []

    def linear(x, weight):
        sizes.append(len(x))
        return plain(x, weight)

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    ops.linear_reverse_kl(*inputs())
    assert sizes == [3, 3, 3, 3, 1, 1]  # of student and teacher


def test_equal_logits_have_no_divergence_to_the_last_bit():
    hidden, weight = torch.randn(50, 8, requires_grad=True), torch.randn(300, 8)
    found = ops.linear_reverse_kl(hidden, weight.requires_grad_(), hidden.detach(), weight.detach())
    assert not found.each.any()
    for gradient in torch.autograd.grad(found.summed, (hidden, weight)):
        assert not gradient.any()


def test_narrow_rows_are_widened_and_get_narrow_gradients():
    hidden, weight, *teacher = inputs(torch.bfloat16)
    narrow = [tensor.bfloat16() for tensor in teacher]
    found = ops.linear_reverse_kl(hidden, weight.detach().float(), *narrow)
    assert found.each.dtype == torch.float32
    want = oracle(hidden.double(), weight, *(tensor.double() for tensor in narrow))
    assert found.each.tolist() == pytest.approx(want, rel=1e-5)
    [slope] = torch.autograd.grad(found.summed, hidden)
    assert slope.dtype == torch.bfloat16


def test_no_targets_are_no_loss():
    hidden, weight, *teacher = inputs()
    found = ops.linear_reverse_kl(hidden[:0], weight, teacher[0][:0], teacher[1])
    assert found.summed.item() == 0
    assert not torch.autograd.grad(found.summed, weight)[0].any()
