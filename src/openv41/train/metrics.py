"""What a run writes down: one JSON object per step in ``log.jsonl``; others may take it too.

Keys of a step: ``step`` (the first is 1), ``stage``, ``tokens`` seen so far, ``loss`` in nats per
token and ``losses`` of text and of documents with an image, ``indexer_loss`` and ``balance_loss``
before their weights and summed over layers, unless turned off (see layers/objectives.py),
``distill_loss`` (reverse KL in nats per token) beside teachers, ``lr`` before the groups' factors,
``grad_norm`` before clipping, ``update_rms`` of each group's step over its learning rate where it
was measured, ``skipped`` batches before this one, ``spike`` where the loss was far above those
before (see train/spikes.py), ``balance`` of text and of image tokens (see train/balance.py),
``image_tokens`` of this step, ``tokens_per_second``, ``model_flops_per_second`` (see
model/training_flops.py) and ``mfu``, their share of the device's peak where that is known, and at
intervals ``heldout_bits_per_byte`` of text and ``heldout_image_nats`` per target of image-text
samples. In stage "vision" ``loss`` is the contrastive loss, in nats per image, and ``retrieval``
the share of images that find their text. ``draft`` holds what the drafter's losses and acceptances
are, and ``heldout_draft`` the same of held-out text (see train/draft_loss.py and
train/draft_evaluation.py); in stage "dspark" ``loss`` is the drafter's.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from openv41.errors import DataError
from openv41.io.atomic import write_atomic
from openv41.train.balance import Balance

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

LOG_FILE = "log.jsonl"
EVENTS_FOLDER = "tensorboard"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One line of the log."""

    step: int
    stage: str
    tokens: int
    loss: float
    losses: dict[str, float]
    indexer_loss: float | None = None
    balance_loss: float | None = None
    distill_loss: float | None = None
    lr: float
    grad_norm: float
    update_rms: dict[str, float] | None = None
    skipped: int = 0
    spike: bool = False
    balance: dict[str, Balance]
    image_tokens: int = 0
    tokens_per_second: float
    model_flops_per_second: float | None = None
    mfu: float | None = None
    retrieval: float | None = None
    draft: dict[str, Any] | None = None
    heldout_draft: dict[str, Any] | None = None
    heldout_bits_per_byte: float | None = None
    heldout_image_nats: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """The record without what was not measured."""
        return {key: value for key, value in asdict(self).items() if value is not None}


@runtime_checkable
class Sink(Protocol):
    """Where figures go beside the log."""

    def add(self, values: Mapping[str, float], step: int) -> None:
        """Take the figures of a step."""

    def close(self) -> None:
        """Take no more."""


class RunLog:
    """Appends records; a run that goes on at ``step`` drops what was logged behind it."""

    def __init__(self, folder: Path, step: int, sinks: Sequence[Sink] = ()) -> None:
        self._path = folder / LOG_FILE
        self._trim(step)
        self._file = self._path.open("a", encoding="utf-8")
        self._sinks = [*_tensorboard(folder / EVENTS_FOLDER, step), *sinks]

    def add(self, record: StepRecord) -> None:
        """Write a record; it can be read at once."""
        values = record.as_dict()
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()
        figures = {k: v for k, v in _flat(values) if k not in ("step", "stage", "tokens")}
        for sink in self._sinks:
            sink.add(figures, record.step)

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        for sink in self._sinks:
            sink.close()

    def _trim(self, step: int) -> None:
        """Keep the records of steps up to ``step``; a half-written last line goes too."""
        try:
            lines = self._path.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{self._path}: cannot read the log of the run: {error}") from None
        kept = "".join(f"{line}\n" for line in lines if (_step_of(line) or step + 1) <= step)
        write_atomic(self._path, kept.encode())


def read_records(path: Path) -> list[dict[str, Any]]:
    """Records of a log; a half-written last line is left out."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot read the log of the run: {error}") from None
    return [json.loads(line) for line in lines if _step_of(line) is not None]


def _flat(values: Mapping[str, Any], name: str = "") -> Iterator[tuple[str, float]]:
    """Nested figures under slashed names, lists by their place."""
    for key, value in values.items():
        path = f"{name}/{key}" if name else key
        if isinstance(value, list):
            yield from _flat({str(place): item for place, item in enumerate(value)}, path)
        elif isinstance(value, dict):
            yield from _flat(value, path)
        else:
            yield path, value


def _step_of(line: str) -> int | None:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return None


class _TensorBoard:
    """TensorBoard's event files."""

    def __init__(self, writer: "SummaryWriter") -> None:
        self._writer = writer

    def add(self, values: Mapping[str, float], step: int) -> None:
        """Write a scalar of each figure."""
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        """Put everything on the disk."""
        self._writer.close()


def _tensorboard(folder: Path, step: int) -> list[Sink]:
    """Its sink, where the extra is installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 -- an optional extra
    except ImportError:
        return []
    return [_TensorBoard(SummaryWriter(str(folder), purge_step=step + 1))]
