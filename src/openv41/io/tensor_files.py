"""Small safetensors files: inputs, traces and the outputs that they are compared with."""

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from openv41.errors import InputError
from openv41.io.atomic import write_atomic


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a file."""
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"{path}: not a readable safetensors file ({error}); give one that trace wrote"
        ) from None


def read_metadata(path: Path) -> dict[str, str]:
    """The text that a file carries beside its tensors."""
    try:
        with safe_open(path, "pt") as file:
            return dict(file.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: not a readable safetensors file ({error})") from None


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a file whole or not at all."""
    ordered = {name: tensors[name].contiguous() for name in sorted(tensors)}
    try:
        write_atomic(path, save(ordered, dict(metadata)))
    except OSError as error:
        raise InputError(f"{path}: cannot write: {error.strerror}") from None
