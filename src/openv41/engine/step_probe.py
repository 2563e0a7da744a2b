"""Discrete choices of single requests within a batch: recorded, and replayed. Report §2.3.1."""

from collections.abc import Sequence

from openv41.engine.job import Job
from openv41.layers.batch import Batch
from openv41.layers.probe import RECORDED, RecordProbe


class StepProbe(RecordProbe):
    """Keeps the choices of jobs that record them; replaces the rows of jobs that replay some."""

    def __init__(self, jobs: Sequence[Job], batch: Batch) -> None:
        records = [job.request.choices for job in jobs]
        super().__init__(batch, records, lambda name: name.rpartition(".")[2] in RECORDED)
        self._rows = [
            (job, slice(first, first + count))
            for job, first, count in zip(jobs, batch.first_rows, batch.counts, strict=True)
        ]

    def collect(self) -> None:
        """Hand every recording job the rows that are its own."""
        for job, rows in self._rows:
            if job.request.record_choices:
                for name, value in self.values.items():
                    job.choices.setdefault(name, []).append(value[rows].cpu())
