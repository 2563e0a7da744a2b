"""Image-text samples: pairs, interleaved documents and conversations, from JSONL or parquet.

A record has one of three forms; an image is a file (its path relative to the record's file) or
``{"bytes": ...}``, in JSONL as base64:

    {"image": ..., "text": "..."}                                      an image and its text
    {"parts": [{"image": ...}, {"text": "...", "loss": false}, ...]}   an interleaved document
    {"messages": [{"role": "user", "content": [...]}, ...]}            a conversation

In a document every text is trained on unless its ``loss`` is false; in a conversation the last
answer is. Contents of messages are texts or lists of such parts.
"""

import base64
import binascii
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openv41.errors import DataError

FORMS = ("image", "parts", "messages")


@dataclass(frozen=True)
class TextPart:
    """A text, and whether the model shall learn to write it."""

    text: str
    trains: bool = True


@dataclass(frozen=True)
class ImagePart:
    """An encoded image and the name that errors give it."""

    data: bytes
    name: str


Part = TextPart | ImagePart


@dataclass(frozen=True)
class Turn:
    """A message of a conversation."""

    role: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Sample:
    """One document, or one conversation."""

    where: str
    parts: tuple[Part, ...] = ()
    turns: tuple[Turn, ...] = ()


def read_samples(file: Path) -> Iterator[Sample]:
    """Yield the samples of a ``.jsonl`` or ``.parquet`` file, one at a time.

    Raises DataError for a record that cannot be used; it names the record.
    """
    records = {".jsonl": _read_jsonl, ".parquet": _read_parquet}
    if file.suffix not in records:
        raise DataError(f"{file}: image-text samples come as {' or '.join(records)}")
    for where, record in records[file.suffix](file):
        yield _sample(record, where, file.parent)


def _read_jsonl(file: Path) -> Iterator[tuple[str, object]]:
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                where = f"{file}:{number}"
                if line.strip():
                    try:
                        yield where, json.loads(line)
                    except ValueError as error:
                        raise DataError(f"{where}: no valid JSON: {error}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: not UTF-8 text: {error}") from None
    except OSError as error:
        raise DataError(f"{file}: cannot read the samples: {error.strerror}") from None


def _read_parquet(file: Path) -> Iterator[tuple[str, object]]:
    try:
        from datasets import load_dataset  # type: ignore[import-untyped]  # noqa: PLC0415 -- extra
    except ImportError:
        raise DataError(
            f"{file}: parquet needs the 'datasets' package; pip install 'openv41[data]', or give "
            "the samples as JSONL"
        ) from None
    try:
        rows = load_dataset("parquet", data_files=str(file), split="train", streaming=True)
        for number, row in enumerate(rows):
            filled = {key: value for key, value in dict(row).items() if value is not None}
            yield f"{file}:{number}", filled
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: cannot read the parquet file: {error}") from None


def _sample(record: object, where: str, folder: Path) -> Sample:
    if not isinstance(record, Mapping) or sum(form in record for form in FORMS) != 1:
        found = sorted(record) if isinstance(record, Mapping) else type(record).__name__
        raise DataError(
            f"{where}: a sample holds one of 'image' (with 'text'), 'parts' or 'messages'; "
            f"found {found}"
        )
    if "messages" in record:
        turns = record["messages"]
        if not isinstance(turns, Sequence) or isinstance(turns, str):
            raise DataError(f"{where}: 'messages' must be a list of messages")
        return Sample(where, turns=tuple(_turn(turn, where, folder) for turn in turns))
    if "image" in record:
        pair = [{"image": record["image"]}, {"text": record.get("text")}]
        return Sample(where, parts=_parts(pair, where, folder))
    return Sample(where, parts=_parts(record["parts"], where, folder))


def _turn(turn: object, where: str, folder: Path) -> Turn:
    if not isinstance(turn, Mapping) or not isinstance(turn.get("role"), str):
        raise DataError(f"{where}: a message needs a 'role' and a 'content'")
    content = turn.get("content")
    if isinstance(content, str):
        content = [{"text": content}]
    return Turn(turn["role"], _parts(content, where, folder))


def _parts(parts: object, where: str, folder: Path) -> tuple[Part, ...]:
    if not isinstance(parts, Sequence) or isinstance(parts, str) or not parts:
        raise DataError(f"{where}: parts must be a list that holds at least one text or image")
    return tuple(_part(part, where, folder) for part in parts)


def _part(part: object, where: str, folder: Path) -> Part:
    filled: dict[str, Any] = {}
    if isinstance(part, Mapping):  # parquet fills absent fields with None
        filled = {key: value for key, value in part.items() if value is not None}
    if unknown := filled.keys() - {"text", "image", "loss", "type"}:
        raise DataError(f"{where}: a part has no field {sorted(unknown)[0]!r}")
    if isinstance(text := filled.get("text"), str) and "image" not in filled:
        trains = filled.get("loss", True)
        if not isinstance(trains, bool):
            raise DataError(f"{where}: 'loss' is {trains!r}, must be true or false")
        return TextPart(text, trains)
    if "image" in filled and "text" not in filled:
        return _image(filled["image"], where, folder)
    raise DataError(f"{where}: a part holds a 'text' or an 'image', found {sorted(filled)}")


def _image(image: object, where: str, folder: Path) -> ImagePart:
    if isinstance(image, str):
        path = folder / image
        try:
            return ImagePart(path.read_bytes(), str(path))
        except OSError as error:
            raise DataError(f"{where}: cannot read {path}: {error.strerror}") from None
    data = image.get("bytes") if isinstance(image, Mapping) else None
    if isinstance(data, bytes):
        return ImagePart(data, f"the image of {where}")
    if isinstance(data, str):
        try:
            return ImagePart(base64.b64decode(data, validate=True), f"the image of {where}")
        except binascii.Error as error:
            raise DataError(f"{where}: the image is no base64: {error}") from None
    if isinstance(image, Mapping) and isinstance(image.get("path"), str):
        return _image(image["path"], where, folder)
    raise DataError(f"{where}: an image is a path or {{'bytes': ...}}, found {image!r:.60}")
