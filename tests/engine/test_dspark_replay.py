"""The scheduler on a replayed load, beside every fixed policy."""

import numpy as np
import pytest

from benchmarks.dspark_replay import Rounds, policies, replay
from openv41.engine.cost_table import CostTable

DRAFTS = 5
LOADS = (1, 4, 16, 48, 2, 1, 32)


def recorded(count, level, seed=0):
    """Rounds whose confidences are honest, easy and hard stretches by turns."""
    generator = np.random.default_rng(seed)
    ease = np.repeat(generator.normal(level, 1.5, count // 8), 8)[:, None]
    logits = ease + generator.normal(0, 0.7, (count, DRAFTS))
    hits = generator.random(logits.shape) < 1 / (1 + np.exp(-logits))
    return Rounds(logits, np.cumprod(hits, axis=1).sum(axis=1))


def staircase(row, step, draft):
    """Rows are cheap up to each ``step`` of them, then a jump."""
    requests = (1, 2, 4, 8, 16, 32, 64)

    def seconds(rows):
        return 1.0 + row * step * np.ceil(rows / step)

    return CostTable(
        requests=requests,
        plain=tuple(seconds(r) for r in requests),
        verify=tuple(
            tuple(seconds(r * (1 + n)) + draft * (4 + r) for n in range(DRAFTS + 1))
            for r in requests
        ),
    )


@pytest.mark.parametrize(
    ("level", "costs"),
    [
        (1.0, staircase(0.02, 8, 0.02)),
        (0.0, staircase(0.1, 16, 0.02)),
        (2.0, staircase(0.005, 4, 0.01)),
    ],
)
def test_the_scheduler_is_within_five_percent_of_the_best_fixed_policy(level, costs):
    rounds = recorded(4096, level)
    runs = {n: replay(costs, rounds, p, LOADS)[0] for n, p in policies(costs, rounds).items()}
    speeds = {name: run.tokens / run.seconds for name, run in runs.items()}
    best = max(speed for name, speed in speeds.items() if "scheduled" not in name)
    assert speeds["scheduled"] >= 0.95 * best, speeds


def test_it_is_as_fast_as_no_speculation_where_drafts_are_hopeless():
    rounds, costs = recorded(4096, -4.0), staircase(0.1, 1, 0.1)
    found = policies(costs, rounds)
    scheduled, plain = (replay(costs, rounds, found[n], LOADS)[0] for n in ("scheduled", "none"))
    assert scheduled.tokens / scheduled.seconds >= 0.97 * plain.tokens / plain.seconds
