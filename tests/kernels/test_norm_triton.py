"""RMS normalisation on the GPU: against the reference in float64, and its gradients."""

import pytest
import torch

from openv41 import ops
from tests.close import assert_close
from tests.oracles.norm import rms_norm as oracle

SHAPES = [(1, 1), (7, 33), (2, 3, 20), (37, 128), (0, 8)]


def kernel():
    from openv41.ops.norm_triton import rms_norm as found  # noqa: PLC0415

    return found


def inputs(shape, device, dtype=torch.float32):
    x = (3 * torch.randn(shape, device=device)).to(dtype).requires_grad_()
    weight = (torch.rand(shape[-1], device=device) + 0.5).requires_grad_()
    return x, weight


def wide(*tensors):
    return [t.detach().double().cpu().requires_grad_() for t in tensors]


@pytest.mark.parametrize("shape", SHAPES)
def test_values_are_the_oracles(device, shape):
    x, weight = inputs(shape, device)
    got = kernel().run(x, weight, 1e-20).detach().cpu()
    rows = x.detach().cpu().double().numpy().reshape(-1, shape[-1])
    scale = weight.detach().cpu().double().numpy()
    want = [torch.from_numpy(oracle(row, scale, 1e-20)) for row in rows]
    want = torch.stack(want).view(shape) if want else got.double()
    assert_close("rms_norm", got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_are_those_of_the_reference_in_float64(device, shape):
    x, weight = inputs(shape, device)
    slope = torch.randn(shape, device=device)
    got = torch.autograd.grad(kernel().run(x, weight, 1e-20), (x, weight), slope)
    given = wide(x, weight)
    out = ops.rms_norm.reference(*given, 1e-20)
    want = torch.autograd.grad(out, given, slope.double().cpu())
    for name, value, other in zip(("x", "weight"), got, want, strict=True):
        assert_close(name, value, other, rtol=1e-4, atol=1e-4)


def test_a_zero_row_gives_zeros_and_finite_gradients(device):
    x, weight = torch.zeros(2, 8, device=device, requires_grad=True), torch.ones(8, device=device)
    weight.requires_grad_()
    out = kernel().run(x, weight, 1e-20)
    out.sum().backward()
    assert not out.any()
    assert x.grad.isfinite().all()
    assert weight.grad.isfinite().all()


def test_strided_rows_and_bfloat16(device):
    x, weight = inputs((9, 40), device, torch.bfloat16)
    spread = torch.stack([x.detach(), x.detach() + 1], dim=2)[..., 0].requires_grad_()
    out = kernel().run(spread, weight, 1e-20)
    want = ops.rms_norm.reference(*wide(x, weight), 1e-20)
    assert out.dtype == torch.bfloat16
    assert_close("strided", out, want, rtol=2**-7, atol=0)
    out.sum().backward()
    assert spread.grad.dtype == torch.bfloat16
    assert weight.grad.dtype == torch.float32


def test_refuses_float64(device):
    x, weight = inputs((2, 4), device)
    assert kernel().refuse(x, weight, 1e-20) is None
    assert "float64" in kernel().refuse(x.double(), weight, 1e-20)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4096, 1024), (4099, 512), (2047, 128)])
def test_large_rows_are_written_whole(shape):
    x, weight = inputs(shape, "cuda", torch.bfloat16)
    slope = torch.randn(shape, device="cuda").bfloat16()
    with ops.kernels("required"):
        out = ops.rms_norm(x, weight, 1e-20)
    got = out, *torch.autograd.grad(out, (x, weight), slope)
    given = [t.detach().double().requires_grad_() for t in (x, weight)]
    out = ops.rms_norm.reference(*given, 1e-20)
    want = out, *torch.autograd.grad(out, given, slope.double())
    for value, other in zip(got, want, strict=True):
        assert (value.double() - other).norm() < 4e-3 * other.norm()
