"""What the layers of a forward share, where a single request or query goes a shorter way."""

import pytest
import torch

from openv41.layers.batch import Batch
from openv41.layers.context import compact
from openv41.layers.geometry import Entries


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize(("start", "count"), [(0, 1), (5, 1), (6, 1), (3, 4), (7, 0)])
def test_one_request_has_the_tables_it_has_next_to_an_empty_one(start, count, ratio):
    ids = torch.zeros(count, dtype=torch.int64)
    alone = Batch(ids, (4,), (start,), (count,))
    general = Batch(ids, (4, 9), (start, 0), (count, 0))
    assert torch.equal(alone.positions, general.positions)
    assert torch.equal(alone.per_token([7]), general.per_token([7, 8]))
    ours, theirs = Entries.of(alone, ratio), Entries.of(general, ratio)
    for name in ("visible", "first_rows", "new_positions"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name


@pytest.mark.parametrize("total", [6, 60])
@pytest.mark.parametrize("rows", [[[1, 3, 5]], [[1, 3, -1]], [[-1, -1]], [[1, 4], [4, 2]], [[]]])
def test_compact_rows_name_the_same_rows(rows, total):
    rows = torch.tensor(rows, dtype=torch.int64)
    used, places = compact(rows, total)
    assert places.shape == rows.shape
    assert torch.equal(used.sort().values, rows[rows >= 0].unique())
    again = torch.where(places < 0, -1, torch.cat([used, used.new_tensor([0])])[places])
    assert torch.equal(again, rows)
