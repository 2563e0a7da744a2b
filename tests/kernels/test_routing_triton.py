"""Routing of a few tokens on the GPU: experts and order exactly, weights to rounding."""

import pytest
import torch

from openv41 import ops
from openv41.ops.pairs import sort_by_expert
from tests.close import assert_close


def check(got, want):
    """All numbers of experts and pairs are equal."""
    assert_close("weights", got.weights.cpu(), want.weights.cpu(), rtol=1e-5, atol=0)
    for name in ("chosen", "order", "places", "counts"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name


def kernels():
    from openv41.ops import routing_triton  # noqa: PLC0415

    return routing_triton


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("most", [1 << 14, 0])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(3, 7, 2), (1, 64, 6), (2, 5, 1)])
def test_the_choice_is_that_of_the_reference(
    device, monkeypatch, tokens, experts, top_k, most, normalise
):
    """In one program, and in a program for each token."""
    monkeypatch.setattr(kernels(), "MOST_SCORES", most)
    logits = torch.randn(tokens, experts, device=device) * 12  # softplus is linear above 20
    logits[0, 1] = logits[0, 2]  # the lower number first
    bias = torch.randn(experts, device=device)
    bias[1] = bias[2]
    given = logits, bias, top_k, 1.5, 2.5
    got = kernels().route.run(*given, normalise=normalise)
    check(got, ops.route.reference(*given, normalise=normalise))


def test_a_row_of_nan_gets_legal_experts(device):
    logits = torch.full((2, 6), torch.nan, device=device)
    logits[1] = torch.arange(6)
    none = torch.zeros(6, device=device)
    got = kernels().route.run(logits, none, 2, 1.0, 1.0, normalise=True)
    assert got.chosen.tolist() == [[0, 1], [4, 5]]


def test_no_token_gives_no_pair(device):
    none = torch.zeros(0, 6, device=device), torch.zeros(6, device=device)
    got = kernels().route.run(*none, 2, 1.0, 1.0, normalise=True)
    check(got, ops.route.reference(*none, 2, 1.0, 1.0, normalise=True))


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(5, 7, 3), (1, 40, 2), (150, 4, 2)])
def test_the_order_is_that_of_a_stable_sort(device, tokens, experts, top_k):
    ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)]).to(device)
    got = kernels().order_pairs.run(ids, experts)
    for ours, others in zip(got, sort_by_expert(ids, experts), strict=True):
        assert torch.equal(ours, others)


def test_what_does_not_fit_is_refused():
    logits, bias = torch.zeros(1, 2000), torch.zeros(2000)
    refuse = kernels().route.refuse
    assert "2000 experts" in refuse(logits, bias, 2, 1.0, 1.0, normalise=True)
    assert "float64" in refuse(logits.double(), bias, 2, 1.0, 1.0, normalise=True)
    assert "5000 pairs" in kernels().order_pairs.refuse(torch.zeros(2500, 2), 7)


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "experts"), [(1, 64), (8, 384), (64, 64), (64, 384), (700, 64)])
def test_a_step_of_tokens_on_a_gpu(tokens, experts):
    logits = torch.randn(tokens, experts, device="cuda")
    given = logits, torch.randn(experts, device="cuda"), 6, 1.0, 2.5
    with ops.kernels("required"):
        got = ops.route(*given, normalise=True)
        pairs = None if tokens > 600 else ops.order_pairs(got.chosen, experts)
    check(got, ops.route.reference(*given, normalise=True))
    for ours, others in zip(pairs or (), sort_by_expert(got.chosen, experts), strict=False):
        assert torch.equal(ours, others)
