"""The experts' products on the GPU: values and gradients against float64 loops."""

import pytest
import torch

from openv41.ops.grouped_linear import grouped_linear
from tests.close import assert_close

CASES = [
    ([3, 0, 1, 17, 0], 33, 21),
    ([0, 0, 0], 16, 40),
    ([1], 1, 1),
    ([0, 70, 2], 70, 150),
]


def loop(rows, weight, counts):
    """Each row times its expert's weight, in float64."""
    rows, weight = rows.detach().double(), weight.detach().double()
    out, row = [], 0
    for expert, count in enumerate(counts):
        for _ in range(count):
            out.append([(rows[row] * w).sum() for w in weight[expert]])
            row += 1
    return torch.tensor(out, dtype=torch.float64).view(len(rows), weight.shape[1])


def inputs(counts, inner, columns, device, dtype=torch.float32):
    pairs = sum(counts)
    rows = torch.randn(pairs, inner, device=device).to(dtype).requires_grad_()
    weight = torch.randn(len(counts), columns, inner, device=device).requires_grad_()
    return rows, weight, torch.tensor(counts, device=device)


def kernel():
    from openv41.ops.grouped_linear_triton import grouped_linear as found  # noqa: PLC0415

    return found


@pytest.mark.parametrize(("counts", "inner", "columns"), CASES)
def test_values_are_those_of_a_loop(device, counts, inner, columns):
    rows, weight, sizes = inputs(counts, inner, columns, device)
    got = kernel().run(rows, weight, sizes)
    assert_close("rows", got.detach().cpu(), loop(rows.cpu(), weight.cpu(), counts), atol=1e-4)


@pytest.mark.parametrize(("counts", "inner", "columns"), CASES)
def test_gradients_are_those_of_the_reference_in_float64(device, counts, inner, columns):
    rows, weight, sizes = inputs(counts, inner, columns, device)
    out = kernel().run(rows, weight, sizes)
    slope = torch.randn_like(out)
    got = torch.autograd.grad(out, (rows, weight), slope)
    wide = [t.detach().double().cpu().requires_grad_() for t in (rows, weight)]
    want_out = grouped_linear.reference(*wide, sizes.cpu())
    if not want_out.requires_grad:  # nothing was multiplied
        want = torch.zeros_like(wide[0]), torch.zeros_like(wide[1])
    else:
        want = torch.autograd.grad(want_out, wide, slope.double().cpu())
    for name, value, other in zip(("rows", "weight"), got, want, strict=True):
        assert_close(name, value.cpu(), other, atol=1e-4)
    assert got[1].dtype == weight.dtype


def test_a_float32_weight_takes_bfloat16_rows_and_gets_a_float32_gradient(device):
    rows, weight, sizes = inputs([5, 0, 20], 24, 40, device, torch.bfloat16)
    out = kernel().run(rows, weight, sizes)
    assert out.dtype == torch.bfloat16
    want = loop(rows.cpu(), weight.bfloat16().cpu(), [5, 0, 20])
    assert_close("rows", out.detach().cpu(), want, rtol=2**-7, atol=0.05)
    out.sum().backward()
    assert rows.grad.dtype == torch.bfloat16
    assert weight.grad.dtype == torch.float32
    want = rows.detach()[:5].float().sum(0).cpu()
    assert_close("weight", weight.grad[0, 0].cpu(), want, atol=1e-3)


def test_strided_inputs_are_read_as_they_are(device):
    rows, weight, sizes = inputs([4, 3], 20, 18, device)
    spread = torch.stack([rows.detach(), rows.detach() + 1], dim=1)[:, 0]
    turned = weight.detach().mT.contiguous().mT
    want = loop(rows.cpu(), weight.cpu(), [4, 3])
    assert_close("strided", kernel().run(spread, turned, sizes).cpu(), want, atol=1e-4)


def test_refuses_what_it_cannot_do(device):
    rows, weight, sizes = inputs([2], 4, 4, device)
    refuse = kernel().refuse
    assert refuse(rows, weight, sizes) is None
    assert "deterministic" in refuse(rows, weight, sizes, deterministic=True)
    assert "float64" in refuse(rows.double(), weight, sizes)
    assert "experts" in refuse(rows, weight.expand(2000, 4, 4), sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("pairs", [1, 97, 3000, 24576])
def test_large_products_in_bfloat16(pairs):
    generator = torch.Generator("cuda").manual_seed(pairs)
    made = {"device": "cuda", "generator": generator}
    ids = torch.randint(64, (pairs,), **made)
    sizes = torch.zeros(64, dtype=torch.int64, device="cuda").scatter_add_(
        0, ids, torch.ones_like(ids)
    )
    rows = torch.randn(pairs, 1024, **made).bfloat16().requires_grad_()
    weight = (torch.randn(64, 224, 1024, **made) / 32).requires_grad_()
    out = kernel().run(rows, weight, sizes)
    slope = torch.randn(pairs, 224, **made).bfloat16()
    got = torch.autograd.grad(out, (rows, weight), slope)
    exact = [rows.detach().double().requires_grad_(), weight.detach().bfloat16().double()]
    exact[1].requires_grad_()
    want = grouped_linear.reference(*exact, sizes)
    others = torch.autograd.grad(want, exact, slope.double())
    for value, other in zip((out, *got), (want, *others), strict=True):
        error = (value.double() - other).norm() / other.norm()
        assert error < 5e-3
