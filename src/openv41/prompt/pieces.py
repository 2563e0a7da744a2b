"""A prompt as pieces: plain text and special tokens, never to be confused with each other."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from openv41.prompt.messages import Image
from openv41.prompt.tokens import IMAGE, Piece

Section = Literal["reasoning", "content", "calls"]


@runtime_checkable
class PromptTokenizer(Protocol):
    """What a tokenizer must do to turn a prompt into token ids."""

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text; special spellings inside it are plain text too."""
        ...

    def special_id(self, text: str) -> int:
        """Id of a special token, by its spelling."""
        ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """An encoded conversation.

    Args:
        pieces: Special tokens, and between them the plain text in one piece each.
        images: Images in the order of their placeholders; each is one special token here.
        section: Where the model's answer starts, which its parser must know; None where the
            prompt ends with a finished message, after which no answer can start.
    """

    pieces: tuple[Piece, ...]
    images: tuple[Image, ...]
    section: Section | None

    @property
    def text(self) -> str:
        """The whole prompt as text."""
        return "".join(piece.text for piece in self.pieces)

    @property
    def special_ranges(self) -> tuple[tuple[int, int], ...]:
        """Start and end of each special token in ``text``, in code points."""
        ranges, place = [], 0
        for text, is_special in self.pieces:
            if is_special:
                ranges.append((place, place + len(text)))
            place += len(text)
        return tuple(ranges)

    def token_ids(self, tokenizer: PromptTokenizer) -> list[int]:
        """Token ids, one per image: special tokens by their id, plain text as text."""
        ids: list[int] = []
        for text, is_special in self.pieces:
            ids += [tokenizer.special_id(text)] if is_special else tokenizer.encode(text)
        return ids


class PromptWriter:
    """Collects the pieces of a prompt; neighbouring plain texts become one."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.images: list[Image] = []
        self._plain: list[str] = []

    def text(self, text: str) -> None:
        """Add plain text."""
        if text:
            self._plain.append(text)

    def special(self, token: str) -> None:
        """Add one special token."""
        self._flush()
        self.pieces.append(Piece(token, True))

    def extend(self, pieces: Iterable[Piece]) -> None:
        """Add pieces."""
        for text, is_special in pieces:
            if is_special:
                self.special(text)
            else:
                self.text(text)

    def image(self, image: Image) -> None:
        """Add the placeholder of an image."""
        self.special(IMAGE)
        self.images.append(image)

    def finish(self, section: Section | None) -> Prompt:
        """Return the prompt."""
        self._flush()
        return Prompt(tuple(self.pieces), tuple(self.images), section)

    def _flush(self) -> None:
        if self._plain:
            self.pieces.append(Piece("".join(self._plain), False))
            self._plain.clear()
