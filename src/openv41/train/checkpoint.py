"""Checkpoints of a run: everything that the next step depends on.

Each is written whole or not at all; the newest two are kept. One process writes a safetensors file:
parameters as ``model.*``, the optimizers' buffers as ``optimizer.NAME.*``, the random state, and in
its metadata the next step, a description of the run, and a checksum of it all. Several processes
write a folder, see train/sharded_checkpoint.py; any number of processes reads both. The place in
the data follows from the step.
"""

import json
import logging
import shutil
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from openv41.errors import CheckpointError
from openv41.io.atomic import atomic_path
from openv41.train.checkpoint_folder import FOLDER_SUFFIX, check_folder, parameter_of
from openv41.train.optimizer import Optimizers
from openv41.train.placement import Placed
from openv41.train.processes import ALONE, Processes

if TYPE_CHECKING:
    from openv41.train.sharded_checkpoint import ShardedWriter

FOLDER = "resume"
KEPT = 2
SUFFIX = ".safetensors"
FORMAT = "openv41-training-state-4"
UNREADABLE = (OSError, SafetensorError, KeyError, TypeError, ValueError)
ENCODER = "vision.encoder."  # what its parameters begin with in every model
METADATA_KEY = "state"  # one key, since the library writes several in any order


logger = logging.getLogger(__name__)
Description = Mapping[str, Any]  # nested: models, settings, data


@dataclass(frozen=True, slots=True)
class State:
    """A checkpoint: what it says, and where its values are."""

    step: int  # the next one
    description: Description
    path: Path


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, processes: Processes = ALONE) -> None:
        self.folder, self.processes = folder / FOLDER, processes
        self._writer: ShardedWriter | None = None
        if processes.size > 1:
            from openv41.train import sharded_checkpoint  # noqa: PLC0415 -- slow

            self._writer = sharded_checkpoint.ShardedWriter(processes)

    def save(self, optimizer: Optimizers, step: int, description: Description) -> None:
        """Write the state before ``step`` and remove all but the newest.

        Several processes write beside the steps that follow: see ``poll`` and ``finish``.
        """
        tensors = state_tensors(optimizer)
        about = {"format": FORMAT, "step": step, "run": description}
        path = self.folder / f"step-{step:09}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if self._writer is None:
                _write(path.with_suffix(SUFFIX), tensors, about)
                self._tidy()
            else:
                self.finish()
                self._writer.begin(path, tensors, optimizer.placement, about)
        except (OSError, SafetensorError) as error:
            raise _failed(path, error) from None

    def poll(self) -> None:
        """Let a checkpoint count that every process has written in the meantime."""
        if self._writer is not None and self._writer.is_written():
            self.finish()

    def finish(self) -> None:
        """Wait for the checkpoint that is being written."""
        if self._writer is None:
            return
        try:
            if self._writer.finish() and self.processes.is_first:
                self._tidy()
        except OSError as error:
            raise _failed(self.folder, error) from None

    def newest(self) -> State | None:
        """Newest readable state, or None where there is no checkpoint yet."""
        paths = _paths(self.folder)
        for path in reversed(paths):
            try:
                about = check_folder(path) if path.is_dir() else _check_file(path)
                if about["format"] != FORMAT:
                    raise ValueError(f"format {about['format']!r}")
                return State(about["step"], about["run"], path)
            except UNREADABLE as error:
                logger.warning("%s cannot be read (%s); trying the one before it", path, error)
        if paths:
            raise CheckpointError(
                f"{self.folder}: no checkpoint can be read; start the run again in a new folder"
            )
        return None

    def _tidy(self) -> None:
        """Remove what is old, and what a process that was killed left half-written."""
        for old in (*_paths(self.folder)[:-KEPT], *self.folder.glob(".step-*.tmp")):
            shutil.rmtree(old) if old.is_dir() else old.unlink()


@torch.no_grad()
def restore(state: State, optimizer: Optimizers) -> None:
    """Put a state into a model and optimizers that were made from the same description."""
    if state.path.is_dir():
        from openv41.train.sharded_checkpoint import read_folder  # noqa: PLC0415 -- slow

        tensors = read_folder(state.path, optimizer)
    else:
        placed = {p.name: p for p in optimizer.placement.parameters}
        tensors = {
            key: _own_rows(value, placed.get(parameter_of(key)))
            for key, value in load_file(state.path).items()
        }
    put(tensors, optimizer)


@torch.no_grad()
def put(tensors: Mapping[str, Tensor], optimizer: Optimizers) -> None:
    """Give a model and optimizers the values of ``state_tensors``, of this process's rows."""
    placed = {p.name: p.local for p in optimizer.placement.parameters}
    for name, parameter in placed.items():
        parameter.copy_(tensors[f"model.{name}"])
    trained = set(optimizer.parameters())
    for key, value in tensors.items():
        if key.startswith("optimizer."):
            name, _, buffer = key.removeprefix("optimizer.").rpartition(".")
            if placed[name] in trained:
                optimizer.state(placed[name])[buffer] = value.to(placed[name].device)
    torch.set_rng_state(tensors["rng"].cpu())


def state_tensors(optimizer: Optimizers) -> dict[str, Tensor]:
    """Everything that the next step depends on: parameters, buffers of optimizers, random state.

    Of tensors that processes share, the rows of this one.
    """
    placed = optimizer.placement.parameters
    tensors = {f"model.{p.name}": p.local.detach().contiguous() for p in placed}
    names = {p.local: p.name for p in placed}
    for parameter in optimizer.parameters():
        for key, value in optimizer.state(parameter).items():
            tensors[f"optimizer.{names[parameter]}.{key}"] = value.contiguous()
    return {**tensors, "rng": torch.get_rng_state()}


@torch.no_grad()
def put_encoder(tensors: Mapping[str, Tensor], optimizer: Optimizers) -> None:
    """Give another model the vision encoder of ``state_tensors``; its momenta stay behind."""
    for placed in optimizer.placement.parameters:
        if placed.name.startswith(ENCODER):
            placed.local.copy_(tensors[f"model.{placed.name}"])


def describe_differences(old: Description, new: Description) -> list[str]:
    """Say where two runs differ."""
    before, after = dict(_leaves(old)), dict(_leaves(new))
    return [
        f"{path}: the run has {before.get(path)!r}, now it is {after.get(path)!r}"
        for path in sorted({*before, *after})
        if before.get(path) != after.get(path)
    ]


def has_run(folder: Path) -> bool:
    """Whether a folder holds checkpoints of a run."""
    return bool(_paths(folder / FOLDER))


def _paths(folder: Path) -> list[Path]:
    """Checkpoints, oldest first."""
    found = (*folder.glob(f"step-*{SUFFIX}"), *folder.glob(f"step-*{FOLDER_SUFFIX}"))
    return sorted(found, key=lambda path: path.name)


def _write(path: Path, tensors: Mapping[str, Tensor], about: dict[str, Any]) -> None:
    about["checksum"] = _checksum(about, tensors)
    with atomic_path(path) as temporary:
        save_file(dict(tensors), temporary, {METADATA_KEY: json.dumps(about)})


def _check_file(path: Path) -> Mapping[str, Any]:
    """What a file says about itself; ValueError if its content is another."""
    with safe_open(path, "pt") as file:
        about: dict[str, Any] = json.loads(file.metadata()[METADATA_KEY])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 -- no dict
    if about.pop("checksum") != _checksum(about, tensors):
        raise ValueError("its checksum is another")
    return about


def _own_rows(value: Tensor, placed: Placed | None) -> Tensor:
    """Rows of this process, in memory of their own; a number such as a count of steps is no row."""
    if placed is None or not placed.is_split or value.shape != placed.shape:
        return value
    return placed.own_rows(value).clone()


def _failed(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{path}: cannot write the checkpoint: {error}; the one before it, if there is one, is "
        "still good: make room, then go on with --resume"
    )


def _checksum(about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> int:
    """Checksum of the description and of the tensors' names and bytes."""
    checksum = zlib.crc32(json.dumps(about).encode())
    for name in sorted(tensors):
        content = tensors[name].cpu().flatten().view(torch.uint8).numpy().data
        checksum = zlib.crc32(content, zlib.crc32(name.encode(), checksum))
    return checksum


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
