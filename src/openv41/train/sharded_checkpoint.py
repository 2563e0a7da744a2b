"""Checkpoints that several processes write together, by torch's DCP. Report §2.5.

A folder has its name only once all is written. Any number of processes reads it, each its own rows.
"""

import json
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from openv41.io.atomic import sync_folder, write_atomic
from openv41.train.checkpoint_folder import ABOUT, FOLDER_SUFFIX, parameter_of, summary_of
from openv41.train.optimizer import Optimizers
from openv41.train.placement import Placed, Placement
from openv41.train.processes import Processes

if TYPE_CHECKING:
    from concurrent.futures import Future

R = TypeVar("R")


class ShardedWriter:
    """Writes one checkpoint at a time, beside the training steps."""

    def __init__(self, processes: Processes) -> None:
        self.processes = processes
        self._group: Any = None  # apart from that of the steps, which go on meanwhile
        self._pending: tuple[Future[Any], Path, Mapping[str, Any]] | None = None

    def begin(
        self,
        path: Path,
        tensors: Mapping[str, Tensor],
        placement: Placement,
        about: Mapping[str, Any],
    ) -> None:
        """Copy the values of ``state_tensors`` and start to write; all processes must call it."""
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        half = path.with_name(f".{path.name}.tmp")
        self._together(lambda: self._clear(half))
        parts = as_distributed(tensors, placement)
        future: Any = async_save(parts, checkpoint_id=half, process_group=self._group)
        self._pending = future, path.with_suffix(FOLDER_SUFFIX), about

    def _clear(self, half: Path) -> None:
        if self.processes.is_first and half.exists():  # of a run that was killed
            shutil.rmtree(half)

    def is_written(self) -> bool:
        """Whether every process has written its part."""
        if self._pending is None:
            return False
        return not self.processes.any(not self._pending[0].done())

    def finish(self) -> bool:
        """Wait until all is written, and give the folder its name; False if there was nothing.

        Raises OSError in every process if one could not write.
        """
        if self._pending is None:
            return False
        future, path, about = self._pending
        self._pending = None
        try:
            future.result()
        except CheckpointException as error:
            causes = [failure[0] for failure in error.failures.values()]
            raise OSError("; ".join(dict.fromkeys(map(str, causes)))) from None
        summaries = self._together(lambda: self._summaries(path))
        self._together(lambda: self._name(path, about, summaries))
        return True

    def _summaries(self, path: Path) -> dict[str, list[int]]:
        """Size and checksum of the files that this process has written."""
        half = path.with_name(f".{path.stem}.tmp")
        own = [*half.glob(f"__{self.processes.rank}_*")]
        own += [half / ".metadata"] if self.processes.is_first else []
        return {file.name: summary_of(file) for file in own}

    def _name(
        self, path: Path, about: Mapping[str, Any], summaries: list[dict[str, list[int]]]
    ) -> None:
        """Give the folder its name, with a description."""
        if not self.processes.is_first:
            return
        half = path.with_name(f".{path.stem}.tmp")
        files = {name: summary for own in summaries for name, summary in own.items()}
        write_atomic(half / ABOUT, json.dumps({**about, "files": files}).encode())
        if path.exists():  # and could not be read
            shutil.rmtree(path)
        half.rename(path)
        sync_folder(path.parent)

    def _together(self, work: Callable[[], R]) -> list[R]:
        """Do the work in every process, and return what all found; none goes on before.

        Raises OSError in all of them if one of them could not.
        """
        found, problem = None, None
        try:
            found = work()
        except OSError as error:
            problem = str(error)
        gathered = self.processes.gather((found, problem))
        if problems := [text for _, text in gathered if text is not None]:
            raise OSError(problems[0])
        return [value for value, _ in gathered]


def as_distributed(tensors: Mapping[str, Tensor], placement: Placement) -> dict[str, Tensor]:
    """The values of ``state_tensors`` as parts of whole tensors."""
    placed = {p.name: p for p in placement.parameters}
    made = {}
    for key, value in tensors.items():
        of = placed.get(parameter_of(key))
        is_part = of is not None and value.shape == of.local.shape
        made[key] = placement.as_distributed(of, value) if of and is_part else value
    return made


def read_folder(path: Path, optimizer: Optimizers) -> dict[str, Tensor]:
    """Values for the rows of this process; all processes must call it."""
    placement = optimizer.placement
    placed = {p.name: p for p in placement.parameters}
    metadata = FileSystemReader(path).read_metadata().state_dict_metadata
    tensors = {
        key: _room(about, placed.get(parameter_of(key)))
        for key, about in metadata.items()
        if isinstance(about, TensorStorageMetadata)
    }
    is_alone = placement.processes.size == 1
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # alone, on purpose
        load(as_distributed(tensors, placement), checkpoint_id=path, no_dist=is_alone)
    return tensors


def _room(about: TensorStorageMetadata, placed: Placed | None) -> Tensor:
    """An empty tensor for the rows of this process."""
    is_part = placed is not None and about.size == placed.shape
    shape = placed.local.shape if placed is not None and is_part else about.size
    device = placed.local.device if placed is not None and is_part else "cpu"
    return torch.zeros(shape, dtype=about.properties.dtype, device=device)
