"""An answer on its way: it ends with its last token, its client, its time or the server."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass

from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from openv41.engine.request import Event, FinishReason, Request
from openv41.server.backend import Backend, ServedModel
from openv41.server.chat_format import ChatFormat
from openv41.server.errors import (
    ApiError,
    as_api_error,
    error_json,
    error_response,
    internal_error,
)
from openv41.server.formats import CompletionFormat, Format
from openv41.server.gate import Gate
from openv41.server.image_loader import ImageLoader
from openv41.server.lifecycle import Lifecycle
from openv41.server.limits import Limits
from openv41.server.metrics import OUTCOME, Metrics
from openv41.server.plans import Plan, check_body, make_plan, num_choices
from openv41.server.schemas import ChatBody, CompletionBody, Sampling

logger = logging.getLogger(__name__)

EVENT_STREAM = "text/event-stream; charset=utf-8"
LAST_WORDS_SECONDS = 1.0  # for a client to take the news of its own time-out


@dataclass(frozen=True, kw_only=True)
class Service:
    """What every answer needs."""

    backend: Backend
    model: ServedModel
    limits: Limits
    gate: Gate
    lifecycle: Lifecycle
    metrics: Metrics
    images: ImageLoader


class Answering(Response):
    """Answers a body while its client listens; a client that leaves ends it at once."""

    def __init__(self, service: Service, body: Sampling, endpoint: str) -> None:
        super().__init__()
        self._service = service
        self._asked = body
        self._endpoint = endpoint
        self._since = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Work, and watch for the reasons to end before the work does."""
        line = _Line(scope, receive, send)
        work = asyncio.create_task(self._work(line))
        gone = asyncio.create_task(_until_gone(receive))
        halt = asyncio.create_task(self._service.lifecycle.halted.wait())
        seconds = self._service.limits.request_seconds
        try:
            await asyncio.wait(
                {work, gone, halt}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
            )
            finished, left, halted = work.done(), gone.done(), halt.done()
        finally:
            await _cancel(work, gone, halt)
        if finished:
            error = work.exception()
            if error is not None and not isinstance(error, Exception):
                raise error
        elif left:
            logger.info("a client left %s after %.3g s", self._endpoint, self._age())
            scope[OUTCOME] = "left"
            return
        elif halted:
            error = ApiError(503, "the server is stopping; try another one", code="draining")
        else:
            error = ApiError(504, f"no answer within {seconds:g} s", code="request_timeout")
        if error is not None:
            refusal = as_api_error(error)
            scope[OUTCOME] = str(refusal.status)  # also where the answer has begun with a 200
            await self._fail(line, refusal)

    async def _fail(self, line: "_Line", refusal: ApiError) -> None:
        try:
            async with asyncio.timeout(LAST_WORDS_SECONDS):
                await line.fail(refusal)
        except TimeoutError:
            logger.info("a client does not read what %s sends", self._endpoint)

    def _age(self) -> float:
        return time.monotonic() - self._since

    async def _work(self, line: "_Line") -> None:
        service, body = self._service, self._asked
        check_body(body, service.model, service.limits)
        with service.gate.admit(num_choices(body)):
            plan = await make_plan(body, service.model, service.limits, service.images)
            form = _format_of(body, plan, service.model)
            events: list[list[Event]] = [[] for _ in plan.requests]
            async with aclosing(self._events(plan.requests)) as found:
                async for index, event in found:
                    form.count(index, event)
                    if body.stream:
                        opening = None if events[index] else form.opening(index)
                        events[index] = [event]
                        await line.say(opening, form.piece(index, event))
                    else:
                        events[index].append(event)
            if body.stream:
                await line.end(form.closing() if form.with_usage else None)
            else:
                await line.whole(form.whole(events))

    async def _events(
        self, requests: tuple[Request, ...]
    ) -> AsyncGenerator[tuple[int, Event], None]:
        """Run all requests at once and yield their events as they come."""
        queue: asyncio.Queue[tuple[int, Event | Exception | None]] = asyncio.Queue()
        tasks = [
            asyncio.create_task(self._pump(index, request, queue))
            for index, request in enumerate(requests)
        ]
        try:
            running = len(tasks)
            while running:
                index, found = await queue.get()
                if found is None:
                    running -= 1
                elif isinstance(found, Event):
                    yield index, found
                else:
                    raise found
        finally:
            await _cancel(*tasks)

    async def _pump(
        self,
        index: int,
        request: Request,
        queue: "asyncio.Queue[tuple[int, Event | Exception | None]]",
    ) -> None:
        """Bring one request's events into the queue, then None or what went wrong."""
        service = self._service
        last: Event | None = None
        try:
            async with service.gate.slot(), aclosing(_closable(service, request)) as events:
                async for event in events:
                    if last is None:
                        service.metrics.first_token.observe(self._age())
                    last = event
                    _raise_if_broken(event)
                    queue.put_nowait((index, event))
            if last is None or last.finish_reason is None:
                raise RuntimeError(f"the engine left request {index} unfinished: {last}")
            queue.put_nowait((index, None))
        except Exception as error:  # raised again by the one who reads the queue
            queue.put_nowait((index, error))


class _Line:
    """The way to the client: a JSON body at once, or server-sent events."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._is_begun = False

    async def whole(self, body: BaseModel) -> None:
        """Send a whole answer."""
        self._is_begun = True
        data = body.model_dump_json(exclude_unset=True)
        await Response(data, media_type="application/json")(self._scope, self._receive, self._send)

    async def say(self, *pieces: BaseModel | None) -> None:
        """Send pieces; the status line goes out with the first."""
        texts = [p.model_dump_json(exclude_unset=True) for p in pieces if p is not None]
        if texts:
            await self._write("".join(f"data: {text}\n\n" for text in texts).encode())

    async def end(self, closing: BaseModel | None) -> None:
        """Send the last piece and the mark of the end."""
        await self.say(closing)
        await self._write(b"data: [DONE]\n\n", last=True)

    async def fail(self, error: ApiError) -> None:
        """Send an error: as the answer, or as an event where the answer has begun."""
        if self._is_begun:
            await self._write(b"data: " + error_json(error) + b"\n\n", last=True)
        else:
            await error_response(error)(self._scope, self._receive, self._send)

    async def _write(self, data: bytes, *, last: bool = False) -> None:
        if not self._is_begun:
            self._is_begun = True
            headers = [
                (b"content-type", EVENT_STREAM.encode()),
                (b"cache-control", b"no-store"),
                (b"x-accel-buffering", b"no"),
            ]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})


def _format_of(body: Sampling, plan: Plan, model: ServedModel) -> Format:
    if isinstance(body, CompletionBody):
        return CompletionFormat(body, plan, model)
    assert isinstance(body, ChatBody), f"no format for {type(body).__name__}"
    return ChatFormat(body, plan, model)


async def _closable(service: Service, request: Request) -> AsyncGenerator[Event, None]:
    """Give the engine's stream a close of its own, whatever kind of iterator it is."""
    stream: AsyncIterator[Event] = service.backend.stream(request)
    try:
        async for event in stream:
            yield event
    finally:
        if isinstance(stream, AsyncGenerator):
            await stream.aclose()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: "asyncio.Task[object]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _raise_if_broken(event: Event) -> None:
    if event.finish_reason is FinishReason.ERROR:
        if event.is_own_fault:
            text = f"the answer cannot go on: {event.error}"
            raise ApiError(400, text, code="constraint_failed")
        raise internal_error()  # the engine has logged it
    if event.finish_reason is FinishReason.CANCELLED:
        raise ApiError(503, "the engine gave the request up", code="cancelled")
