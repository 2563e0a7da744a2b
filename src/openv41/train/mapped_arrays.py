"""Arrays in files and the index that describes them: checked, and read through memory maps."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from openv41.errors import DataError

Array = np.ndarray[Any, np.dtype[Any]]
Described = TypeVar("Described")


def map_array(path: Path, dtype: str, num_bytes: int, sha256: str | None, remedy: str) -> Array:
    """Map a file that an index describes; its content is read and compared if a hash is given.

    Raises DataError, which ends with ``remedy``, for a file that is not the one described.
    """
    try:
        if (size := path.stat().st_size) != num_bytes:
            raise DataError(
                f"{path}: {size} bytes, the index says {num_bytes}; the file is truncated or was "
                f"replaced: {remedy}"
            )
        if sha256 is not None and _sha256(path) != sha256:
            raise DataError(
                f"{path}: the content does not have the hash of the index; the file is damaged or "
                f"was replaced: {remedy}"
            )
        if not num_bytes:  # an empty file cannot be mapped
            return np.empty(0, dtype)
        return np.memmap(path, dtype=dtype, mode="r")
    except OSError as error:
        raise DataError(f"{path}: cannot read the shard: {error.strerror}") from None


def read_index(
    path: Path,
    make: Callable[[dict[str, Any]], Described],
    *,
    format_: tuple[str, int],
    what: str,
    remedies: tuple[str, str],
) -> Described:
    """Read an index file: ``make`` builds it from the fields behind its format and version.

    Raises DataError, which ends with the first remedy where there is no file, with the second where
    the file is not such an index.
    """
    try:
        content = json.loads(path.read_bytes())
        found = content.pop("format"), content.pop("version")
        if found != format_:
            raise ValueError(f"format {found[0]!r} version {found[1]!r}")
        return make(content)
    except OSError as error:
        raise DataError(
            f"{path}: cannot read the index of the {what}: {error.strerror}; {remedies[0]}"
        ) from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path}: not an index of {what}: {error}; {remedies[1]}") from None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
