"""Files that appear whole or not at all."""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from openv41.errors import InputError


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Give a temporary name in the same folder; move it onto ``path`` when the block succeeds.

    The data is on the disk before the name changes. If the block fails, ``path`` stays as it was.
    """
    if path.is_dir():
        raise InputError(f"{path} is a folder; name a file")
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Put the names in ``folder`` on the disk (renames survive a power cut)."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomic(path: Path, data: bytes) -> None:
    """Write a whole file atomically."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Give a temporary sibling folder; it takes the place of ``path`` when the block succeeds.

    If the block fails or the process dies, ``path`` holds its old content or does not exist. An old
    folder that was set aside when the process died is put back by the next call.
    """
    path = path.absolute()
    partial, old = (path.with_name(f".{path.name}.{state}") for state in ("partial", "old"))
    path.parent.mkdir(parents=True, exist_ok=True)
    _settle(path, partial, old)
    partial.mkdir()
    try:
        yield partial
        sync_folder(partial)
        if path.exists():
            path.rename(old)
        partial.rename(path)
        sync_folder(path.parent)
    finally:
        _settle(path, partial, old)


def _settle(path: Path, partial: Path, old: Path) -> None:
    """Undo a half-made exchange and remove what is left of it."""
    if old.exists() and not path.exists():
        old.rename(path)
    for folder in (partial, old):
        if folder.exists():
            shutil.rmtree(folder)
