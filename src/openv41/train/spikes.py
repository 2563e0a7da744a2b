"""Loss spikes: losses far above those of the steps before. Ours; the report saw no instability."""

import math
from collections import deque
from pathlib import Path
from statistics import fmean, pstdev

from openv41.train.metrics import read_records


class SpikeWatch:
    """Knows the losses of the last ``steps`` steps of a stage."""

    def __init__(self, *, steps: int, factor: float) -> None:
        self._steps, self._factor = steps, factor
        self._losses: deque[float] = deque(maxlen=steps)

    @property
    def most(self) -> float:
        """The mean of the last losses and ``factor`` of their standard deviations above it.

        A loss above it is a spike. Infinite until there are losses of enough steps, and where
        ``factor`` is 0.
        """
        if not self._factor or len(self._losses) < self._steps:
            return math.inf
        return fmean(self._losses) + self._factor * pstdev(self._losses)

    def add(self, loss: float) -> None:
        """Remember the loss of a step that was taken, be it a spike or not."""
        self._losses.append(loss)


def read_losses(log: Path, stage: str, step: int) -> list[float]:
    """Losses of a stage's steps up to ``step``, from the log of a run that goes on."""
    records = read_records(log) if log.exists() else []
    return [float(r["loss"]) for r in records if r["stage"] == stage and r["step"] <= step]
