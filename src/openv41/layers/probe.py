"""Recording and substituting named intermediate tensors. Report §2.3.1.

One mechanism for traces, for feeding a layer the inputs of another engine, and for the record and
replay of discrete choices (expert ids, selected entries) that reinforcement learning needs.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from jaxtyping import Shaped
from torch import Tensor
from torch.nn.functional import pad

from openv41.layers.batch import Batch

CHOICES = ("expert_ids", "topk_indices", "candidate_mask")
RECORDED = CHOICES[:2]  # of a single request: the others follow from them
Record = Mapping[str, Tensor]  # choices of one request by name, a row per position from 0 on


class Probe:
    """Keeps the tensors that ``wants`` accepts, and goes on with ``feed`` where it holds a name.

    ``values`` are what the forward itself computed, also where something else is fed after it.
    Names are ``layers.{i}.{what}`` or plain words such as ``embed``; docs/numerics.md lists them.
    """

    def __init__(
        self,
        wants: Callable[[str], bool] = lambda _: True,
        feed: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.values: dict[str, Tensor] = {}
        self.wants = wants
        self._feed = feed or {}

    @classmethod
    def recording_choices(cls) -> "Probe":
        """Keep the discrete choices of every layer, and nothing else."""
        return cls(lambda name: name.rpartition(".")[2] in CHOICES)

    @classmethod
    def replaying(cls, choices: Mapping[str, Tensor]) -> "Probe":
        """Make the choices that another run recorded."""
        return cls(lambda _: False, choices)

    def wants_or_feeds(self, name: str) -> bool:
        """Whether a tensor that the forward could do without is needed here."""
        return name in self._feed or self.wants(name)

    def __call__(self, name: str, value: Tensor) -> Tensor:
        """Return the value to go on with: ``value``, or what is fed under ``name``."""
        if self.wants(name):
            self.values[name] = value.detach()
        if name in self._feed:
            return self._feed[name].to(value.device)
        return value


class RecordProbe(Probe):
    """Makes the choices of each request's record, where it has one; all others are free.

    The batch may be any part of the requests, in layers that compute all of its rows.
    """

    def __init__(
        self,
        batch: Batch,
        records: Sequence[Record | None],
        wants: Callable[[str], bool] = lambda _: False,
    ) -> None:
        super().__init__(wants)
        self._records = [
            (record, first, slice(start, start + count))
            for record, first, start, count in zip(
                records, batch.first_rows, batch.starts, batch.counts, strict=True
            )
            if record is not None
        ]

    def __call__(self, name: str, value: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
        """Put recorded choices over the computed ones."""
        value = super().__call__(name, value)
        for record, first, positions in self._records:
            if name in record and (rows := record[name][positions]).numel():
                value = _with_rows(value, first, rows.to(value.device))
        if name in self.values:
            self.values[name] = value  # what was chosen in the end
        return value


def join_rows(parts: Sequence[Shaped[Tensor, "_ _"]]) -> Shaped[Tensor, "rows width"]:
    """Rows of one choice, recorded in parts; those with fewer columns are filled with -1."""
    width = max(part.shape[1] for part in parts)
    return torch.cat([pad(part, (0, width - part.shape[1]), value=-1) for part in parts])


def _with_rows(
    value: Shaped[Tensor, "T width"], first: int, rows: Shaped[Tensor, "rows narrower"]
) -> Shaped[Tensor, "T wider"]:
    """A copy of ``value`` with some rows replaced; the narrower of both is filled with -1."""
    before, behind = value[:first], value[first + len(rows) :]
    return join_rows([before, rows.to(value.dtype), behind])
