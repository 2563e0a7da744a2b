"""Samples to train on: conversations, documents, images with texts; from JSONL or parquet.

A record has one of three forms; an image is a file (its path relative to the record's file) or
``{"bytes": ...}``, in JSONL as base64:

    {"messages": [{"role": "user", "content": "..."}, ...]}            a conversation
    {"parts": [{"image": ...}, {"text": "...", "loss": false}, ...]}   an interleaved document
    {"image": ..., "text": "..."}                                      an image and its text

Messages are those of a chat request, with reasoning, tool calls and results; a content is a text or
a list of parts. Beside them may stand the request's ``tools``, ``thinking``, ``reasoning_effort``,
``drop_thinking`` and ``response_format``; without the second and third the model thinks if a
message has ``reasoning_content``.

A text of a document may have its token ``ids`` beside it, which are then taken as they are, such as
those that a model drew; the record names their ``tokenizer`` by its sha256.

In a document every text is learned unless its ``loss`` is false; in a conversation the last answer,
and every one whose ``loss`` is true. The ``weight`` of a text or message, times that of its record,
is how much each of its tokens counts in the loss; a message that has one is learned.
"""

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from openv41.errors import DataError, PromptError
from openv41.prompt import Conversation, from_request

MOST = 1e30  # of a weight: float32 holds it, and its sums
FORMS = ("image", "parts", "messages")
SETTINGS = ("tools", "thinking", "reasoning_effort", "drop_thinking", "response_format")
FIELDS = (
    *("role", "content", "loss", "weight", "reasoning_content", "tool_calls", "tool_call_id"),
    *("tools", "task", "wo_eos", "prefix"),
)


@dataclass(frozen=True)
class TextPart:
    """A text, and how much each of its tokens counts in the loss; perhaps these tokens too."""

    text: str
    weight: float = 1.0
    ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class ImagePart:
    """An encoded image and the name that errors give it."""

    data: bytes
    name: str


Part = TextPart | ImagePart


@dataclass(frozen=True)
class Sample:
    """One document, or one conversation with a weight for each of its messages.

    Images in the conversation have an ``ImagePart`` as their source.
    """

    where: str
    parts: tuple[Part, ...] = ()
    conversation: Conversation | None = None
    weights: tuple[float, ...] = ()
    tokenizer: str | None = None  # sha256 of that of the parts' ids


def read_samples(file: Path) -> Iterator[Sample]:
    """Yield the samples of a ``.jsonl`` or ``.parquet`` file, one at a time.

    Raises DataError for a record that cannot be used; it names the record.
    """
    records = {".jsonl": _read_jsonl, ".parquet": _read_parquet}
    if file.suffix not in records:
        raise DataError(f"{file}: samples come as {' or '.join(records)}")
    for where, record in records[file.suffix](file):
        yield _sample(record, where, file.parent)


def _read_jsonl(file: Path) -> Iterator[tuple[str, object]]:
    try:
        with file.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                where = f"{file}:{number}"
                if line.strip():
                    try:
                        yield where, json.loads(line)
                    except (ValueError, RecursionError) as error:
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
    _check_names(record, where)
    weight = _weight({"weight": record.get("weight")}, where)
    if "messages" in record:
        return _conversation(record, weight, where, folder)
    parts = record.get("parts")
    if "image" in record:
        parts = [{"image": record["image"]}, {"text": record.get("text")}]
    read, tokenizer = _parts(parts, where, folder, weight), record.get("tokenizer")
    has_ids = any(isinstance(part, TextPart) and part.ids is not None for part in read)
    if has_ids and not isinstance(tokenizer, str):
        raise DataError(f"{where}: 'ids' need their 'tokenizer' in the record, by its sha256")
    return Sample(where, parts=read, tokenizer=tokenizer if has_ids else None)


def _check_names(record: Mapping[str, Any], where: str) -> None:
    """Refuse what looks like a field of a sample and is none; other fields are not ours."""
    known = (*FORMS, *SETTINGS, "text", "weight", "tokenizer")
    for name in record:
        like = get_close_matches(name, known, n=1, cutoff=0.8)
        if name not in known and (like or name == "loss"):
            raise DataError(
                f"{where}: a sample has no field {name!r}; it may have {', '.join(known)}"
            )


def _conversation(record: Mapping[str, Any], weight: float, where: str, folder: Path) -> Sample:
    turns = record["messages"]
    if not isinstance(turns, Sequence) or isinstance(turns, str):
        raise DataError(f"{where}: 'messages' must be a list of messages")
    turns = [_filled(turn, FIELDS, "message", where) for turn in turns]
    weights = tuple(
        _times(weight, _answer_weight(turn, where, is_last=place == len(turns) - 1), where)
        for place, turn in enumerate(turns)
    )
    request = {name: record[name] for name in SETTINGS if record.get(name) is not None}
    thinks = any(turn.get("reasoning_content") for turn in turns)
    if not thinks and "thinking" not in request and "reasoning_effort" not in request:
        request["thinking"] = {"type": "disabled"}
    request["messages"] = [_entry(turn, where, folder) for turn in turns]
    try:
        return Sample(where, conversation=from_request(request), weights=weights)
    except PromptError as error:
        raise DataError(f"{where}: {error}") from None


def _entry(turn: Mapping[str, Any], where: str, folder: Path) -> dict[str, Any]:
    """A message of a chat request."""
    if not isinstance(turn.get("role"), str) or not ("content" in turn or "tool_calls" in turn):
        raise DataError(f"{where}: a message needs a 'role' and a 'content'")
    entry = {name: value for name, value in turn.items() if name not in ("loss", "weight")}
    if isinstance(content := turn.get("content", ""), str):
        return entry
    blocks: list[dict[str, object]] = []
    for part in _parts(content, where, folder):
        if isinstance(part, ImagePart):
            blocks.append({"type": "image", "image": part})
        elif part.weight != 1:
            raise DataError(f"{where}: 'loss' and 'weight' belong to the message, not to its parts")
        elif part.ids is not None:
            raise DataError(f"{where}: 'ids' stand in documents, not in messages")
        else:
            blocks.append({"type": "text", "text": part.text})
    return entry | {"content": blocks}


def _answer_weight(turn: Mapping[str, Any], where: str, *, is_last: bool) -> float:
    is_answer = turn.get("role") == "assistant"
    weight = _weight(turn, where, learned=is_answer and is_last)
    if weight and not is_answer:
        raise DataError(f"{where}: only messages of the assistant can be learned")
    return weight


def _weight(source: Mapping[str, Any], where: str, *, learned: bool = True) -> float:
    """Weight of the tokens; ``learned`` is what holds where the source says nothing."""
    loss, weight = source.get("loss"), source.get("weight")
    if not (loss is None or isinstance(loss, bool)):
        raise DataError(f"{where}: 'loss' is {loss!r}, must be true or false")
    if weight is not None:
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not is_number or not 0 <= weight <= MOST:
            raise DataError(
                f"{where}: 'weight' is {weight!r:.40}, must be a number from 0 to {MOST:.1e}"
            )
    if loss is None:
        loss = learned or weight is not None
    return float(1 if weight is None else weight) if loss else 0.0


def _times(weight: float, own: float, where: str) -> float:
    if weight * own > MOST:
        raise DataError(f"{where}: a weight of {weight * own:.0e}, must be at most {MOST:.1e}")
    return weight * own


def _filled(value: object, fields: Sequence[str], what: str, where: str) -> dict[str, Any]:
    """The fields that say something: parquet fills absent ones with None."""
    if not isinstance(value, Mapping):
        raise DataError(f"{where}: a {what} is an object, found {type(value).__name__}")
    filled = {key: field for key, field in value.items() if field is not None}
    if unknown := sorted(filled.keys() - set(fields)):
        raise DataError(
            f"{where}: a {what} has no field {unknown[0]!r}; it may have {', '.join(fields)}"
        )
    return filled


def _parts(parts: object, where: str, folder: Path, weight: float = 1.0) -> tuple[Part, ...]:
    if not isinstance(parts, Sequence) or isinstance(parts, str) or not parts:
        raise DataError(f"{where}: parts must be a list that holds at least one text or image")
    return tuple(_part(part, where, folder, weight) for part in parts)


def _part(part: object, where: str, folder: Path, weight: float) -> Part:
    filled = _filled(part, ("text", "ids", "image", "loss", "weight", "type"), "part", where)
    if isinstance(text := filled.get("text"), str) and "image" not in filled:
        own = _times(weight, _weight(filled, where), where)
        return TextPart(text, own, _ids(filled.get("ids"), where))
    if "image" in filled and "text" not in filled:
        return _image(filled["image"], where, folder)
    raise DataError(f"{where}: a part holds a 'text' or an 'image', found {sorted(filled)}")


def _ids(ids: object, where: str) -> tuple[int, ...] | None:
    if ids is None:
        return None
    if isinstance(ids, Sequence) and all(type(token) is int and token >= 0 for token in ids):
        return tuple(ids)
    raise DataError(f"{where}: 'ids' must be a list of token ids, whole numbers from 0")


def _image(image: object, where: str, folder: Path) -> ImagePart:
    if isinstance(image, str) and image:
        path = folder / image
        try:
            return ImagePart(path.read_bytes(), str(path))
        except (OSError, ValueError) as error:
            raise DataError(f"{where}: cannot read the image {image!r:.60}: {error}") from None
    data = image.get("bytes") if isinstance(image, Mapping) else None
    if isinstance(data, bytes):
        return ImagePart(data, f"the image of {where}")
    if isinstance(data, str):
        try:
            return ImagePart(base64.b64decode(data, validate=True), f"the image of {where}")
        except ValueError as error:
            raise DataError(f"{where}: the image is no base64: {error}") from None
    if isinstance(image, Mapping) and isinstance(image.get("path"), str):
        return _image(image["path"], where, folder)
    raise DataError(f"{where}: an image is a path or {{'bytes': ...}}, found {image!r:.60}")
