"""Compression of a decode step: groups that began before it, in it, and rows that are repeated."""

import pytest
import torch

from openv41 import ops
from tests.close import assert_close

SIZE = 6  # rows of a ring


def kernel():
    from openv41.ops.pending_triton import pool_pending  # noqa: PLC0415

    return pool_pending


def step(device, width, dtype, requests, repeated=0):
    """Arguments of a step: (position, count) of each request, the last row a few times more."""
    places = [place for place, (_, count) in enumerate(requests) for _ in range(count)]
    positions = [start + n for start, count in requests for n in range(count)]
    places, positions = (x + x[-1:] * repeated for x in (places, positions))
    places, positions = (torch.tensor(x, device=device) for x in (places, positions))
    own, rows = ops.ring_rows.reference(places, positions, 2, SIZE)
    members = ops.group_rows.reference(places, positions, 2, 9).members
    kv, gate = torch.randn(2, len(places), width, device=device)
    first = len(places) - 1 - repeated
    kv[first:], gate[first:] = kv[first].clone(), gate[first].clone()
    ring = torch.randn(len(requests) * SIZE, 2 * width, device=device).to(dtype)
    return [kv, gate, ring, own, rows[:, 0], members], positions


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("repeated", [0, 3])
@pytest.mark.parametrize(
    "requests", [[(1, 1)], [(4, 1), (7, 1)], [(2, 4), (5, 3), (0, 2)], [(3, 2), (6, 1)]]
)
def test_pools_and_rings_are_those_of_the_reference(device, requests, repeated, dtype):
    given, positions = step(device, 40, dtype, requests, repeated)
    if not torch.cuda.is_available():
        given[0], given[1], given[2] = (x.bfloat16().to(x.dtype) for x in given[:3])
    rings = given[2].clone(), given[2].clone()
    got = kernel().run(*given[:2], rings[0], *given[3:])
    want = ops.pool_pending.reference(*given[:2], rings[1], *given[3:])
    assert torch.equal(*rings)
    known = positions > 0
    assert_close("pooled", got[known], want[known], rtol=1e-5, atol=1e-6)


def test_no_token_and_refusals(device):
    given, _ = step(device, 8, torch.float32, [(1, 1)])
    none = [x[:0] for x in given]
    assert kernel().run(*none[:2], given[2], *none[3:]).shape == (0, 8)
    assert "float64" in kernel().refuse(given[0].double(), *given[1:])
    assert "not contiguous" in kernel().refuse(*given[:2], given[2][:, ::2], *given[3:])
    many = torch.zeros(5000, 1)
    assert "5000 tokens" in kernel().refuse(many, many, *given[2:])


@pytest.mark.gpu
@pytest.mark.parametrize("requests", [[(16383, 1)], [(n, 1) for n in range(5, 69)]])
def test_a_step_of_tokens_on_a_gpu(requests):
    given, _ = step("cuda", 512, torch.float32, requests, 2)
    rings = given[2].clone(), given[2].clone()
    with ops.kernels("required"):
        got = ops.pool_pending(*given[:2], rings[0], *given[3:])
    want = ops.pool_pending.reference(*given[:2], rings[1], *given[3:])
    assert torch.equal(*rings)
    assert_close("pooled", got, want, rtol=1e-5, atol=1e-6)
