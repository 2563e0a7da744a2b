"""Cost tables: monotone, robust, padded sizes respected. Test T16."""

import numpy as np
import pytest

from openv41.engine.cost_table import CostTable
from openv41.engine.verification_scheduler import admit, best_budget, survival
from openv41.errors import ConfigError

TABLE = CostTable(
    requests=(1, 4),
    plain=(1.0, 2.5),
    verify=((1.5, 1.75, 2.0), (4.0, 5.0, 6.0)),
)


def test_measured_loads_are_as_measured():
    assert TABLE.num_drafts == 2
    assert TABLE.plain_seconds(1) == 1.0
    assert TABLE.plain_seconds(4) == 2.5
    np.testing.assert_allclose(TABLE.step_seconds(1, 2), [1.5, 1.75, 2.0])
    np.testing.assert_allclose(TABLE.step_seconds(4, 8)[::4], [4.0, 5.0, 6.0])


def test_between_and_behind_them_times_are_linear():
    assert TABLE.plain_seconds(2) == pytest.approx(1.5)
    assert TABLE.plain_seconds(6) == pytest.approx(3.5)
    np.testing.assert_allclose(TABLE.step_seconds(4, 12), 4.0 + np.arange(13) / 4)


def test_one_measured_load_serves_for_all():
    table = CostTable(requests=(2,), plain=(1.0,), verify=((1.2, 1.4),))
    assert table.plain_seconds(9) == 1.0
    np.testing.assert_allclose(table.step_seconds(2, 4), [1.2, 1.3, 1.4, 1.5, 1.6])


def test_medians_shrug_off_outliers_and_never_fall():
    plain = {1: [1.0, 1.0, 90.0], 2: [0.9, 0.9, 0.9]}
    verify = {
        (1, 0): [1.1, 1.1, 50.0],
        (1, 1): [1.0, 1.0, 1.0],
        (2, 0): [1.2, 0.01, 1.2],
        (2, 1): [1.5, 1.5, 1.5],
    }
    table = CostTable.measured(plain, verify)
    assert table.plain == (1.0, 1.0)
    assert table.verify == ((1.1, 1.1), (1.2, 1.5))


def test_rows_cost_what_their_padded_size_costs():
    table = CostTable(requests=(1,), plain=(1.0,), verify=((1.0, 2.0, 3.0, 4.0),), tiers=(2, 4))
    np.testing.assert_allclose(table.step_seconds(1, 4), [2, 2, 4, 4, 5])
    assert [table.fill(1, budget) for budget in range(5)] == [1, 1, 3, 3, 4]


def test_filling_a_tier_never_admits_more_drafts_than_there_are():
    table = CostTable(requests=(1,), plain=(1.0,), verify=((1.0, 1.0),), tiers=(64,))
    survivals = survival(np.full((3, 5), 0.9), [2, 0, 5])
    budget = best_budget(survivals, table.step_seconds(3, survivals.size))
    assert table.fill(3, budget) == 61
    assert admit(survivals, table.fill(3, budget)).tolist() == [2, 0, 5]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"requests": ()}, "requests is empty"),
        ({"requests": (4, 1)}, r"requests is \[4, 1\], must be positive and ascending"),
        ({"tiers": (0, 1)}, r"tiers is \[0, 1\], must be positive and ascending"),
        ({"plain": (1.0,)}, "one entry for each of requests"),
        ({"plain": (2.0, 1.0)}, "not fall with requests or drafts"),
        ({"plain": (0.0, 1.0)}, "above 0"),
        ({"plain": (float("nan"), 1.0)}, "above 0"),
        ({"verify": ((1.0, 2.0), (2.0, 1.0))}, "not fall with requests or drafts"),
        ({"verify": ((1.0, 2.0), (1.0,))}, "the same numbers of drafts"),
    ],
)
def test_tables_that_cannot_be_are_refused(change, words):
    fields = {"requests": (1, 4), "plain": (1.0, 2.0), "verify": ((1.0, 2.0), (2.0, 3.0))}
    with pytest.raises(ConfigError, match=words):
        CostTable(**(fields | change))
