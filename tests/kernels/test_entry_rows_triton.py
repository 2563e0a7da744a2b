"""Entries and rows of what was chosen: integers, equal to the reference's."""

import pytest
import torch

from openv41 import ops


def kernels():
    from openv41.ops import entry_rows_triton  # noqa: PLC0415

    return entry_rows_triton


def chosen(tokens, width, most, device):
    """Ascending numbers below ``most``, then -1."""
    ids = torch.stack([torch.randperm(most)[:width].sort().values for _ in range(tokens)])
    for row, count in enumerate(torch.randint(width + 1, (tokens,)).tolist()):
        ids[row, count:] = -1
    return ids.to(device)


@pytest.mark.parametrize(("tokens", "width", "size", "parts"), [(1, 5, 8, 3), (3, 40, 1, 50)])
def test_rows_are_those_of_the_reference(device, tokens, width, size, parts):
    """Also of a table that is part of a wider one, and of numbers in columns."""
    ids = chosen(tokens, width, size * parts, device)
    wide = torch.randint(1000, (tokens, parts + 4), device=device)
    for table in (wide[:, :parts], wide.mT.contiguous().mT[:, :parts]):
        for name in ("pool_entries", "page_rows"):
            want = getattr(ops, name).reference(ids, table, size)
            for given in (ids, ids.mT.contiguous().mT):
                assert torch.equal(getattr(kernels(), name).run(given, table, size), want)
    assert kernels().page_rows.run(ids[:, :0], wide, size).shape == (tokens, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 64])
def test_a_step_of_tokens_on_a_gpu(tokens):
    places, entries = (chosen(tokens, 512, most, "cuda") for most in (16384, 131072))
    pools = torch.randint(16384, (tokens, 2048), device="cuda")
    table = torch.randint(1 << 33, (tokens, 4096), device="cuda")[:, :2048]
    with ops.kernels("required"):
        got = ops.pool_entries(places, pools, 8), ops.page_rows(entries, table, 64)
    assert torch.equal(got[0], ops.pool_entries.reference(places, pools, 8))
    assert torch.equal(got[1], ops.page_rows.reference(entries, table, 64))
