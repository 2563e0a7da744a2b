"""Pooling of a compression group."""

import math

import numpy as np
import pytest
import torch

from openv41 import ops
from tests.close import assert_close
from tests.oracles import compressor as oracle


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("M", "C"), [(1, 1), (63, 3), (127, 5), (129, 2)])
def test_matches_oracle(M, C, dtype):
    kv, gate = torch.randn(M, 2, C, dtype=dtype), torch.randn(M, 2, C, dtype=dtype) * 3
    want = [
        oracle.pool(k.double().numpy(), g.double().numpy()) for k, g in zip(kv, gate, strict=True)
    ]
    got = ops.pool_group(kv, gate)
    assert_close("pool", got, torch.from_numpy(np.array(want)), ulps=8)


def test_softmax_runs_over_the_tokens_of_each_channel_on_paper():
    kv = torch.tensor([[[4.0, 10.0], [8.0, 20.0]]])
    gate = torch.tensor([[[math.log(3), 0.0], [0.0, math.log(4)]]])
    assert_close("pool", ops.pool_group(kv, gate), torch.tensor([[5.0, 18.0]]), rtol=1e-6)


def test_large_gates_stay_finite():
    kv, gate = torch.tensor([[[1.0], [2.0]]]), torch.tensor([[[1e4], [-1e4]]])
    assert torch.equal(ops.pool_group(kv, gate), torch.tensor([[1.0]]))


def test_empty():
    assert ops.pool_group(torch.zeros(0, 2, 3), torch.zeros(0, 2, 3)).shape == (0, 3)


def test_gradcheck():
    kv, gate = (torch.randn(2, 2, 2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(ops.pool_group, (kv, gate))


@pytest.mark.parametrize(
    ("position", "ratio", "want"), [(0, 2, 0), (1, 2, 1), (2, 2, 1), (0, 1, 1)]
)
def test_oracle_counts_complete_groups(position, ratio, want):
    assert oracle.num_visible(position, ratio) == want == (position + 1) // ratio
