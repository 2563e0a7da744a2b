"""Safetensors files, read strictly and written in place.

Loading uses plain file reads, not memory maps: pages of a map count as memory of the process, and
a checkpoint must load within its own size. Only tensors that stay in their file are mapped. Writing
fixes the layout first and then takes rows of any tensor in any order, so that no more than a few
rows are ever held.
"""

import json
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from openv41.errors import CheckpointError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
PICKLE_MAGIC = (b"PK", b"\x80")
_LENGTH_BYTES = 8
_MAX_HEADER = 100_000_000
_MAX_LISTED = 100


def problem_list(where: Path, problems: list[str]) -> CheckpointError:
    """One error that names every problem of a checkpoint."""
    shown = problems[:_MAX_LISTED]
    if hidden := len(problems) - len(shown):
        shown.append(f"and {hidden} more")
    lines = "\n".join(f"  - {problem}" for problem in shown)
    return CheckpointError(f"{where}: {len(problems)} problem(s)\n{lines}")


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a tensor stands in its file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int  # from the start of the file

    @property
    def row_bytes(self) -> int:
        """Size of one step along the first dim."""
        return prod(self.shape[1:]) * DTYPES[self.dtype].itemsize

    @property
    def num_rows(self) -> int:
        """Length of the first dim; a scalar is one row."""
        return self.shape[0] if self.shape else 1

    @property
    def num_bytes(self) -> int:
        """Size of the whole tensor."""
        return self.num_rows * self.row_bytes


class ShardReader:
    """One safetensors file, its header checked to the last byte."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.entries = _read_header(path)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot read: {error.strerror}") from None

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Read rows ``start`` to ``stop`` of a tensor, bytes as they are."""
        entry = self.entries[name]
        raw = torch.empty((stop - start) * entry.row_bytes, dtype=torch.uint8)
        try:
            with self.path.open("rb") as file:
                file.seek(entry.offset + start * entry.row_bytes)
                count = file.readinto(raw.numpy().data)
        except OSError as error:
            raise CheckpointError(f"{self.path}: {name}: cannot read: {error.strerror}") from None
        if count != len(raw):
            raise CheckpointError(f"{self.path}: {name}: the file became shorter while it was read")
        shape = (stop - start, *entry.shape[1:]) if entry.shape else ()
        return raw.view(DTYPES[entry.dtype]).reshape(shape)


class MappedRows:
    """Rows of one tensor, read in any order from a memory map of its file.

    A file that was removed, replaced or changed since is an error: the bytes of a file that became
    shorter are gone, and touching them would end the process.
    """

    def __init__(self, path: Path, name: str, entry: Entry) -> None:
        self._path, self._name = path, name
        try:
            with path.open("rb") as file:
                self._identity = _identity(os.fstat(file.fileno()))
                if os.fstat(file.fileno()).st_size < entry.offset + entry.num_bytes:
                    raise self._changed()
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(f"{path}: {name}: cannot map: {error.strerror}") from None
        mapped.madvise(mmap.MADV_RANDOM)  # do not read 128 KiB around each row
        flat = np.frombuffer(mapped, np.uint8, entry.num_bytes, entry.offset)
        self._bytes = flat.reshape(entry.num_rows, entry.row_bytes)

    def take(self, rows: Int64[np.ndarray, " rows"]) -> UInt8[np.ndarray, "rows size"]:
        """Copy the bytes of these rows; other threads go on while pages come from the disk."""
        try:
            is_same = _identity(self._path.stat()) == self._identity
        except OSError:
            is_same = False
        if not is_same:
            raise self._changed()
        return self._bytes.take(rows, axis=0)

    def _changed(self) -> CheckpointError:
        return CheckpointError(
            f"{self._path}: {self._name}: the file was removed, replaced or changed while a model "
            "reads from it; put it back, or load the model again"
        )


class ShardWriter:
    """A safetensors file of a fixed layout whose rows may arrive in any order."""

    def __init__(self, path: Path, layout: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        self.path = path
        header, self.entries = _make_header(layout)
        self._missing = {name: entry.num_bytes for name, entry in self.entries.items()}
        self._file = path.open("wb")
        self._file.write(header)

    def write_rows(self, name: str, start: int, rows: Tensor) -> None:
        """Write rows of a tensor from row ``start`` on, each row once."""
        entry = self.entries[name]
        assert rows.dtype == DTYPES[entry.dtype], f"{name}: {rows.dtype}, not {entry.dtype}"
        assert rows.shape[1:] == entry.shape[1:], f"{name}: {tuple(rows.shape)}, not {entry.shape}"
        raw = rows.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        self._file.seek(entry.offset + start * entry.row_bytes)
        self._file.write(raw.numpy().data)
        self._missing[name] -= len(raw)

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Put the file on the disk; a complete one only."""
        with self._file:
            if error is None:
                lost = {name: count for name, count in self._missing.items() if count}
                assert not lost, f"{self.path}: bytes not written: {lost}"
                self._file.flush()
                os.fsync(self._file.fileno())


def _identity(stat: os.stat_result) -> tuple[int, ...]:
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def _make_header(
    layout: Mapping[str, tuple[str, tuple[int, ...]]],
) -> tuple[bytes, dict[str, Entry]]:
    """Lay tensors out by falling item size, so that each is aligned to its own items."""
    order = sorted(layout, key=lambda name: -DTYPES[layout[name][0]].itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        dtype, shape = layout[name]
        start, end = end, end + Entry(dtype, shape, 0).num_bytes
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    base = _LENGTH_BYTES + len(text)
    entries = {name: Entry(*layout[name], base + header[name]["data_offsets"][0]) for name in order}
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text, entries


def _read_header(path: Path) -> dict[str, Entry]:
    """Parse and check the header against the file's size."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(_LENGTH_BYTES)
        length = int.from_bytes(start, "little")
        if start.startswith(PICKLE_MAGIC) and length > _MAX_HEADER:
            raise CheckpointError(
                f"{path}: this is a pickle file, which can run code when read; only safetensors "
                "files are read, convert it first"
            )
        if len(start) < _LENGTH_BYTES or size < _LENGTH_BYTES + length:
            raise CheckpointError(
                f"{path}: truncated or no safetensors file: {size} bytes, its header alone needs "
                f"{_LENGTH_BYTES + length}"
            )
        if length > _MAX_HEADER:
            raise CheckpointError(
                f"{path}: bad header: {length} bytes long, at most {_MAX_HEADER} are allowed"
            )
        text = file.read(length)
    try:
        header = json.loads(text, object_pairs_hook=_unique)
    except ValueError as error:
        raise CheckpointError(f"{path}: bad header: {error}") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: bad header: not a JSON object")
    header.pop("__metadata__", None)
    base = _LENGTH_BYTES + length
    entries = {name: _entry(path, name, item, base) for name, item in header.items()}
    _check_layout(path, entries, base, size)
    return entries


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} stands in it twice")
    return found


def _entry(path: Path, name: str, item: Any, base: int) -> Entry:  # noqa: ANN401 -- parsed JSON
    """Check one tensor's header entry."""
    where = f"{path}: {name}: bad header entry"
    if not isinstance(item, dict) or set(item) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where}: needs dtype, shape and data_offsets, found {item!r}")
    dtype, shape, offsets = item["dtype"], item["shape"], item["data_offsets"]
    if dtype not in DTYPES:
        raise CheckpointError(f"{where}: unknown dtype {dtype!r}; known are {', '.join(DTYPES)}")
    if not _counts(shape) or not _counts(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{where}: shape {shape!r}, data_offsets {offsets!r}")
    entry = Entry(dtype, tuple(shape), base + offsets[0])
    if entry.num_bytes != offsets[1] - offsets[0]:
        raise CheckpointError(
            f"{where}: {dtype} {shape} takes {entry.num_bytes} bytes, data_offsets give "
            f"{offsets[1] - offsets[0]}"
        )
    return entry


def _counts(value: Any) -> bool:  # noqa: ANN401 -- parsed JSON
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def _check_layout(path: Path, entries: Mapping[str, Entry], end: int, size: int) -> None:
    """Tensors must fill the file without holes or overlaps."""
    for name, entry in sorted(
        entries.items(), key=lambda item: (item[1].offset, item[1].num_bytes)
    ):
        if entry.offset != end:
            raise CheckpointError(
                f"{path}: {name}: bad header entry: starts at byte {entry.offset}, the tensor "
                f"before it ends at {end}"
            )
        end += entry.num_bytes
    if end != size:
        reason = "truncated" if size < end else "it is followed by other data"
        raise CheckpointError(f"{path}: {reason}: {size} bytes, the header describes {end}")
