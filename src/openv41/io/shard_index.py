"""The files of one checkpoint folder and the index that says which tensor stands where."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from openv41.errors import CheckpointError
from openv41.io.shards import Entry, MappedRows, ShardReader, problem_list
from openv41.io.tensor_names import TensorSpec

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


class ShardSet:
    """All tensors of a folder, each in exactly the file that the index names.

    Raises CheckpointError with every absent, damaged or contradicting file in one message.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        weight_map = _read_index(folder)
        self._readers: dict[str, ShardReader] = {}
        problems = []
        names = sorted(set(weight_map.values())) if weight_map is not None else [SINGLE_FILE]
        for name in names:
            if not (folder / name).is_file():
                problems.append(f"{name}: the index names this file, it does not exist")
                continue
            try:
                self._readers[name] = ShardReader(folder / name)
            except CheckpointError as error:
                problems.append(str(error).removeprefix(f"{folder}/"))
        if weight_map is not None:
            problems += _contradictions(weight_map, self._readers)
        if problems:
            raise problem_list(folder, problems)
        if weight_map is None:
            weight_map = dict.fromkeys(self._readers[SINGLE_FILE].entries, SINGLE_FILE)
        self.file_of = weight_map

    def __getitem__(self, name: str) -> Entry:
        return self._readers[self.file_of[name]].entries[name]

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Read rows of a tensor, bytes as they are."""
        return self._readers[self.file_of[name]].read_rows(name, start, stop)

    def map_rows(self, name: str) -> MappedRows:
        """Map a tensor that stays in its file."""
        return MappedRows(self.folder / self.file_of[name], name, self[name])

    def check(self, table: Sequence[TensorSpec]) -> None:
        """Compare names, dtypes and shapes with what the model needs, all in one error."""
        problems = []
        wanted = {spec.released: spec for spec in table}
        for name, spec in wanted.items():
            if name not in self.file_of:
                problems.append(f"{name}: missing; must be {spec.dtype} {list(spec.shape)}")
                continue
            entry, file = self[name], self.file_of[name]
            if entry.dtype != spec.dtype:
                problems.append(f"{file}: {name}: dtype {entry.dtype}, must be {spec.dtype}")
            if entry.shape != spec.shape:
                problems.append(
                    f"{file}: {name}: shape {list(entry.shape)}, must be {list(spec.shape)}"
                )
        extra = [name for name in self.file_of if name not in wanted]
        problems += [
            f"{self.file_of[name]}: {name}: the model has no such tensor" for name in extra
        ]
        if problems:
            raise problem_list(self.folder, problems)


def write_index(folder: Path, file_of: Mapping[str, str], total_size: int) -> None:
    """Write the index file; the caller makes the folder appear atomically."""
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(file_of.items()))}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def _read_index(folder: Path) -> dict[str, str] | None:
    """The weight map, or None for a checkpoint of one file."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: there is no such folder")
    path = folder / INDEX_FILE
    if not path.exists():
        if (folder / SINGLE_FILE).is_file():
            return None
        raise CheckpointError(_no_checkpoint(folder))
    try:
        index = json.loads(path.read_bytes())
        weight_map, metadata = index["weight_map"], index.get("metadata", {})
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}: bad index: {type(error).__name__}: {error}") from None
    if not isinstance(metadata, dict):
        kind = type(metadata).__name__
        raise CheckpointError(f"{path}: bad index: metadata is a {kind}, must be an object")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: bad index: weight_map must name at least one tensor")
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or not file:
            raise CheckpointError(
                f"{path}: {tensor}: bad index: {file!r} is no file name in this folder"
            )
    return weight_map


def _no_checkpoint(folder: Path) -> str:
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in {".bin", ".pt", ".pth"})
    if pickles:
        return (
            f"{folder}: holds only pickle files ({', '.join(pickles)}), which can run code when "
            "read; only safetensors files are read, convert them first"
        )
    return f"{folder}: no checkpoint: neither {INDEX_FILE} nor {SINGLE_FILE} is there"


def _contradictions(weight_map: Mapping[str, str], readers: Mapping[str, ShardReader]) -> list[str]:
    """Tensors that are not exactly where the index says."""
    problems = [
        f"{file}: {tensor}: the index says it is in this file, it is not"
        for tensor, file in weight_map.items()
        if file in readers and tensor not in readers[file].entries
    ]
    for file, reader in readers.items():
        for tensor in reader.entries:
            if tensor not in weight_map:
                problems.append(f"{file}: {tensor}: not in the index")
            elif weight_map[tensor] != file:
                problems.append(
                    f"{file}: {tensor}: in two files, or the index is wrong: it names "
                    f"{weight_map[tensor]}"
                )
    return problems
