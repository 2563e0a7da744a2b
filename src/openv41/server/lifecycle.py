"""From serving to stopped: new work is refused while running work finishes."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

HALT_SECONDS = 5.0  # for the last words of answers that were cut off


class Lifecycle:
    """Counts running requests and ends them in order."""

    def __init__(self) -> None:
        self.is_draining = False
        self.halted = asyncio.Event()  # set: running requests end now
        self._idle = asyncio.Event()
        self._idle.set()
        self.active = 0

    @contextmanager
    def work(self) -> Iterator[None]:
        """Count a request while it is answered."""
        self.active += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.active -= 1
            if not self.active:
                self._idle.set()

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, wait for the running ones, then cut off what is left."""
        self.is_draining = True
        if not await self._become_idle(seconds):
            logger.warning("%d requests still run after %g s; ending them", self.active, seconds)
        self.halted.set()
        await self._become_idle(HALT_SECONDS)

    async def _become_idle(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            return False
        return True
