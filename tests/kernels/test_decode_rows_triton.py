"""Tables of a decode step: integers, equal to the reference's."""

import pytest
import torch

from openv41 import ops


def kernels():
    from openv41.ops import decode_rows_triton  # noqa: PLC0415

    return decode_rows_triton


def described(tokens, device):
    """Rows of requests that bring one to four positions each; the last one is repeated."""
    places, positions = [], []
    while len(places) < tokens:
        place, start = len(places), int(torch.randint(0, 9, ()))
        count = int(torch.randint(1, 5, ()))
        places += [place] * count
        positions += range(start, start + count)
    places, positions = places[:tokens], positions[:tokens]
    both = [*places, places[-1]], [*positions, positions[-1]]
    return [torch.tensor(rows, dtype=torch.int64, device=device) for rows in both]


@pytest.mark.parametrize("tokens", [1, 6, 300])
def test_rows_of_rings(device, tokens):
    given = described(tokens, device)
    for reach, size in ((1, 5), (4, 6), (5, 5)):
        got = kernels().ring_rows.run(*given, reach, size)
        for mine, other in zip(got, ops.ring_rows.reference(*given, reach, size), strict=True):
            assert torch.equal(mine, other)


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("tokens", [1, 6, 300])
def test_rows_of_groups(device, tokens, ratio):
    given = described(tokens, device)
    got = kernels().group_rows.run(*given, ratio, 77)
    for mine, other in zip(got, ops.group_rows.reference(*given, ratio, 77), strict=True):
        assert torch.equal(mine, other)


def test_no_row_and_refusals(device):
    none = torch.zeros(0, dtype=torch.int64, device=device)
    assert kernels().ring_rows.run(none, none, 3, 5)[1].shape == (0, 3)
    assert kernels().group_rows.run(none, none, 2, 5).members.shape == (0, 2)
    assert "int32" in kernels().ring_rows.refuse(none.int(), none, 3, 5)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 64, 700])
def test_a_step_of_tokens_on_a_gpu(tokens):
    places, positions = described(tokens, "cuda")
    positions += 1 << 20
    with ops.kernels("required"):
        rings = ops.ring_rows(places, positions, 128, 192)
        groups = ops.group_rows(places, positions, 2, 1 << 19)
    want = (
        *ops.ring_rows.reference(places, positions, 128, 192),
        *ops.group_rows.reference(places, positions, 2, 1 << 19),
    )
    for mine, other in zip((*rings, *groups), want, strict=True):
        assert torch.equal(mine, other)
