"""What the server needs of an engine and of its model."""

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from openv41.engine.engine import Engine
from openv41.engine.request import Event, Request
from openv41.io.tokenizer import TextTokenizer


@runtime_checkable  # the tests check annotations
class Backend(Protocol):
    """An engine that answers many requests at once, as AsyncEngine does."""

    async def start(self) -> None:
        """Get ready to take requests."""

    async def stop(self, *, drain: bool = True) -> None:
        """End; requests still running are finished or cancelled."""

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
        )

    def token_bytes(self, token: int) -> bytes:
        """Bytes of a token; none for an id that the vocabulary leaves out."""
        return self.tokenizer.token_bytes(token) if self.is_token(token) else b""

    def is_token(self, token: int) -> bool:
        """Whether an id stands for something."""
        known = 0 <= token < self.tokenizer.vocab_size
        return known and self.tokenizer.backend.id_to_token(token) is not None
