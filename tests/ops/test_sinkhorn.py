"""Sinkhorn: values and the hand-written backward."""

import numpy as np
import pytest
import torch

from openv41 import ops
from tests.close import assert_close
from tests.oracles import mhc as oracle


def reference(logits, steps, eps):
    """The mix block of the coefficients, with unit scale and no base."""
    out = []
    for matrix in logits.double().numpy():
        n = len(matrix)
        m = np.concatenate([np.zeros(2 * n), matrix.reshape(-1)])
        base, scale = np.zeros(n * (n + 2)), np.ones(3)
        out.append(oracle.coefficients(m, base, scale, num_streams=n, iterations=steps, eps=eps)[2])
    return torch.from_numpy(np.array(out))


def plain(logits, steps, eps):
    """The same steps, differentiated by autograd."""
    mix = logits.softmax(-1) + eps
    for step in range(2 * steps - 1):
        mix = mix / (mix.sum(-2 if step % 2 == 0 else -1, keepdim=True) + eps)
    return mix


@pytest.mark.parametrize("steps", [1, 2, 20])
@pytest.mark.parametrize(("T", "N"), [(1, 1), (63, 2), (127, 4), (129, 3)])
def test_matches_oracle(T, N, steps):
    logits = torch.randn(T, N, N) * 3
    got = ops.doubly_stochastic(logits, steps, 1e-6)
    assert_close("sinkhorn", got, reference(logits, steps, 1e-6), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("T", "N"), [(1, 4), (7, 3), (16, 4), (256, 4), (257, 4), (5, 9)])
def test_same_bits_with_and_without_a_gradient(T, N, dtype):
    """Without one, few tokens run on numpy."""
    logits = torch.randn(T, N, N, dtype=dtype) * 4
    plain = ops.doubly_stochastic(logits, 20, 1e-6)
    recorded = ops.doubly_stochastic(logits.requires_grad_(), 20, 1e-6)
    assert recorded.requires_grad
    assert torch.equal(plain, recorded)


@pytest.mark.parametrize("steps", [1, 2, 20])
@pytest.mark.parametrize("spread", [1.0, 20.0])
def test_backward_equals_autograd(steps, spread):
    logits = (torch.randn(5, 4, 4, dtype=torch.float64) * spread).requires_grad_()
    weights = torch.randn(5, 4, 4, dtype=torch.float64)
    (got,) = torch.autograd.grad(
        (ops.doubly_stochastic(logits, steps, 1e-6) * weights).sum(), logits
    )
    (want,) = torch.autograd.grad((plain(logits, steps, 1e-6) * weights).sum(), logits)
    assert_close("gradient", got, want, rtol=1e-9, atol=1e-12)


def test_gradcheck():
    logits = torch.randn(2, 3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: ops.doubly_stochastic(x, 20, 1e-6), (logits,))


def test_extreme_logits_stay_finite():
    logits = torch.tensor([[[300.0, -300.0], [300.0, -300.0]]], requires_grad=True)
    out = ops.doubly_stochastic(logits, 20, 1e-6)
    out.square().sum().backward()
    assert out.isfinite().all()
    assert logits.grad.isfinite().all()


def test_empty():
    logits = torch.zeros(0, 4, 4, requires_grad=True)
    out = ops.doubly_stochastic(logits, 20, 1e-6)
    out.sum().backward()
    assert out.shape == logits.grad.shape == (0, 4, 4)
