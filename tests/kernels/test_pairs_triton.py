"""Tokens to pairs and back on the GPU: copies are exact, sums those of the reference."""

import pytest
import torch

from openv41 import ops
from openv41.ops.pairs import count_ids
from tests.close import assert_close


def kernels():
    from openv41.ops import pairs_triton  # noqa: PLC0415

    return pairs_triton


def inputs(tokens, width, top_k, device, dtype=torch.float32):
    ids = torch.stack([torch.randperm(7)[:top_k] for _ in range(tokens)] or [torch.empty(top_k)])
    order, _ = ops.sort_by_expert(ids[:tokens].long(), 7)
    return torch.randn(tokens, width, device=device).to(dtype).requires_grad_(), order.to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "width", "top_k"), [(5, 3, 2), (1, 130, 3), (0, 8, 2)])
def test_pairs_are_copies_and_their_gradient_a_sum(device, tokens, width, top_k, dtype):
    x, order = inputs(tokens, width, top_k, device, dtype)
    pairs = kernels().take_pairs.run(x, order, top_k)
    assert torch.equal(pairs, x[order // top_k])
    slope = torch.randn_like(pairs)
    (got,) = torch.autograd.grad(pairs, x, slope)
    wide = x.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(wide[order // top_k], wide, slope.double())
    assert_close("gradient", got.cpu(), want.cpu(), rtol=8 * torch.finfo(dtype).eps, atol=0.02)
    assert got.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "width", "top_k"), [(5, 3, 2), (1, 130, 3), (0, 8, 2)])
def test_sums_and_their_gradient_are_those_of_the_reference(device, tokens, width, top_k, dtype):
    x, order = inputs(tokens, width, top_k, device, dtype)
    rows = x.detach()[order // top_k] + torch.arange(len(order), device=device)[:, None]
    rows = rows.to(dtype).requires_grad_()
    got = kernels().combine.run(rows, order, top_k)
    want = ops.combine.reference(rows, order, top_k)
    assert got.dtype == torch.float32
    assert_close("sum", got.detach().cpu(), want.detach().cpu(), rtol=1e-6, atol=1e-5)
    slope = torch.randn_like(got)
    ours, others = (torch.autograd.grad(out, rows, slope)[0] for out in (got, want))
    interpreted = 2 * torch.finfo(dtype).eps if device.type == "cpu" else 0  # it cuts off
    assert_close("gradient", ours, others, rtol=interpreted, atol=0)


def test_strided_rows_and_narrow_types(device):
    x, order = inputs(4, 6, 2, device)
    spread = torch.stack([x.detach(), x.detach() + 1], dim=2)[..., 0]
    assert torch.equal(kernels().take_pairs.run(spread, order, 2), x.detach()[order // 2])
    assert "float64" in kernels().combine.refuse(x.double(), order, 2)
    assert kernels().combine.refuse(outputs=x, order=order, top_k=2) is None
    assert kernels().take_pairs.refuse(x=x, order=order, top_k=2) is None


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_large_pairs_and_counts_without_a_word_from_the_host():
    ids = torch.rand(4096, 64, device="cuda").argsort(dim=1)[:, :6].sort(dim=1).values
    x = torch.randn(4096, 1024, device="cuda").bfloat16().requires_grad_()
    torch.cuda.set_sync_debug_mode("error")
    try:
        order, counts = ops.sort_by_expert(ids, 64)
        with ops.kernels("required"):
            pairs = ops.take_pairs(x, order, 6)
            out = ops.combine(pairs, order, 6)
        out.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(counts, torch.bincount(ids.flatten(), minlength=64))
    assert torch.equal(count_ids(ids, 70)[64:], torch.zeros(6, device="cuda", dtype=torch.int64))
    assert torch.equal(pairs, x[order // 6])
    assert_close("sum", out.detach(), 6 * x.detach().float(), rtol=1e-6)
    assert torch.equal(x.grad, torch.full_like(x, 6))
