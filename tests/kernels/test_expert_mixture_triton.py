"""The feed-forward of a few tokens: as its steps one after the other, to rounding."""

import pytest
import torch

from openv41 import ops
from tests.close import assert_close


def kernels():
    from openv41.ops import expert_mixture_triton  # noqa: PLC0415

    return expert_mixture_triton


def made(device, tokens, sizes, dtype):
    """Tokens, experts drawn by random logits, weights of them and of the shared expert."""
    experts, top_k, width, inner = sizes

    def normal(*size):
        scale = size[-1] ** 0.5
        return (torch.randn(*size) / scale).to(device, dtype)

    x = torch.randn(tokens, width).to(device, dtype)
    logits, none = torch.randn(tokens, experts, device=device), torch.zeros(experts, device=device)
    with ops.kernels("reference"):
        routed = ops.route(logits, none, top_k, 1.0, 1.5, normalise=True)
    shapes = (inner, width), (inner, width), (width, inner)
    stacks = tuple(normal(experts, *shape) for shape in shapes)
    return x, routed, stacks, tuple(normal(*shape) for shape in shapes), 1.0


def exactly(x, routed, stacks, shared, limit):
    """Token by token in float64."""
    x, stacks, shared = x.double(), [w.double() for w in stacks], [w.double() for w in shared]

    def feed(row, gate, up, down, weight):
        g, u = (gate @ row).clamp(max=limit), (up @ row).clamp(-limit, limit)
        return down @ (g * torch.sigmoid(g) * u * weight)

    rows = []
    for row, ids, weights in zip(x, routed.chosen.tolist(), routed.weights.double(), strict=True):
        total = feed(row, *shared, 1.0)
        for expert, weight in zip(ids, weights, strict=True):
            total = total + feed(row, *(w[expert] for w in stacks), weight)
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("tokens", "sizes"), [(1, (7, 2, 24, 8)), (3, (5, 1, 40, 33)), (40, (3, 2, 16, 8))]
)
def test_it_is_what_its_steps_are(device, tokens, sizes, dtype):
    """Widths that fill no tile, experts without a token and one with more than a tile."""
    given = made(device, tokens, sizes, dtype)
    module = kernels()
    got = module.mix(*given, module.Tiles(16, 16, 16, 4, 2))
    rounds = 1e-5 if dtype == torch.float32 else 8e-3  # the interpreter truncates to bfloat16
    want = exactly(*given)
    assert_close("float64", got.double(), want, rtol=0, atol=4 * rounds * want.abs().max().item())
    steps = ops.expert_mixture.reference(*given)
    assert_close("steps", got, steps, rtol=0, atol=4 * rounds * want.abs().max().item())


def test_weights_of_another_dtype_are_cast_as_they_are_read(device):
    x, routed, stacks, shared, limit = made(device, 5, (7, 2, 24, 8), torch.bfloat16)
    narrow = stacks, shared
    wide = [tuple(w.float() for w in each) for each in narrow]
    module = kernels()
    shape = module.Tiles(16, 16, 16, 4, 2)
    got, want = (module.mix(x, routed, *each, limit, shape) for each in (wide, narrow))
    assert torch.equal(got, want)


def test_rounded_inputs_and_gradients_go_step_by_step(device):
    given = made(device, 4, (7, 2, 64, 32), torch.float32)
    run = kernels().expert_mixture.run
    rounded = ops.expert_mixture.reference(*given, "exact")
    assert torch.equal(run(*given, "exact"), rounded)
    given[0].requires_grad_()
    run(*given).sum().backward()
    assert given[0].grad.isfinite().all()
    routed = given[1]._replace(counts=torch.zeros_like(given[1].counts))
    routed = type(routed)(*(t[:0] for t in routed[:4]), routed.counts)
    none = (given[0][:0].detach(), routed, *given[2:])
    assert run(*none).shape == (0, 64)


def test_what_does_not_fit_is_refused():
    given = made("cpu", 1, (7, 2, 24, 8), torch.float64)
    assert "float64" in kernels().expert_mixture.refuse(*given)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 8, 64, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_step_of_small_on_a_gpu(tokens, dtype):
    given = made("cuda", tokens, (64, 6, 1024, 224), dtype)
    with ops.kernels("required"):
        got = ops.expert_mixture(*given)
        assert torch.equal(got, ops.expert_mixture(*given))
    want = exactly(*given)
    error = ((got.double() - want).norm() / want.norm()).item()
    assert error < (1e-5 if dtype == torch.float32 else 6e-3), error
