"""2-D rotary angles, rotation of halves, attention inside each image."""

import json
import math

import pytest
import torch

from openv41 import ops
from tests.close import assert_close


def test_angles_of_the_vectors(shared_dir):
    want = json.loads((shared_dir / "vectors" / "v41_vit_small.json").read_text())["rope"]
    angles = ops.rope_angles_2d(4, 7, 64, 10000.0)
    assert angles.dtype == torch.float32
    assert_close("frequencies", angles[7, :16], torch.tensor(want["inv_freq"]), rtol=1e-6)
    assert_close("angles", angles[2 * 7 + 5], torch.tensor(want["angles_h2_w5"]), rtol=1e-6)


def test_rows_turn_the_first_half_of_the_pairs_and_columns_the_second():
    angles = ops.rope_angles_2d(2, 3, 8, 100.0)
    assert_close(
        "angles",
        angles,
        [[*row, *col] for row in ([0, 0], [1, 0.1]) for col in ([0, 0], [1, 0.1], [2, 0.2])],
        rtol=1e-6,
    )


def test_pairs_are_i_and_i_plus_half():
    x = torch.zeros(1, 1, 8, dtype=torch.float64)
    x[0, 0, 1], x[0, 0, 5], x[0, 0, 7] = 3.0, 4.0, 2.0
    angles = torch.tensor([[0.3, 0.7, 0.1, 0.2]], dtype=torch.float64)
    out = ops.rotate_halves(x, angles)[0, 0]
    assert_close("first", out[1], 3 * math.cos(0.7) - 4 * math.sin(0.7), rtol=1e-6)
    assert_close("second", out[5], 4 * math.cos(0.7) + 3 * math.sin(0.7), rtol=1e-6)
    assert_close("other", out[3], -2 * math.sin(0.2), rtol=1e-6)
    assert out[[0, 2, 4, 6]].eq(0).all()


def test_rotation_is_rounded_once():
    x, angles = torch.randn(5, 2, 8).bfloat16(), torch.rand(5, 4)
    got = ops.rotate_halves(x, angles)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, ops.rotate_halves(x.float(), angles).bfloat16())


def loops(q, k, v, lengths):
    """Attention in float64, entry by entry."""
    out, first = torch.zeros_like(v, dtype=torch.float64), 0
    for length in lengths:
        for i in range(first, first + length):
            for h in range(q.shape[1]):
                scores = [
                    math.exp(float(q[i, h].double() @ k[j, h].double()) * q.shape[2] ** -0.5)
                    for j in range(first, first + length)
                ]
                for j, score in enumerate(scores):
                    out[i, h] += score / sum(scores) * v[first + j, h].double()
        first += length
    return out


@pytest.mark.parametrize("lengths", [[1], [7], [3, 1, 5], [4, 4], [2, 0, 3]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_attention_against_loops(lengths, dtype):
    q, k, v = torch.randn(3, sum(lengths), 2, 4).to(dtype)
    got = ops.image_attention(q, k, v, lengths)
    assert got.dtype == dtype
    assert_close("mixed", got, loops(q, k, v, lengths), ulps=4, terms=2)


def test_scores_and_sums_are_float32_in_bfloat16():
    q, k, v = torch.randn(3, 9, 2, 16).bfloat16()
    want = ops.image_attention(q.float(), k.float(), v.float(), [4, 5])
    assert torch.equal(ops.image_attention(q, k, v, [4, 5]), want.bfloat16())


def test_no_image():
    empty = torch.zeros(0, 2, 4)
    assert ops.image_attention(empty, empty, empty, []).shape == (0, 2, 4)


def test_large_scores_are_finite():
    q = torch.full((3, 1, 4), 300.0, requires_grad=True)
    out = ops.image_attention(q, q, torch.randn(3, 1, 4), [3])
    out.sum().backward()
    assert out.isfinite().all()
    assert q.grad.isfinite().all()


def test_gradients():
    q, k, v = torch.randn(3, 5, 2, 4, dtype=torch.float64).unbind()
    angles = ops.rope_angles_2d(1, 5, 4, 100.0).double()

    def run(q, k, v):
        return ops.image_attention(ops.rotate_halves(q, angles), k, v, [2, 3])

    inputs = [t.clone().requires_grad_() for t in (q, k, v)]
    assert torch.autograd.gradcheck(run, inputs)
