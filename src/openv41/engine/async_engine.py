"""An engine for asyncio: it runs in a thread of its own, callers stream events."""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable

from openv41.engine.engine import Engine
from openv41.engine.request import Event, Request
from openv41.errors import OverloadedError

logger = logging.getLogger(__name__)


class AsyncEngine:
    """Runs ``engine`` in a thread; all its methods are for one event loop."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._draining = False
        self._thread: threading.Thread | None = None

    async def start(self) -> None:
        """Start the thread."""
        assert self._thread is None, "the engine runs already"
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        self._thread.start()

    async def stop(self, *, drain: bool = True) -> None:
        """End the thread, after the running requests or at once."""
        if self._thread is None:
            return
        with self._wake:
            self._draining, self._stopping = True, not drain
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)
        self._thread = None

    async def stream(self, request: Request) -> AsyncIterator[Event]:
        """Yield the events of a request; closing the iterator cancels it."""
        if self._draining:
            raise OverloadedError("the engine is shutting down; try another one")
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Event | Exception] = asyncio.Queue()
        numbers: list[int] = []  # one, once the engine has taken the request

        def send(event: Event | Exception) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        def submit() -> None:
            try:
                numbers.append(self.engine.submit(request, send))
            except Exception as error:
                send(error)

        self._do(submit)
        ended = False
        try:
            while not ended:
                event = await events.get()
                if isinstance(event, Exception):
                    ended = True
                    raise event
                ended = event.finish_reason is not None
                yield event
        finally:
            if not ended:
                self._do(lambda: self._cancel(numbers))

    def _cancel(self, numbers: list[int]) -> None:
        for number in numbers:
            self.engine.cancel(number)

    def _do(self, command: Callable[[], None]) -> None:
        """Let the engine's thread run a command before its next step."""
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def _loop(self) -> None:
        while self._next_commands():
            try:
                self.engine.step()
            except Exception:
                logger.exception("a step of the engine failed; its requests are cancelled")
                self.engine.cancel_all()
        self.engine.close()

    def _next_commands(self) -> bool:
        """Run what was asked for; wait while there is nothing to do. False ends the thread."""
        with self._wake:
            while not self._commands and self.engine.is_idle and not self._draining:
                self._wake.wait()
            commands, self._commands = self._commands, deque()
        for command in commands:
            command()
        return not (self._stopping or (self._draining and self.engine.is_idle))
