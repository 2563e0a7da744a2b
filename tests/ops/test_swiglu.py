"""Clamped SwiGLU."""

import math

import pytest
import torch

from openv41 import ops
from tests.close import assert_close
from tests.oracles import experts as oracle


def silu(x):
    return x / (1 + math.exp(-x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (63, 5), (127, 2), (129, 7)])
def test_matches_oracle(shape, dtype):
    gate, up = (torch.randn(shape) * 4).to(dtype), (torch.randn(shape) * 4).to(dtype)
    weight = torch.rand(shape[0]).to(dtype)
    want = torch.from_numpy(oracle.swiglu(gate.double().numpy(), up.double().numpy(), 3.0))
    tol = 4 * torch.finfo(dtype).eps
    assert_close("plain", ops.clamped_swiglu(gate, up, 3.0), want, rtol=tol, atol=1e-8)
    got = ops.clamped_swiglu(gate, up, 3.0, weight)
    assert got.dtype == dtype
    assert_close("weighted", got, want * weight[:, None].double(), rtol=tol, atol=1e-8)


def test_clamp_on_paper():
    """The gate is cut from above only, the up part on both sides, both before they meet."""
    gate = torch.tensor([[50.0, -50.0, 50.0, 1.0, 1.0]])
    up = torch.tensor([[50.0, 50.0, -50.0, -50.0, 2.0]])
    want = torch.tensor(
        [[silu(10) * 10, silu(-50) * 10, -silu(10) * 10, -silu(1) * 10, silu(1) * 2]]
    )
    assert_close("clamp", ops.clamped_swiglu(gate, up, 10.0), want, rtol=1e-6)
    halved = ops.clamped_swiglu(gate, up, 10.0, torch.tensor([0.5]))
    assert_close("after the clamp", halved, want / 2, rtol=1e-6)


def test_bfloat16_product_is_rounded_once():
    gate, up = torch.randn(64, 32).bfloat16(), torch.randn(64, 32).bfloat16()
    want = oracle.swiglu(gate.double().numpy(), up.double().numpy(), 10.0)
    mismatch = ops.clamped_swiglu(gate, up, 10.0) != torch.from_numpy(want).bfloat16()
    assert mismatch.float().mean() < 1e-3


def test_gradcheck_with_clamps():
    gate = torch.tensor([[0.3, 2.0, -5.0, 0.9]], dtype=torch.float64, requires_grad=True)
    up = torch.tensor([[0.4, -3.0, 3.0, -0.2]], dtype=torch.float64, requires_grad=True)
    weight = torch.tensor([0.7], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda g, u, w: ops.clamped_swiglu(g, u, 1.0, w), (gate, up, weight)
    )
