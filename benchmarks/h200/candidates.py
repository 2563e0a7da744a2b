"""What is timed in a row: ours, its variants and the reference here, peers in their processes."""

import math
import traceback
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.h200.clock import Clock, Run
from benchmarks.h200.rows import Inputs, Row, poison
from openv41.ops import kernels
from openv41.ops._dispatch import Mode

INPUT_SETS = 2  # drawn with different seeds; both are checked


class NotRunError(Exception):
    """A candidate that did not run or was wrong, with the reason."""


class Candidate:
    """A checked function with its replays, one for each input set.

    ``memory`` is what the replays read and write: a graph knows addresses, and keeps nothing alive.
    """

    def __init__(
        self, name: str, runs: list[Run], error: float, *, graph: bool, memory: object
    ) -> None:
        self.name = name
        self.error = error
        self.memory = memory
        self.mode = "graph" if graph else "eager"
        self._runs = runs

    def count(self, clock: Clock, seconds: float) -> int:
        """Samples of one of the four turns, after the warm-up."""
        return clock.count(self._runs, seconds)

    def sample(self, clock: Clock, count: int) -> list[float]:
        """Microseconds of each sample."""
        return clock.sample(self._runs, count)


def prepare(
    clock: Clock, row: Row, name: str, function: Callable[..., Any], sets: list[Inputs]
) -> Candidate:
    """Check on every input set, capture, check the replay again; raises NotRunError."""
    mode: Mode = "reference" if name == "reference" else "required"
    runs, errors, graph, kept = [], [], True, []
    for inputs in sets:
        run = _in_mode(mode, function, inputs)
        try:
            errors.append(_checked(row, inputs, poisoned_run(clock, run)))
            replay, outputs = _captured_or_none(clock, run)
            if replay is None:
                runs.append(run)
                graph = False
                continue
            poison(outputs)
            replay()
            clock.wait()
            errors.append(_checked(row, inputs, outputs))
            runs.append(replay)
            kept.append(outputs)
        except NotRunError:
            raise
        except Exception as error:
            raise NotRunError(_last_lines(error)) from error
    return Candidate(name, runs, max(errors), graph=graph, memory=(sets, kept))


def _in_mode(mode: Mode, function: Callable[..., Any], inputs: Inputs) -> Run:
    def run() -> object:
        with kernels(mode):
            return function(**inputs)

    return run


def poisoned_run(clock: Clock, run: Run) -> object:
    """Run with fresh memory that holds NaN; what the call allocates is then poisoned too."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        outputs = run()
        clock.wait()
    finally:
        torch.use_deterministic_algorithms(False)
    return outputs


def _captured_or_none(clock: Clock, run: Run) -> tuple[Run | None, Any]:
    try:
        return clock.captured(run)
    except Exception:
        clock.wait()
        return None, None


def _checked(row: Row, inputs: Inputs, outputs: object) -> float:
    with kernels("reference"):  # an error may need gradients
        error = float(row.error(inputs, outputs))
    if math.isnan(error) or error > row.tolerance:
        raise NotRunError(f"wrong: error {error:.3g}, tolerance {row.tolerance:.3g}")
    return error


def _last_lines(error: Exception) -> str:
    lines = "".join(traceback.format_exception_only(error)).strip().splitlines()
    shown = lines[0] if "CUDA" in lines[0] else " / ".join(lines[-3:])  # CUDA adds advice
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{shown[-500:]} ({place.name}:{place.lineno})"
