"""Discrete choices of single requests within a batch: recorded, and replayed. Report §2.3.1."""

from collections.abc import Sequence

import torch
from jaxtyping import Shaped
from torch import Tensor

from openv41.engine.job import Job
from openv41.layers.batch import Batch
from openv41.layers.probe import Probe

KINDS = ("expert_ids", "topk_indices")


class StepProbe(Probe):
    """Keeps the choices of jobs that record them; replaces the rows of jobs that replay some."""

    def __init__(self, jobs: Sequence[Job], batch: Batch) -> None:
        super().__init__(lambda name: name.rpartition(".")[2] in KINDS)
        self._rows = [
            (job, slice(first, first + count), slice(start, start + count))
            for job, first, start, count in zip(
                jobs, batch.first_rows, batch.starts, batch.counts, strict=True
            )
        ]

    def __call__(self, name: str, value: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
        """Put replayed choices over the computed ones."""
        value = super().__call__(name, value)
        for job, rows, positions in self._rows:
            given = (job.request.choices or {}).get(name)
            if given is not None and (taken := given[positions]).numel():
                value = _with_rows(value, rows.start, taken.to(value.device))
        if name in self.values:
            self.values[name] = value  # what was chosen in the end
        return value

    def collect(self) -> None:
        """Hand every recording job the rows that are its own."""
        for job, rows, _ in self._rows:
            if job.request.record_choices:
                for name, value in self.values.items():
                    job.choices.setdefault(name, []).append(value[rows].cpu())


def _with_rows(
    value: Shaped[Tensor, "T width"], first: int, rows: Shaped[Tensor, "rows narrower"]
) -> Shaped[Tensor, "T wider"]:
    """A copy of ``value`` with some rows replaced; the narrower of both is filled with -1."""
    width = max(value.shape[1], rows.shape[1])
    value, rows = (
        torch.nn.functional.pad(t, (0, width - t.shape[1]), value=-1) for t in (value, rows)
    )
    value = value.clone()
    value[first : first + len(rows)] = rows.to(value.dtype)
    return value
