"""How long a schedule takes to make: `python -m benchmarks.scheduling`. Report §2.4.3.

Time is that of the thread, so that a busy machine measures the same.
"""

import statistics
import time
from collections.abc import Iterator

import numpy as np

from benchmarks.record import record
from openv41.engine.confidence_speculator import ConfidenceSpeculator
from openv41.engine.cost_table import CostTable

REQUESTS = (1, 10, 100, 1000, 10_000)
DRAFTS, SAMPLES = 5, 30
COSTS = CostTable(
    requests=(1, 10_000), plain=(1.0, 2.0), verify=((1.0,) * 6, (2.0, 2.2, 2.4, 2.6, 2.8, 3.0))
)


def measure() -> Iterator[dict[str, object]]:
    """Yield microseconds of a whole step of the speculator: plan, lengths, what came of it."""
    for count in REQUESTS:
        speculator = ConfidenceSpeculator(COSTS, num_drafts=DRAFTS)
        generator, requests = np.random.default_rng(0), list(range(count))
        limits, seconds = [DRAFTS] * count, []
        for _ in range(SAMPLES):
            logits = generator.normal(1.0, 1.0, (count, DRAFTS))
            start = time.thread_time()
            speculator.plan(requests)
            lengths = speculator.lengths(requests, logits, limits)
            speculator.verified(requests, lengths, [length // 2 for length in lengths])
            seconds.append(time.thread_time() - start)
        yield {
            "benchmark": "scheduling",
            "requests": count,
            "us": statistics.median(seconds) * 1e6,
            "us_least": min(seconds) * 1e6,
        }


if __name__ == "__main__":
    record("scheduling", measure())
