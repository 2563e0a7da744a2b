"""The Sinkhorn-balanced update against Algorithm 1; sizes of rows and columns; what it keeps."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from openv41.train.sinkhorn_update import SinkhornBalanced, live_rows
from tests.close import assert_close
from tests.train.update_oracle import sinkhorn

SETTINGS = {"lr": 0.02, "momentum": 0.95, "update_rms": 0.18, "steps": 11, "threshold": 1e-3}
ORACLE = {"lr": 0.02, "beta": 0.95, "gamma": 0.18, "steps": 11, "tau": 1e-3}


def run(weight, steps, **settings):
    parameter = nn.Parameter(weight.clone())
    optimizer = SinkhornBalanced([parameter], **{**SETTINGS, **settings})
    moves = []
    for gradient in steps:
        before = parameter.detach().clone()
        parameter.grad = gradient
        optimizer.step()
        moves.append(parameter.detach() - before)
    return parameter.detach(), moves, optimizer


def sparse(rows, columns, live, dtype=torch.float64):
    gradient = torch.zeros(rows, columns, dtype=dtype)
    chosen = torch.randperm(rows)[:live]
    gradient[chosen] = torch.randn(live, columns, dtype=dtype) * torch.rand(live, 1, dtype=dtype)
    return gradient * 1e-6


@pytest.mark.parametrize("share", [1.0, 0.5, 0.1])
@pytest.mark.parametrize("shape", [(40, 6), (20, 20)])
def test_three_steps_follow_algorithm_1(shape, share):
    """With most rows live, and with few."""
    weight = torch.randn(shape, dtype=torch.float64)
    steps = [sparse(*shape, int(shape[0] * share)) for _ in range(3)]
    got, _, _ = run(weight, steps)
    want = sinkhorn(weight.numpy(), [g.numpy() for g in steps], **ORACLE)
    assert_close("weight", got, want, rtol=1e-10, atol=1e-12)
    single, _, _ = run(weight.float(), [g.float() for g in steps])
    assert_close("in float32", single, want, atol=2e-6)


def test_live_rows_have_unit_rms_and_live_columns_equal_size():
    """Eq. (7): a column's RMS counts live rows only."""
    gradient = sparse(4096, 64, 197)
    _, [move], _ = run(torch.zeros(4096, 64, dtype=torch.float64), [gradient])
    update = -move / (SETTINGS["lr"] * SETTINGS["update_rms"])
    live = gradient.any(dim=1)
    assert not update[~live].any()
    assert_close("rows", update[live].square().mean(1).sqrt(), torch.ones(197), atol=1e-6)
    columns = update.square().mean(0).sqrt()
    assert_close("columns", columns, torch.full((64,), math.sqrt(197 / 4096)), rtol=1e-3, atol=0)


def test_rows_near_zero_are_left_alone():
    gradient = torch.randn(100, 8, dtype=torch.float64)
    gradient[3] *= 0.95e-3 * gradient.norm(dim=1).mean() / gradient[3].norm()
    gradient[4] *= 1.05e-3 * gradient.norm(dim=1).mean() / gradient[4].norm()
    live = live_rows(gradient, 1e-3)
    assert live.sum() == 99
    assert not live[3]
    _, [move], _ = run(torch.zeros(100, 8, dtype=torch.float64), [gradient])
    assert not move[3].any()
    assert move[4].any()


def test_a_row_moves_in_whole_steps_until_its_momentum_fades():
    """A row that is hit once goes on for about ln(1e-3) / ln(0.95) = 135 steps, then stops."""
    first = sparse(64, 8, 64)
    other = first.clone()
    other[7] = 0
    _, moves, _ = run(torch.zeros(64, 8, dtype=torch.float64), [first, *[other] * 200])
    sizes = torch.stack([m[7].square().mean().sqrt() for m in moves])
    moving = (sizes > 0).nonzero().max().item() + 1
    assert 80 < moving < 180
    assert_close("whole steps", sizes[:moving], torch.full((moving,), 0.02 * 0.18), rtol=1e-4)
    assert not sizes[moving:].any()


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e30])
def test_any_scale_of_gradient_gives_a_finite_update(scale):
    gradient = torch.randn(12, 5) * scale
    weight, [move], _ = run(torch.zeros(12, 5), [gradient])
    assert weight.isfinite().all()
    assert move.abs().sum() > 0 or scale == 0


def test_one_buffer_is_kept_and_nothing_decays():
    parameter = nn.Parameter(torch.ones(6, 4))
    optimizer = SinkhornBalanced([parameter])
    parameter.grad = torch.zeros(6, 4)
    optimizer.step()
    assert torch.equal(parameter, torch.ones(6, 4))
    assert [tuple(v.shape) for v in optimizer.state[parameter].values()] == [(6, 4)]


def test_a_column_of_zeros_stays_zero():
    gradient = torch.randn(9, 4)
    gradient[:, 2] = 0
    _, [move], _ = run(torch.zeros(9, 4), [gradient])
    assert move.isfinite().all()
    assert not move[:, 2].any()
    assert move[:, :2].all()


def test_an_even_number_of_steps_is_a_bug():
    with pytest.raises(AssertionError, match="10 steps do not end on rows"):
        SinkhornBalanced([nn.Parameter(torch.zeros(2, 2))], steps=10)


def test_oracle_ends_on_rows():
    rows = sinkhorn(np.zeros((5, 3)), [np.random.default_rng(0).normal(size=(5, 3))], **ORACLE)
    assert np.allclose(np.sqrt((rows**2).mean(1)), 0.02 * 0.18)
