"""Muon against its formula; the update's size; heads; the hybrid iteration and its limits."""

import numpy as np
import pytest
import torch
from torch import nn

from openv41.train.muon import Muon, block_shape
from openv41.train.newton_schulz import newton_schulz
from tests.close import assert_close
from tests.train.update_oracle import muon, polar

SETTINGS = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.1, "update_rms": 0.18}
ORACLE = {"lr": 0.02, "mu": 0.95, "decay": 0.1, "gamma": 0.18}


def gradients(shape, count=3, scale=1e-3):
    return [torch.randn(shape, dtype=torch.float64) * scale for _ in range(count)]


def run(weight, steps, dtype=torch.float64, **settings):
    parameter = nn.Parameter(weight.to(dtype, copy=True))
    optimizer = Muon([parameter], **{**SETTINGS, **settings})
    for gradient in steps:
        parameter.grad = gradient.to(dtype)
        optimizer.step()
    return parameter.detach()


@pytest.mark.parametrize("shape", [(12, 40), (40, 12), (24, 24)])
@pytest.mark.parametrize("heads", [1, 4])
def test_three_steps_follow_the_formula(shape, heads):
    """The iteration brings singular values to 1 within 5e-4."""
    weight, steps = torch.randn(shape, dtype=torch.float64), gradients(shape)
    got = run(weight, steps, blocks=heads)
    want = muon(weight.numpy(), [g.numpy() for g in steps], heads=heads, **ORACLE)
    assert_close("weight", got, want, atol=2e-5)
    wrong = muon(weight.numpy(), [g.numpy() for g in steps], heads=5 - heads, **ORACLE)
    assert np.abs(wrong - want).max() > 1e-3


@pytest.mark.parametrize("shape", [(96, 128), (512, 64), (3, 32, 48)])
def test_an_update_has_the_rms_of_the_report(shape):
    got = run(torch.zeros(shape), gradients(shape, 1), torch.float32, weight_decay=0.0)
    rms = got.square().mean().sqrt() / SETTINGS["lr"]
    assert rms == pytest.approx(0.18, rel=0.01)


def test_every_head_moves_by_the_same_amount_and_only_then():
    """The motive: one head's large gradient takes the whole matrix from the others."""
    gradient = torch.randn(4, 8, 32, dtype=torch.float64)
    gradient[0] *= 1e4
    shape = (32, 32)

    def spread(blocks):
        low = torch.randn(4, 8, 2, dtype=torch.float64) @ torch.randn(4, 2, 32, dtype=torch.float64)
        noisy = low * torch.tensor([1e6, 1.0, 1.0, 1.0], dtype=torch.float64)[:, None, None]
        noisy += gradient
        update = run(torch.zeros(shape), [noisy.reshape(shape)], blocks=blocks)
        sizes = update.view(4, -1).norm(dim=1)
        return (sizes.max() / sizes.min()).item()

    assert spread(4) < 1.001
    assert spread(1) > 1.02


def test_experts_are_matrices_of_their_own():
    weight, steps = torch.randn(3, 8, 20, dtype=torch.float64), gradients((3, 8, 20))
    together = run(weight, steps)
    for expert in range(3):
        alone = run(weight[expert], [g[expert] for g in steps])
        assert_close(f"expert {expert}", together[expert], alone, atol=1e-12)


def test_only_parameters_with_a_gradient_move():
    first, second = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))
    optimizer = Muon([first, second], **SETTINGS)
    before = second.detach().clone()
    first.grad = torch.randn(4, 4)
    optimizer.step()
    assert torch.equal(second, before)
    assert list(optimizer.state) == [first]


def test_one_buffer_is_kept():
    parameter = nn.Parameter(torch.randn(6, 4))
    optimizer = Muon([parameter], **SETTINGS)
    parameter.grad = torch.randn(6, 4)
    optimizer.step()
    kept = [v for v in optimizer.state[parameter].values() if isinstance(v, torch.Tensor)]
    assert [tuple(v.shape) for v in kept] == [(6, 4)]


@pytest.mark.parametrize(("shape", "blocks"), [((6, 4), 4), ((4, 4), 4), ((1, 9), 1)])
def test_heads_that_do_not_fit_are_a_bug(shape, blocks):
    with pytest.raises(AssertionError):
        block_shape(torch.Size(shape), blocks)


@pytest.mark.parametrize("shape", [(20, 50), (50, 20), (2, 7, 7)])
def test_the_hybrid_iteration_is_the_polar_factor(shape):
    matrices = torch.randn(shape, dtype=torch.float64)
    got = newton_schulz(matrices)
    want = np.array([polar(m) for m in matrices.reshape(-1, *shape[-2:]).numpy()]).reshape(shape)
    assert_close("polar factor", got, want, atol=1e-3)
    single = newton_schulz(matrices.float())
    assert_close("in float32", single, want, atol=1e-3)
    rough = newton_schulz(matrices.float(), torch.bfloat16).double()
    assert 1e-3 < (rough - torch.from_numpy(want)).norm() / np.linalg.norm(want) < 0.05


def test_directions_without_energy_stay_near_zero_in_float32_and_not_in_bfloat16():
    """Why bfloat16 is for matrices of full rank only."""
    matrix = torch.randn(96, 6) @ torch.randn(6, 128)
    for dtype, low, high in ((torch.float32, 0, 1e-2), (torch.bfloat16, 0.5, 1.1)):
        values = torch.linalg.svdvals(newton_schulz(matrix, dtype).double())
        assert (values[:6] - 1).abs().max() < 0.02, dtype
        assert low <= values[6:].median() <= high, dtype


def test_zero_stays_zero_and_scale_does_not_matter():
    assert not newton_schulz(torch.zeros(4, 6)).any()
    matrix = torch.randn(4, 6)
    tiny = newton_schulz(matrix * 1e-30)
    assert_close("tiny gradient", tiny, newton_schulz(matrix), atol=1e-4)


def test_small_blocks_and_batches_run_in_float32():
    optimizer = Muon([nn.Parameter(torch.zeros(600, 700))], dtype=torch.bfloat16)
    assert optimizer._dtype(torch.zeros(600, 700), torch.Size((600, 700))) == torch.bfloat16
    assert optimizer._dtype(torch.zeros(600, 500), torch.Size((600, 500))) == torch.float32
    assert optimizer._dtype(torch.zeros(1200, 700), torch.Size((300, 700))) == torch.float32
    assert optimizer._dtype(torch.zeros(2, 600, 700), torch.Size((600, 700))) == torch.float32
