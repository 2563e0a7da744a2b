"""An engine for asyncio: it runs in a thread of its own, callers stream events."""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

from openv41.engine.engine import Engine
from openv41.engine.request import Event, Request
from openv41.errors import OpenV41Error, OverloadedError

Send = Callable[[Event | Exception], None]

logger = logging.getLogger(__name__)


class AsyncEngine:
    """Runs ``engine`` in a thread; all its methods are for one event loop.

    A step that fails ends its requests. If a command fails, or that ending does, the state is not
    to be trusted: the thread closes the engine, every open stream ends, and none is taken any more.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._commands: deque[Callable[[], None]] = deque()
        self._streams: set[Send] = set()  # those that have not ended
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

    @property
    def is_running(self) -> bool:
        """Whether requests are taken."""
        return self._thread is not None and not self._draining

    async def stream(self, request: Request) -> AsyncIterator[Event]:
        """Yield the events of a request; closing the iterator cancels it."""
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Event | Exception] = asyncio.Queue()
        numbers: list[int] = []  # one, once the engine has taken the request

        def send(event: Event | Exception) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody listens
                loop.call_soon_threadsafe(events.put_nowait, event)

        def submit() -> None:
            try:
                numbers.append(self.engine.submit(request, send))
            except Exception as error:
                send(error)

        self._begin(send, submit)
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
            with self._wake:
                self._streams.discard(send)
            if not ended:
                self._do(lambda: self._cancel(numbers))

    def _begin(self, send: Send, submit: Callable[[], None]) -> None:
        """Let the engine's thread submit a request, and tell ``send`` should it end."""
        with self._wake:
            if not self.is_running:
                raise OverloadedError("the engine takes no more requests; try another one")
            self._streams.add(send)
            self._do(submit)

    def _cancel(self, numbers: list[int]) -> None:
        for number in numbers:
            self.engine.cancel(number)

    def _do(self, command: Callable[[], None]) -> None:
        """Let the engine's thread run a command before its next step."""
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def _loop(self) -> None:
        try:
            while self._next_commands():
                self._step()
        except Exception:
            logger.exception("the engine stops; it cannot go on")
        finally:  # also after what is no Exception, such as a panic of a library
            with self._wake:
                self._draining = True
            try:
                self.engine.close()
            except Exception:
                logger.exception("the engine is not closed in order")
            self._end_streams()

    def _step(self) -> None:
        try:
            self.engine.step()
        except Exception:
            logger.exception("a step of the engine failed; its requests are cancelled")
            self.engine.cancel_all()

    def _end_streams(self) -> None:
        """Let nobody wait for an event that does not come."""
        with self._wake:
            for send in self._streams:
                send(OpenV41Error("the engine has stopped; the log tells why"))

    def _next_commands(self) -> bool:
        """Run what was asked for; wait while there is nothing to do. False ends the thread."""
        with self._wake:
            while not self._commands and self.engine.is_idle and not self._draining:
                self._wake.wait()
            commands, self._commands = self._commands, deque()
        for command in commands:
            command()
        return not (self._stopping or (self._draining and self.engine.is_idle))
