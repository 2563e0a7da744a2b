"""What the server needs of an engine and of its model."""

import functools
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from openv41.config import VisionConfig
from openv41.engine.engine import Engine
from openv41.engine.grammar import GrammarCompiler
from openv41.engine.prompt_format import missing_tokens
from openv41.engine.request import Event, Request
from openv41.io.tokenizer import TextTokenizer

logger = logging.getLogger(__name__)


@runtime_checkable  # the tests check annotations
class Backend(Protocol):
    """An engine that answers many requests at once, as AsyncEngine does."""

    async def start(self) -> None:
        """Get ready to take requests."""

    async def stop(self, *, drain: bool = True) -> None:
        """End; requests still running are finished or cancelled."""

    @property
    def is_running(self) -> bool:
        """Whether requests are taken."""

    def stream(self, request: Request) -> AsyncIterator[Event]:
        """Events of one request; closing the iterator cancels the request."""


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """What the server has to know of the model behind the engine."""

    name: str
    tokenizer: TextTokenizer
    bos_id: int
    eos_id: int
    max_length: int  # tokens of prompt and answer together
    created: int  # seconds since 1970
    num_tokens: int  # ids that can be drawn
    vision: VisionConfig | None
    image_token_id: int
    grammars: GrammarCompiler = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Make the compiler of constraints here: several threads use it."""
        compiler = GrammarCompiler(self.tokenizer, self.num_tokens, self.eos_id)
        object.__setattr__(self, "grammars", compiler)

    @classmethod
    def of(cls, engine: Engine, name: str) -> "ServedModel":
        """Describe what an engine runs."""
        config, cache = engine.model.config, engine.config.cache
        return cls(
            name=name,
            tokenizer=engine.tokenizer,
            bos_id=config.bos_token_id,
            eos_id=config.eos_token_id,
            max_length=min(config.max_position, cache.num_pages * cache.page_size),
            created=int(time.time()),
            num_tokens=engine.num_tokens,
            vision=config.vision,
            image_token_id=config.image_token_id,
        )

    @functools.cached_property
    def has_format(self) -> bool:
        """Whether chats are rendered in the prompt format, else as plain transcripts."""
        missing = missing_tokens(self.tokenizer)
        if missing:
            logger.warning(
                "chats are rendered as plain transcripts, without reasoning, tools and images: "
                "the tokenizer lacks the special tokens %s",
                ", ".join(f"{text!a}" for text in missing),
            )
        return not missing

    def token_bytes(self, token: int) -> bytes:
        """Bytes of a token; none for an id that the vocabulary leaves out."""
        return self.tokenizer.token_bytes(token) if self.is_token(token) else b""

    def is_token(self, token: int) -> bool:
        """Whether an id stands for something."""
        known = 0 <= token < self.tokenizer.vocab_size
        return known and self.tokenizer.backend.id_to_token(token) is not None
