"""What a checkpoint of several processes says of itself. Report §2.5.

A folder holds the files of torch's DCP and ``about.json``: the next step, a description of the run,
and the size and checksum of every file.
"""

import json
import zlib
from pathlib import Path
from typing import Any

FOLDER_SUFFIX = ".dcp"
ABOUT = "about.json"
CHUNK = 1 << 24  # bytes that are checked at a time


def check_folder(path: Path) -> dict[str, Any]:
    """What a folder says about itself; ValueError for nonsense, or if a file is another."""
    about = json.loads((path / ABOUT).read_bytes())
    if not isinstance(about, dict) or not isinstance(about.get("files"), dict):
        raise ValueError(f"{ABOUT} does not list the files")
    for name, summary in about.pop("files").items():
        if summary_of(path / name) != summary:
            raise ValueError(f"the size or checksum of {name} is another")
    return about


def parameter_of(key: str) -> str:
    """Parameter that a value of ``state_tensors`` belongs to."""
    kind, _, rest = key.partition(".")
    return rest if kind == "model" else rest.rpartition(".")[0]


def summary_of(file: Path) -> list[int]:
    """Size and checksum of a file."""
    size = checksum = 0
    with file.open("rb") as stream:
        while chunk := stream.read(CHUNK):
            size, checksum = size + len(chunk), zlib.crc32(chunk, checksum)
    return [size, checksum]
