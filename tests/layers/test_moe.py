"""The mixture of experts as a layer."""

from dataclasses import replace

import pytest
import torch

from openv41.config import NUMERICS, MoeConfig
from openv41.layers.batch import Batch
from openv41.layers.context import ForwardContext
from openv41.layers.experts import MixtureOfExperts
from openv41.layers.probe import Probe
from tests.close import assert_close
from tests.layers.mini import mini_config
from tests.oracles import experts as oracle


def layer(dtype=torch.float64, dim=4, **settings):
    moe = MoeConfig(num_experts=4, top_k=2, expert_dim=6, swiglu_limit=0.5, **settings)
    made = MixtureOfExperts(0, dim, moe, NUMERICS["f32"], dtype=dtype)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_()
    return made


def context(num, probe=None):
    batch = Batch.from_documents([[0] * num])
    return ForwardContext(batch, mini_config().attention, None, probe)


def reference(moe, x, bias):
    stacks = (moe.experts.w1.weight, moe.experts.w3.weight, moe.experts.w2.weight)
    routed = [[w[e].detach().double().numpy() for w in stacks] for e in range(4)]
    shared = [
        part.weight.detach().double().numpy()
        for part in (moe.shared.w1, moe.shared.w3, moe.shared.w2)
    ]
    out = []
    for row in x.detach().double().numpy():
        ids, weights = oracle.route(
            row,
            moe.gate.weight.detach().double().numpy(),
            bias.detach().double().numpy(),
            top_k=2,
            scale=1.5,
        )
        out.append(
            oracle.mixture(row, ids, weights, experts=routed, shared=shared, limit=0.5).tolist()
        )
    return torch.tensor(out, dtype=torch.float64).view(x.shape)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("num", [0, 1, 63, 129])
def test_matches_oracle(num, dtype):
    moe, x = layer(dtype), torch.randn(num, 4, dtype=dtype)
    tol = 200 * torch.finfo(dtype).eps
    assert_close("moe", moe(x, context(num)), reference(moe, x, moe.gate.bias), rtol=tol, atol=tol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_single_token_takes_the_short_way_to_the_same_bits(dtype):
    """It sorts no pairs; in deterministic mode its row in a batch has the same bits."""
    moe, x = layer(dtype), torch.randn(5, 4, dtype=dtype)
    moe.numerics = moe.experts.numerics = moe.shared.numerics = replace(
        NUMERICS["f32"], deterministic=True
    )
    for part in (moe.shared.w1, moe.shared.w3, moe.shared.w2):
        part.numerics = moe.numerics
    together = moe(x, context(5))
    for row in range(5):
        assert torch.equal(moe(x[row : row + 1], context(1))[0], together[row])


def test_image_rows_use_their_own_bias_and_are_counted_apart():
    moe, x, ctx = layer(), torch.randn(5, 4, dtype=torch.float64), context(5)
    with torch.no_grad():
        moe.gate.bias.copy_(torch.tensor([9.0, 9, 0, 0]))
        moe.gate.bias_vl.copy_(torch.tensor([0.0, 0, 9, 9]))
    ctx.is_image = torch.tensor([False, True, True, False, True])
    out = moe(x, ctx)
    assert ctx.expert_counts[0].tolist() == [[2, 2, 0, 0], [0, 0, 3, 3]]
    want = torch.where(
        ctx.is_image[:, None],
        reference(moe, x, moe.gate.bias_vl),
        reference(moe, x, moe.gate.bias),
    )
    assert_close("moe", out, want, rtol=1e-10, atol=1e-10)


def test_the_shared_expert_is_added_once_and_unscaled():
    moe, x = layer(), torch.randn(3, 4, dtype=torch.float64)
    with torch.no_grad():
        moe.experts.w2.weight.zero_()
    assert_close("shared", moe(x, context(3)), moe.shared(x), rtol=1e-12, atol=1e-12)


def test_both_paths_clamp():
    """Doubling an input that saturates both parts everywhere changes nothing."""
    moe = layer()
    with torch.no_grad():
        for stack in (moe.experts.w1, moe.experts.w3, moe.shared.w1, moe.shared.w3):
            stack.weight.copy_(stack.weight.abs() + 1)
        moe.gate.weight.zero_()
    x = torch.ones(2, 4, dtype=torch.float64)
    assert torch.equal(moe(x, context(2)), moe(2 * x, context(2)))


def test_choices_can_be_replayed():
    moe, x = layer(), torch.randn(3, 4, dtype=torch.float64)
    forced = torch.tensor([[0, 1], [2, 3], [1, 3]])
    probe = Probe(feed={"layers.0.expert_ids": forced})
    ctx = context(3, probe)
    out = moe(x, ctx)
    assert ctx.expert_counts[0][0].tolist() == [1, 2, 1, 2]
    recorded = probe.values["layers.0.expert_ids"]
    assert_close("own choice", recorded, moe_choice(moe, x), rtol=0)
    assert (out - moe(x, context(3))).abs().max() > 1e-3


def moe_choice(moe, x):
    probe = Probe()
    moe(x, context(len(x), probe))
    return probe.values["layers.0.expert_ids"]


def test_gradcheck_with_clamps():
    moe, x = layer(), torch.randn(2, 4, dtype=torch.float64)
    names = ["gate.weight", "experts.w1.weight", "experts.w2.weight", "shared.w3.weight"]
    weights = [moe.get_parameter(name).detach().clone().requires_grad_() for name in names]

    def run(x, *weights):
        values = dict(zip(names, weights, strict=True))
        return torch.func.functional_call(moe, values, (x, context(2)))

    assert torch.autograd.gradcheck(run, (x.requires_grad_(), *weights), fast_mode=True)


def test_routing_biases_take_no_gradient():
    moe, x = layer(), torch.randn(3, 4, dtype=torch.float64)
    moe(x, context(3)).sum().backward()
    assert moe.gate.bias.grad is None
    assert moe.gate.bias_vl.grad is None
    assert moe.gate.weight.grad.any()
