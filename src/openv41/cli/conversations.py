"""Conversations in the terminal: in the prompt format, or as plain transcripts."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.markup import escape

from openv41.cli.ui import err, note, out
from openv41.engine.engine import Engine
from openv41.engine.prompt_format import AnswerReader, missing_tokens
from openv41.engine.request import FinishReason, Request
from openv41.engine.sampler import SamplingConfig
from openv41.errors import OpenV41Error
from openv41.io.image_processor import ProcessedImage, load_image, process_image
from openv41.io.prompt_ids import prompt_ids
from openv41.io.transcript import render_transcript
from openv41.prompt import (
    Conversation,
    Image,
    Message,
    ReasoningDelta,
    Section,
    TextDelta,
    collect,
    encode,
    join,
)
from openv41.prompt import Event as PromptEvent


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How answers are drawn, and whether and how much the model reasons."""

    sampling: SamplingConfig
    max_tokens: int
    system: str
    thinking: bool
    effort: int | str


def begin(engine: Engine, settings: Settings) -> "TerminalChat":
    """A conversation in the prompt format where the tokenizer has its special tokens."""
    if missing := missing_tokens(engine.tokenizer):
        note(f"the tokenizer lacks {missing[0]}, ...: this is a plain transcript")
        return Transcript(engine, settings)
    return Formatted(engine, settings)


class TerminalChat(ABC):
    """Turns of a user and a model."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine, self._settings = engine, settings
        self._tokens: list[int] = []
        self._cached = 0

    @abstractmethod
    def answer(self, text: str) -> None:
        """Write the answer to a message as it comes; Ctrl-C cuts it short."""

    @abstractmethod
    def show(self, file: Path) -> None:
        """Put an image before the next message."""

    def figures(self) -> str:
        """What the conversation takes, and what the prefix cache saved."""
        stats = self._engine.stats()
        return (
            f"{len(self._tokens)} tokens, {self._cached} of the last prompt's found in the cache; "
            f"{stats.pages_used} of {stats.pages_used + stats.pages_free} pages in use; "
            f"{stats.prefill_rows_skipped:,} of {stats.prefill_rows:,} prefill rows skipped"
        )

    def _run(self, request: Request, section: Section | None) -> list[PromptEvent]:
        """Write an answer and return what it says."""
        reader, told = AnswerReader(self._engine.tokenizer, section), []
        self._tokens = list(request.prompt)
        events = self._engine.stream(request)
        try:
            for event in events:
                said = reader.read(event)
                _write(said)
                told += said
                self._cached = event.cached_tokens or self._cached
                self._tokens += [] if event.token is None else [event.token]
                if event.finish_reason is FinishReason.ERROR:
                    raise OpenV41Error(f"the request failed: {event.error}")
        except KeyboardInterrupt:
            note("(cut short)")
        finally:
            events.close()
        out.out("")
        return told


class Transcript(TerminalChat):
    """Roles and texts, as the server's plain transcript has them."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        super().__init__(engine, settings)
        self._messages = [("system", settings.system)] if settings.system else []

    def answer(self, text: str) -> None:
        """Write the answer to a message as it comes."""
        config, messages = self._engine.model.config, [*self._messages, ("user", text)]
        prompt = render_transcript(
            messages,
            self._engine.tokenizer,
            bos_id=config.bos_token_id,
            eos_id=config.eos_token_id,
        )
        request = Request(
            prompt=prompt,
            max_tokens=self._settings.max_tokens,
            sampling=self._settings.sampling,
            stop=("\n\nUser:",),
        )
        said = join(self._run(request, None)).content
        self._messages = [*messages, ("assistant", said.removeprefix(" "))]  # it follows a colon

    def show(self, file: Path) -> None:
        """Refuse: a transcript has no place for images."""
        note(f"{file}: a plain transcript holds no images")


class Formatted(TerminalChat):
    """Messages in the prompt format; reasoning goes to stderr."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        super().__init__(engine, settings)
        self._messages = [Message("system", settings.system)] if settings.system else []
        self._shown: list[ProcessedImage] = []

    def show(self, file: Path) -> None:
        """Put an image before the next message."""
        vision = self._engine.model.config.vision
        if vision is None:
            note(f"{file}: this model sees no images")
            return
        try:
            self._shown.append(process_image(load_image(file), vision))
        except OpenV41Error as error:
            note(str(error))

    def answer(self, text: str) -> None:
        """Write the answer to a message as it comes."""
        parts: list[str | Image] = [*map(Image, self._shown), text]
        self._shown = []
        messages = [*self._messages, Message("user", parts)]
        settings, config = self._settings, self._engine.model.config
        prompt = encode(Conversation(messages, thinking=settings.thinking, effort=settings.effort))
        images = [image.source for image in prompt.images]
        assert all(isinstance(image, ProcessedImage) for image in images), "an image was not read"
        seen = [image for image in images if isinstance(image, ProcessedImage)]
        ids = prompt_ids(prompt, self._engine.tokenizer, seen, image_token_id=config.image_token_id)
        request = Request(
            prompt=ids,
            images=tuple(seen),
            max_tokens=settings.max_tokens,
            sampling=settings.sampling,
        )
        self._messages = [*messages, collect(self._run(request, prompt.section))]


def _write(said: Sequence[PromptEvent]) -> None:
    for one in said:
        if isinstance(one, TextDelta):
            out.out(one.text, end="", highlight=False)
            out.file.flush()
        elif isinstance(one, ReasoningDelta):
            err.print(escape(one.text), end="", style="dim", soft_wrap=True)
