"""RMS norm: values, eps 1e-20, one rounding, gradients."""

import numpy as np
import pytest
import torch

from openv41 import ops
from tests.close import assert_close
from tests.oracles.norm import rms_norm as oracle


def reference(x, weight, eps=1e-20):
    rows = x.double().numpy().reshape(-1, x.shape[-1])
    out = [oracle(row, weight.double().numpy(), eps) for row in rows]
    return torch.from_numpy(np.array(out).reshape(x.shape))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (63, 7), (127, 33), (3, 5, 129)])
def test_matches_oracle(shape, dtype):
    x = torch.randn(shape).to(dtype)
    weight = (torch.rand(shape[-1]) + 0.5).to(dtype)
    want = reference(x, weight)
    got = ops.rms_norm(x, weight, 1e-20)
    assert got.dtype == dtype
    assert_close("rms_norm", got, want, rtol=4 * torch.finfo(dtype).eps, atol=0)


def test_bfloat16_is_rounded_once():
    x = torch.randn(512, 64).bfloat16()
    weight = (torch.rand(64) + 0.5).bfloat16()
    want = reference(x, weight).bfloat16()
    got = ops.rms_norm(x, weight, 1e-20)
    assert (got != want).float().mean() < 1e-3
    twice = (ops.rms_norm(x, torch.ones(64), 1e-20) * weight != want).float().mean()
    assert twice > 0.1, "rounding before the weight must be visible"


def test_eps_is_far_below_tiny_activations():
    x = torch.full((1, 4), 1e-8)
    assert_close("tiny", ops.rms_norm(x, torch.ones(4), 1e-20), torch.ones(1, 4), rtol=1e-3)


def test_zero_row_gives_zero_and_finite_gradients():
    x = torch.zeros(2, 8, requires_grad=True)
    weight = torch.ones(8, requires_grad=True)
    out = ops.rms_norm(x, weight, 1e-20)
    out.sum().backward()
    assert not out.any()
    assert x.grad.isfinite().all()
    assert weight.grad.isfinite().all()


def test_empty():
    assert ops.rms_norm(torch.zeros(0, 8), torch.ones(8), 1e-20).shape == (0, 8)


def test_gradcheck():
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: ops.rms_norm(x, w, 1e-20), (x, weight))
