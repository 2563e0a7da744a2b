"""The queue in front of the engine."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from openv41.server.errors import ApiError
from openv41.server.limits import Limits


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
