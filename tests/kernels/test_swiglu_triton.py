"""The clamped SwiGLU on the GPU: against the oracle and the reference's gradients in float64."""

import pytest
import torch

from openv41 import ops
from tests.close import assert_close
from tests.oracles import experts as oracle

SHAPES = [(1, 1), (7, 33), (70, 20), (0, 8), (3, 0)]


def kernel():
    from openv41.ops.swiglu_triton import clamped_swiglu as found  # noqa: PLC0415

    return found


def inputs(shape, device, dtype=torch.float32):
    gate, up = ((2 * torch.randn(shape, device=device)).to(dtype) for _ in range(2))
    weight = torch.rand(shape[0], device=device)
    return [t.requires_grad_() for t in (gate, up, weight)]


def run(op, given, *, weighted):
    gate, up, weight = given
    return op(gate, up, 1.5, weight if weighted else None)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_are_the_oracles(device, shape, weighted):
    given = inputs(shape, device)
    got = run(kernel().run, given, weighted=weighted)
    gate, up, weight = (t.detach().cpu().double() for t in given)
    want = torch.from_numpy(oracle.swiglu(gate.numpy(), up.numpy(), 1.5))
    assert_close("swiglu", got, want * weight[:, None] if weighted else want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_are_those_of_the_reference_in_float64(device, shape, weighted):
    given = inputs(shape, device)
    wanted = 3 if weighted else 2
    slope = torch.randn(shape, device=device)
    got = torch.autograd.grad(run(kernel().run, given, weighted=weighted), given[:wanted], slope)
    wide = [t.detach().double().cpu().requires_grad_() for t in given]
    out = run(ops.clamped_swiglu.reference, wide, weighted=weighted)
    want = torch.autograd.grad(out, wide[:wanted], slope.double().cpu())
    for name, value, other in zip(("gate", "up", "weight"), got, want, strict=False):
        assert_close(name, value, other, rtol=1e-4, atol=1e-5)


def test_the_limits_themselves_have_the_references_slope_and_nan_stays(device):
    edge = torch.tensor([[1.5, -1.5, 2.0, float("nan")]], device=device)
    given = [t.clone().requires_grad_() for t in (edge, edge, torch.ones(1, device=device))]
    wide = [t.detach().double().cpu().requires_grad_() for t in given]
    got, want = run(kernel().run, given, weighted=False), None
    want = run(ops.clamped_swiglu.reference, wide, weighted=False)
    assert got[0, 3].isnan()
    got[0, :3].sum().backward()
    want[0, :3].sum().backward()
    for ours, other in zip(given[:2], wide[:2], strict=True):
        assert_close("edge", ours.grad[0, :3], other.grad[0, :3], rtol=1e-5, atol=1e-6)


def test_strided_rows_and_bfloat16(device):
    gate, up, weight = inputs((9, 40), device, torch.bfloat16)
    both = torch.cat([gate, up], dim=1).detach()
    out = kernel().run(both[:, :40], both[:, 40:], 1.5, weight.detach())
    want = run(ops.clamped_swiglu.reference, [gate.double(), up.double(), weight], weighted=True)
    assert out.dtype == torch.bfloat16
    assert_close("strided", out, want, rtol=2**-7, atol=1e-6)


def test_refuses_what_it_cannot_do(device):
    gate, up, weight = inputs((2, 4), device)
    refuse = kernel().refuse
    assert refuse(gate, up, 1.0, weight) is None
    assert "deterministic" in refuse(gate, up, 1.0, deterministic=True)
    assert "float64" in refuse(gate.double(), up, 1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(24576, 224), (4097, 1000)])
def test_large_rows_are_written_whole(shape):
    given = inputs(shape, "cuda", torch.bfloat16)
    slope = torch.randn(shape, device="cuda").bfloat16()
    with ops.kernels("required"):
        out = run(ops.clamped_swiglu, given, weighted=True)
    got = out, *torch.autograd.grad(out, given, slope)
    wide = [t.detach().double().requires_grad_() for t in given]
    out = run(ops.clamped_swiglu.reference, wide, weighted=True)
    want = out, *torch.autograd.grad(out, wide, slope.double())
    for value, other in zip(got, want, strict=True):
        assert (value.double() - other).norm() < 4e-3 * other.norm()
