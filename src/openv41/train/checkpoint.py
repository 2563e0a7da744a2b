"""Checkpoints of a run: everything that the next step depends on, in one file each.

A file is written whole or not at all; the newest two are kept. It is a safetensors file: parameters
as ``model.*``, the optimizers' buffers as ``optimizer.NAME.*``, the random state, and in its
metadata the next step, a description of the run, and a checksum of it all. The place in the data
follows from the step.
"""

import json
import logging
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from openv41.errors import CheckpointError
from openv41.io.atomic import atomic_path
from openv41.model.causal_encoder_decoder import CausalEncoderDecoder
from openv41.train.optimizer import Optimizers

FOLDER = "resume"
KEPT = 2
FORMAT = "openv41-training-state-4"
METADATA_KEY = "state"  # one key, since the library writes several in any order

logger = logging.getLogger(__name__)
Description = Mapping[str, Any]  # nested: models, settings, data


@dataclass(frozen=True, slots=True)
class State:
    """What a checkpoint file holds."""

    step: int  # the next one
    description: Description
    tensors: Mapping[str, Tensor]


def save_state(
    folder: Path,
    model: CausalEncoderDecoder,
    optimizer: Optimizers,
    step: int,
    description: Description,
) -> Path:
    """Write the state before ``step`` and remove all but the newest files."""
    tensors = state_tensors(model, optimizer)
    about = {"format": FORMAT, "step": step, "run": description}
    about["checksum"] = _checksum(about, tensors)
    path = folder / FOLDER / f"step-{step:09}.safetensors"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as temporary:
            save_file(tensors, temporary, {METADATA_KEY: json.dumps(about)})
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path}: cannot write the checkpoint: {error}; the one before it is still good"
        ) from None
    half_written = path.parent.glob(".step-*.tmp")  # by a process that was killed
    for old in (*_files(folder)[:-KEPT], *half_written):
        old.unlink()
    return path


def load_newest(folder: Path) -> State | None:
    """Newest readable state, or None where there is no checkpoint yet."""
    files = _files(folder)
    for path in reversed(files):
        try:
            return _read(path)
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            logger.warning("%s cannot be read (%s); trying the one before it", path, error)
    if files:
        raise CheckpointError(
            f"{folder / FOLDER}: no checkpoint can be read; start the run again in a new folder"
        )
    return None


@torch.no_grad()
def restore(state: State, model: CausalEncoderDecoder, optimizer: Optimizers) -> None:
    """Put a state into a model and optimizer that were made from the same description."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, name in names.items():
        parameter.copy_(state.tensors[f"model.{name}"])
    for parameter in optimizer.parameters():
        prefix = f"optimizer.{names[parameter]}."
        for key, value in state.tensors.items():
            if key.startswith(prefix):
                buffer = value.to(parameter.device)
                optimizer.state(parameter)[key.removeprefix(prefix)] = buffer
    torch.set_rng_state(state.tensors["rng"])


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
    return bool(_files(folder))


def _files(folder: Path) -> list[Path]:
    return sorted((folder / FOLDER).glob("step-*.safetensors"))


def state_tensors(model: CausalEncoderDecoder, optimizer: Optimizers) -> dict[str, Tensor]:
    """Everything that the next step depends on: parameters, buffers of optimizers, random state."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    tensors = {f"model.{name}": p.detach().contiguous() for p, name in names.items()}
    for parameter in optimizer.parameters():
        for key, value in optimizer.state(parameter).items():
            tensors[f"optimizer.{names[parameter]}.{key}"] = value.contiguous()
    return {**tensors, "rng": torch.get_rng_state()}


def _read(path: Path) -> State:
    with safe_open(path, "pt") as file:
        about = json.loads(file.metadata()[METADATA_KEY])
        if about["format"] != FORMAT:
            raise ValueError(f"format {about['format']!r}")
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 -- no dict
    if about.pop("checksum") != _checksum(about, tensors):
        raise ValueError("its checksum is another")
    return State(about["step"], about["run"], tensors)


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
