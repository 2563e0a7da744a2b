"""Special tokens of the prompt format, spelled as in the released tokenizer; pieces of text."""

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from openv41.errors import PromptError

BOS = "<\uff5cbegin\u2581of\u2581sentence\uff5c>"  # full-width bars, low-line blocks
EOS = "<\uff5cend\u2581of\u2581sentence\uff5c>"
SYSTEM = "<\uff5cSystem\uff5c>"
USER = "<\uff5cUser\uff5c>"
ASSISTANT = "<\uff5cAssistant\uff5c>"
LATEST_REMINDER = "<\uff5clatest_reminder\uff5c>"
THINK, THINK_END = "<think>", "</think>"
DSML = "\uff5cDSML\uff5c"
IMAGE = "<\uff5cdeepseek_image\uff5c>"
TASKS = ("action", "query", "authority", "domain", "title", "read_url")

# Tokens that give an answer its structure. While parsing, each is one surrogate code point: no
# valid text holds one, so text that merely spells a marker is never taken for it.
MARKERS = (BOS, EOS, THINK, THINK_END, DSML)
_SEALS = {marker: chr(0xDC00 + number) for number, marker in enumerate(MARKERS)}
_UNSEAL = {ord(seal): marker for marker, seal in _SEALS.items()}
_SPELLED = re.compile("|".join(map(re.escape, MARKERS)))

SEALED_BOS, SEALED_EOS, SEALED_THINK, SEALED_THINK_END, SEALED_DSML = _SEALS.values()
SEALED = re.compile(f"[{''.join(_SEALS.values())}]")


class Piece(NamedTuple):
    """A stretch of plain text, or the spelling of one special token."""

    text: str
    is_special: bool


def task_token(task: str) -> str:
    """Special token of a quick task."""
    return f"<\uff5c{task}\uff5c>"


def split_markers(text: str) -> Iterator[Piece]:
    """Cut a text at every marker that it spells."""
    start = 0
    for found in _SPELLED.finditer(text):
        if found.start() > start:
            yield Piece(text[start : found.start()], False)
        yield Piece(found[0], True)
        start = found.end()
    if start < len(text):
        yield Piece(text[start:], False)


def partial_marker(text: str) -> int:
    """Length of the longest end of ``text`` that begins a marker and is no whole one."""
    for length in range(min(len(text), max(map(len, MARKERS)) - 1), 0, -1):
        end = text[-length:]
        if any(marker.startswith(end) for marker in MARKERS):
            return length
    return 0


def seal(pieces: Iterable[tuple[str, bool]]) -> str:
    """Join pieces; markers become single code points, other special tokens stay as spelled."""
    out = []
    for text, is_special in pieces:
        check_unicode(text, "text")
        out.append(_SEALS.get(text, text) if is_special else text)
    return "".join(out)


def unseal(text: str) -> str:
    """Write markers as spelled again."""
    return text.translate(_UNSEAL)


def check_unicode(text: str, where: str) -> None:
    """Refuse lone surrogates, which no tokenizer can take."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"{where} is not valid Unicode: {text[error.start]!a} at character {error.start}; "
            "remove lone surrogates"
        ) from None
