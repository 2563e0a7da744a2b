"""Products of a few rows in one launch: against float64, and as their parts do."""

import pytest
import torch

from openv41 import ops
from tests.close import assert_close

ROUNDS = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2}  # the interpreter truncates to bfloat16


def kernels():
    from openv41.ops import projections_triton  # noqa: PLC0415

    return projections_triton


def normal(device, dtype, *size):
    return (torch.randn(*size) / size[-1] ** 0.5).to(device, dtype)


def query_inputs(device, dtype, sizes):
    """Latents, norm, eps, weight, turns of the rows and the number of heads."""
    tokens, rank, heads, width, rope = sizes
    table = ops.rope_table(torch.arange(tokens) * 37 + 5, ops.rope_frequencies(rope, 1e4))
    norm = torch.rand(rank) + 0.5
    latent, weight = torch.randn(tokens, rank), normal(device, dtype, heads * width, rank)
    return latent.to(device, dtype), norm.to(device, dtype), 1e-6, weight, table.to(device), heads


def exact_queries(latent, norm, eps, weight, table, heads):
    """The same in float64."""
    wide = latent.double()
    normed = wide / (wide.square().mean(1, keepdim=True) + eps).sqrt() * norm.double()
    q = (normed @ weight.double().T).unflatten(1, (heads, -1))
    pairs = table.shape[1]
    turned = torch.view_as_complex(q[..., -2 * pairs :].unflatten(-1, (-1, 2)).contiguous())
    turned = torch.view_as_real(turned * table.to(torch.complex128)[:, None]).flatten(-2)
    return normed, torch.cat([q[..., : -2 * pairs], turned], dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "widths"), [(1, (5,)), (3, (16, 33)), (17, (40, 7, 1, 20))])
def test_products_of_one_input(device, tokens, widths, dtype):
    """Widths that fill no tile, and up to four weights."""
    x = torch.randn(tokens, 150).to(device, dtype)
    weights = tuple(normal(device, dtype, width, 150) for width in widths)
    for got, weight in zip(kernels().products(x, weights), weights, strict=True):
        want = x.double() @ weight.double().T
        assert got.shape == want.shape
        assert_close("product", got.double(), want, rtol=0, atol=4 * ROUNDS[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(1, 20, 3, 8, 4), (5, 150, 2, 32, 8), (18, 40, 1, 16, 16)])
def test_queries_are_normed_and_rotated(device, sizes, dtype):
    given = query_inputs(device, dtype, sizes)
    got, want = kernels().queries(*given), exact_queries(*given)
    for name, mine, other in zip(("normed", "queries"), got, want, strict=True):
        assert_close(name, mine.double(), other, rtol=0, atol=6 * ROUNDS[dtype])
    for mine, other in zip(got, ops.rotated_queries.reference(*given), strict=True):
        assert_close("steps", mine, other, rtol=0, atol=6 * ROUNDS[dtype])


def test_wide_weights_are_cast_as_they_are_read(device):
    x = torch.randn(2, 40).to(device, torch.bfloat16)
    narrow = normal(device, torch.bfloat16, 9, 40), normal(device, torch.bfloat16, 5, 40)
    module = kernels()
    got = module.joint_linear.run(x, tuple(w.float() for w in narrow))
    for mine, other in zip(got, module.products(x, narrow), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("why", ["many rows", "rounding", "deterministic", "gradient"])
def test_all_else_is_done_part_by_part(device, why):
    """To the bit as before."""
    rows = 80 if why == "many rows" else 3
    latent, norm, eps, weight, table, heads = query_inputs(
        device, torch.float32, (rows, 64, 2, 32, 8)
    )
    latent.requires_grad_(why == "gradient")
    options = {"deterministic": why == "deterministic"}
    rounding = "exact" if why == "rounding" else "off"
    given = latent, norm, eps, weight, table, heads, rounding
    got = kernels().rotated_queries.run(*given, **options)
    for mine, other in zip(got, ops.rotated_queries.reference(*given, **options), strict=True):
        assert torch.equal(mine, other)
        assert mine.requires_grad == (why == "gradient")
    weights = weight, weight[:5]
    got = kernels().joint_linear.run(latent, weights, rounding, **options)
    want = ops.joint_linear.reference(latent, weights, rounding, **options)
    for mine, other in zip(got, want, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 2, 8, 33, 64, 65])
def test_a_step_of_small_on_a_gpu(tokens, dtype):
    limit = {torch.float32: 1e-5, torch.bfloat16: 5e-3}[dtype]
    x = torch.randn(tokens, 1024, device="cuda").to(dtype)
    weights = tuple(normal("cuda", dtype, width, 1024) for width in (512, 512, 32))
    given = query_inputs("cuda", dtype, (tokens, 512, 16, 512, 64))
    with ops.kernels("required"):
        got = (*ops.joint_linear(x, weights), *ops.rotated_queries(*given))
        again = (*ops.joint_linear(x, weights), *ops.rotated_queries(*given))
    want = [x.double() @ w.double().T for w in weights] + list(exact_queries(*given))
    for mine, other, exact in zip(got, again, want, strict=True):
        assert torch.equal(mine, other)
        error = ((mine.double() - exact).norm() / exact.norm()).item()
        assert error < limit, error
