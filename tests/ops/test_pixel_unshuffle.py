"""Merging of patches: the vector, torch's own unfold, one bright patch, gradients."""

import json

import pytest
import torch

from openv41 import ops


def test_the_vector(shared_dir):
    case = json.loads((shared_dir / "vectors" / "v41_vit_small.json").read_text())["unshuffle"]
    x = torch.tensor(case["input_tokens"], dtype=torch.float32)
    got = ops.pixel_unshuffle(x, case["n_h"], case["n_w"], case["r"])
    assert got.tolist() == case["output"]


@pytest.mark.parametrize("ratio", [1, 2, 3, 4])
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (3, 3), (4, 7), (7, 4), (1, 9), (6, 2)])
def test_equals_unfold(rows, cols, ratio):
    x = torch.randn(rows * cols, 5)
    image = x.T.reshape(1, 5, rows, cols)
    padded = torch.nn.functional.pad(image, (0, -cols % ratio, 0, -rows % ratio))
    want = torch.nn.functional.unfold(padded, ratio, stride=ratio)[0].T
    assert torch.equal(ops.pixel_unshuffle(x, rows, cols, ratio), want)


def test_one_bright_patch():
    x = torch.zeros(4 * 7, 2)
    x[2 * 7 + 5, 1] = 1  # row 2, column 5: cell 1 of the first row of cells, dy 2, dx 2
    got = ops.pixel_unshuffle(x, 4, 7, 3)
    assert got.shape == (6, 18)
    assert got.nonzero().tolist() == [[1, 9 + 2 * 3 + 2]]


def test_gradients():
    x = torch.randn(10, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: ops.pixel_unshuffle(t, 2, 5, 3), [x])
