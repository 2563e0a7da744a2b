"""The rotary embedding on the GPU: against the reference in float64; its gradient turns back."""

import pytest
import torch

from openv41 import ops
from tests.close import assert_close

SHAPES = [((5, 12), 3), ((4, 3, 20), 4), ((1, 2, 2, 7), 1), ((33, 64), 32), ((0, 2, 8), 2)]


def kernel():
    from openv41.ops.rope_triton import rotate as found  # noqa: PLC0415

    return found


def inputs(shape, pairs, device, dtype=torch.float32):
    table = ops.rope_table(torch.arange(shape[0]) + 3, ops.rope_frequencies(2 * pairs, 100.0))
    return torch.randn(shape, device=device).to(dtype).requires_grad_(), table.to(device)


def wanted(x, table):
    return ops.rotate.reference(x, table.to(torch.complex128).cpu())


@pytest.mark.parametrize(("shape", "pairs"), SHAPES)
def test_values_and_gradients_are_those_of_the_reference(device, shape, pairs):
    x, table = inputs(shape, pairs, device)
    wide, slope = x.detach().double().cpu().requires_grad_(), torch.randn(shape, device=device)
    got, want = kernel().run(x, table), wanted(wide, table)
    assert_close("rotated", got, want, rtol=1e-5, atol=1e-6)
    assert torch.equal(got[..., : -2 * pairs], x[..., : -2 * pairs])
    (ours,) = torch.autograd.grad(got, x, slope)
    (other,) = torch.autograd.grad(want, wide, slope.double().cpu())
    assert_close("gradient", ours, other, rtol=1e-5, atol=1e-6)


def test_the_inverse_table_turns_back(device):
    x, table = inputs((6, 2, 10), 3, device)
    turned = kernel().run(x.detach(), table)
    back = kernel().run(turned, ops.inverse_table(table))
    assert not torch.allclose(turned, x)
    assert_close("back", back, x, rtol=1e-5, atol=1e-6)


def test_strided_rows_and_bfloat16(device):
    x, table = inputs((9, 20), 4, device, torch.bfloat16)
    spread = torch.stack([x.detach(), x.detach() + 1], dim=2)[..., 0]
    out = kernel().run(spread, table)
    assert out.dtype == torch.bfloat16
    assert_close("strided", out, wanted(x.detach().double().cpu(), table), rtol=2**-7, atol=2**-9)


def test_refuses_what_it_cannot_do(device):
    x, table = inputs((2, 4), 1, device)
    assert kernel().refuse(x, table) is None
    assert "deterministic" in kernel().refuse(x, table, deterministic=True)
    assert "float64" in kernel().refuse(x.double(), table)


@pytest.mark.gpu
def test_large_rows_are_written_whole():
    x, table = inputs((4097, 16, 512), 32, "cuda", torch.bfloat16)
    slope = torch.randn(x.shape, device="cuda").bfloat16()
    with ops.kernels("required"):
        out = ops.rotate(x, table)
    (grad,) = torch.autograd.grad(out, x, slope)
    wide = x.detach().double().requires_grad_()
    want = ops.rotate.reference(wide, table.to(torch.complex128))
    (other,) = torch.autograd.grad(want, wide, slope.double())
    assert (out.double() - want).norm() < 4e-3 * want.norm()
    assert (grad.double() - other).norm() < 4e-3 * other.norm()
