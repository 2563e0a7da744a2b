"""A training step of ``tiny`` on a CPU beside NeMo AutoModel's, in turns.

``python -m benchmarks.cpu_training`` starts a process for each part, round after round, with one
thread. It counts CPU time, which programs beside it disturb less than time on the wall.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Iterator

from benchmarks.gpu_training import Line, parser, start_part
from benchmarks.record import record

OURS, PEER = "ours, AdamW", "nemo-automodel"


def measured(options: argparse.Namespace, part: str) -> list[float]:
    """CPU seconds of the steps of one process."""
    process = start_part(options, part, "")
    out, error = process.communicate()
    found = [line for line in out.splitlines() if line.startswith("{")]
    if not found:
        raise SystemExit(f"{part} did not run: {error.strip()[-1500:]}")
    seconds: list[float] = json.loads(found[-1])["cpu_seconds"]
    sys.stderr.write(f"{part}: {', '.join(f'{x:.2f}' for x in seconds)}\n")
    return seconds


def lines(options: argparse.Namespace) -> Iterator[Line]:
    """Median and fastest of all steps, and the ratios of the peer's to ours."""
    seconds: dict[str, list[float]] = {OURS: [], PEER: []}
    for number in range(options.rounds):
        order = (OURS, PEER) if number % 2 == 0 else (PEER, OURS)
        for part in order:
            seconds[part] += measured(options, part)
    about: Line = {"preset": options.preset, "tokens": options.documents * options.context}
    medians = {part: statistics.median(found) for part, found in seconds.items()}
    for part, found in seconds.items():
        line = about | {"part": part, "median": medians[part], "fastest": min(found)}
        if part == OURS:
            line["ratio"] = medians[PEER] / medians[OURS]
            line["ratio_of_fastest"] = min(seconds[PEER]) / min(seconds[OURS])
        yield line | {"cpu_seconds": found}


def main() -> None:
    """Measure and record."""
    words = parser("python -m benchmarks.cpu_training")
    words.add_argument("--rounds", type=int, default=4, help="processes of each part")
    words.set_defaults(preset="tiny", documents=4, context=512, device="cpu", limit=400)
    words.set_defaults(keep_activations=True, warm_up=1, steps=3)
    options = words.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    record("cpu_training", lines(options))


if __name__ == "__main__":
    main()
