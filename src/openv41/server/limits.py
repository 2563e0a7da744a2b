"""How much a client, and all clients together, may ask for."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, fields

from openv41.errors import ConfigError
from openv41.server.errors import ApiError


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Bounds of one request and of the server. Every refusal names the bound it met."""

    max_prompt_tokens: int | None = None  # None: what the model holds
    max_output_tokens: int | None = None
    max_choices: int = 128  # prompts times n of one HTTP request
    max_images: int = 64  # of one chat
    max_concurrency: int = 256  # sequences handed to the engine at once
    max_queue: int = 1024  # sequences that wait for that
    max_body_bytes: int = 16 << 20
    body_seconds: float = 30.0  # for the body to arrive
    request_seconds: float = 600.0  # for the whole answer
    drain_seconds: float = 30.0  # for running answers, once asked to stop

    def __post_init__(self) -> None:
        problems = []
        for field in fields(self):
            value = getattr(self, field.name)
            least = 1 if field.name.startswith("max_") and field.name != "max_queue" else 0
            if value is not None and not least <= value < float("inf"):
                problems.append(f"{field.name} is {value}, must be at least {least} and finite")
        if problems:
            raise ConfigError("limits of the server", problems)


class Gate:
    """Lets ``max_concurrency`` sequences through at once, first come first served."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._slots = asyncio.Semaphore(limits.max_concurrency)
        self._admitted = 0
        self.running = 0

    @property
    def waiting(self) -> int:
        """Sequences that were admitted and do not run."""
        return self._admitted - self.running

    @contextmanager
    def admit(self, count: int) -> Iterator[None]:
        """Hold ``count`` places in the queue, or refuse all of them."""
        room = self._limits.max_concurrency + self._limits.max_queue
        if count > room:
            raise ApiError(
                400,
                f"the request asks for {count} choices, this server holds at most {room}",
                code="too_many_choices",
            )
        if self._admitted + count > room:
            raise ApiError(
                429,
                f"{self._admitted} of {room} places are taken, {count} needed; try again later",
                code="queue_full",
            )
        self._admitted += count
        try:
            yield
        finally:
            self._admitted -= count

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for a sequence's turn."""
        async with self._slots:
            self.running += 1
            try:
                yield
            finally:
                self.running -= 1
