"""Rotary embedding: frequencies, pairing, slice, inverse, gradients."""

import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from openv41 import ops
from tests.close import assert_close
from tests.oracles import rope as oracle

RELEASED_YARN = {
    "factor": 16.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 65536,
}


def yarn(rope_dim, theta, settings):
    return ops.yarn_frequencies(
        rope_dim,
        theta,
        factor=settings["factor"],
        beta_fast=settings["beta_fast"],
        beta_slow=settings["beta_slow"],
        original_max_position=settings["original_max_position_embeddings"],
    )


@pytest.mark.golden
@pytest.mark.parametrize(
    ("name", "frequencies"),
    [
        ("released_window", ops.rope_frequencies(64, 10000.0)),
        ("released_compressed", yarn(64, 160000.0, RELEASED_YARN)),
    ],
)
def test_released_tables(golden_dir, name, frequencies):
    stored = load_file(golden_dir / "ops" / "ops.safetensors")
    table = ops.rope_table(stored[f"rope.{name}.positions"], frequencies)
    assert torch.equal(table.real, stored[f"rope.{name}.cos"])
    assert torch.equal(table.imag, stored[f"rope.{name}.sin"])


@pytest.mark.parametrize(
    ("rope_dim", "theta", "settings"),
    [
        (64, 160000.0, RELEASED_YARN),
        (16, 160000.0, RELEASED_YARN | {"original_max_position_embeddings": 64}),
        (8, 40000.0, RELEASED_YARN | {"factor": 4.0, "original_max_position_embeddings": 100}),
        (2, 10000.0, RELEASED_YARN | {"original_max_position_embeddings": 1}),
    ],
)
def test_yarn_matches_oracle(rope_dim, theta, settings):
    want = torch.from_numpy(oracle.frequencies(rope_dim, theta, settings))
    assert_close("yarn", yarn(rope_dim, theta, settings), want, ulps=4)


def test_yarn_keeps_pairs_below_15_and_divides_pairs_from_25():
    plain, blended = ops.rope_frequencies(64, 160000.0), yarn(64, 160000.0, RELEASED_YARN)
    assert torch.equal(blended[:16], plain[:16])
    assert torch.equal(blended[25:], plain[25:] / 16)
    between = blended[16:25]
    assert ((between < plain[16:25]) & (between > plain[16:25] / 16)).all()


def test_the_two_bases_differ_at_position_5000():
    position = torch.tensor([5000])
    window = ops.rope_table(position, ops.rope_frequencies(64, 10000.0))
    compressed = ops.rope_table(position, yarn(64, 160000.0, RELEASED_YARN))
    angle = 5000 * 10000.0 ** (-2 * 7 / 64)
    assert window[0, 7].real == pytest.approx(math.cos(angle), abs=1e-3)
    assert (window - compressed).abs().max() > 1


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 8), (63, 2, 12), (127, 10), (129, 1, 9)])
def test_matches_oracle(shape, dtype, inverse):
    x = torch.randn(shape).to(dtype)
    frequencies = ops.rope_frequencies(8, 100.0)
    positions = torch.randint(0, 500, shape[:1])
    table = ops.rope_table(positions, frequencies)
    got = ops.rotate(x, ops.inverse_table(table) if inverse else table)
    want = np.array(
        [
            [oracle.rotate(v, int(p), frequencies.numpy(), inverse) for v in np.atleast_2d(row)]
            for row, p in zip(x.double().numpy(), positions, strict=True)
        ]
    ).reshape(shape)
    eps = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    assert_close("rotate", got, torch.from_numpy(want), rtol=eps, atol=4 * eps)
    assert torch.equal(got[..., :-8], x[..., :-8]), "channels before the rotary ones must stay"


@pytest.mark.parametrize(("channel", "partner", "sign"), [(4, 5, 1), (5, 4, -1)])
def test_adjacent_channels_of_the_tail_are_a_pair(channel, partner, sign):
    x = torch.zeros(1, 8)
    x[0, channel] = 1
    table = ops.rope_table(torch.tensor([3]), ops.rope_frequencies(4, 10000.0))
    want = torch.zeros(1, 8)
    want[0, channel], want[0, partner] = math.cos(3), sign * math.sin(3)
    assert_close("one-hot", ops.rotate(x, table), want, rtol=1e-6, atol=1e-7)


def test_quarter_turn_on_paper():
    table = ops.rope_table(torch.tensor([0, 1, 2]), torch.tensor([math.pi / 2]))
    x = torch.tensor([[7.0, 3.0, 5.0]] * 3)
    want = torch.tensor([[7.0, 3.0, 5.0], [7.0, -5.0, 3.0], [7.0, -3.0, -5.0]])
    assert_close("quarter turn", ops.rotate(x, table), want, rtol=0, atol=1e-6)


def test_inverse_undoes():
    x = torch.randn(5, 3, 8, dtype=torch.float64)
    table = ops.rope_table(torch.arange(5), ops.rope_frequencies(6, 100.0))
    back = ops.rotate(ops.rotate(x, table), ops.inverse_table(table))
    assert_close("round trip", back, x, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 64), (1, 8, 64), (7, 3, 42), (3, 32)])
def test_same_with_and_without_a_gradient(shape, dtype):
    """Without one, the rotation works inside one copy."""
    x = torch.randn(shape, dtype=dtype)
    before = x.clone()
    table = ops.rope_table(torch.arange(shape[0]) * 99, ops.rope_frequencies(32, 10000.0))
    plain = ops.rotate(x, table)
    assert torch.equal(x, before)
    recorded = ops.rotate(x.requires_grad_(), table)
    assert recorded.requires_grad
    eps = torch.finfo(dtype).eps
    assert_close("rotate", plain, recorded.detach(), rtol=eps, atol=4 * eps)
    strided = torch.cat([before, before], dim=-1)[..., : shape[-1]]
    assert torch.equal(ops.rotate(strided, table), plain)


@pytest.mark.parametrize("shape", [(0, 8), (0, 2, 8)])
def test_empty(shape):
    table = ops.rope_table(torch.zeros(0, dtype=torch.int64), ops.rope_frequencies(4, 10.0))
    assert ops.rotate(torch.zeros(shape), table).shape == shape


def test_gradcheck():
    x = torch.randn(3, 2, 6, dtype=torch.float64, requires_grad=True)
    table = ops.rope_table(torch.arange(3), ops.rope_frequencies(4, 10.0))
    assert torch.autograd.gradcheck(lambda x: ops.rotate(x, table), (x,))
    assert torch.autograd.gradcheck(lambda x: ops.rotate(x, ops.inverse_table(table)), (x,))
