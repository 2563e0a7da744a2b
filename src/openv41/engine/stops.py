"""Text that grows token by token, up to a stop string."""

import codecs
from collections.abc import Sequence
from functools import lru_cache

from openv41.io.tokenizer import TextTokenizer


class TextStream:
    """Turns tokens into text and ends it before the first stop string.

    What is released never has to be taken back: the bytes of an unfinished character and text
    that may be the beginning of a stop string wait for what follows. Bytes that are no character
    become U+FFFD. The joined pieces do not depend on how the text is cut into tokens.

    The first stop string is the one whose last character comes first (of several, the longest),
    so that a token that completes one decides at once. ``matched`` is that stop string.
    """

    def __init__(self, tokenizer: TextTokenizer, stop: Sequence[str] = ()) -> None:
        assert all(stop), f"an empty stop string ends every text: {stop}"
        self.matched: str | None = None
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stops = [_StopString(text) for text in sorted(set(stop), key=len, reverse=True)]
        self._held = ""

    def push(self, token: int) -> str:
        """Take the next token; return the text that became final, nothing after a stop string."""
        return self._release(self._decoder.decode(self._tokenizer.token_bytes(token)))

    def finish(self) -> str:
        """End the text; return what was held back."""
        released = self._release(self._decoder.decode(b"", final=True))
        rest, self._held = self._held, ""
        return released + rest

    def _release(self, new: str) -> str:
        if self.matched is not None:
            return ""
        text = self._held + new
        for end, character in enumerate(new, start=len(self._held) + 1):
            for stop in self._stops:  # longest first
                if stop.advance(character):
                    self.matched, self._held = stop.text, ""
                    return text[: end - len(stop.text)]
        final = len(text) - max((stop.length for stop in self._stops), default=0)
        self._held = text[final:]
        return text[:final]


class _StopString:
    """How much of a stop string the text ends with, kept as the text grows.

    Knuth, Morris and Pratt's search: a few steps per character, however long the stop string.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.length = 0  # characters of the stop string at the end of the text
        self._borders = _borders(text)

    def advance(self, character: str) -> bool:
        """Append a character to the text; tell whether the text now ends with the stop string."""
        self.length = _grow(self.text, self._borders, self.length, character)
        return self.length == len(self.text)


@lru_cache(maxsize=64)  # the choices of a request have their stop strings in common
def _borders(text: str) -> Sequence[int]:
    """Of each beginning of a text, how much of it is also its end."""
    borders, length = [0], 0
    for character in text[1:]:
        length = _grow(text, borders, length, character)
        borders.append(length)
    return borders


def _grow(text: str, borders: Sequence[int], length: int, character: str) -> int:
    """How much of ``text`` there is at the end once a character follows ``length`` of it."""
    while length and text[length] != character:
        length = borders[length - 1]
    return length + (text[length] == character)
