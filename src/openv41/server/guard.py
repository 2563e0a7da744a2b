"""What a request meets before anything is parsed: drain, key, size and time of its body.

It sees the end of every request, and so counts them.
"""

import asyncio
import hmac
import time
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from openv41.server.errors import ApiError, error_response
from openv41.server.lifecycle import Lifecycle
from openv41.server.limits import Limits
from openv41.server.metrics import OUTCOME, Metrics

GUARDED = "/v1"
ENDPOINTS = ("/v1/completions", "/v1/chat/completions", "/v1/models")
DISCARD_SECONDS = 1.0  # for the body of a request that is refused


class Guard:
    """ASGI middleware: reads the whole body within its limits, then lets the request in."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        limits: Limits,
        lifecycle: Lifecycle,
        metrics: Metrics,
        api_key: str | None,
    ) -> None:
        self._app = app
        self._limits = limits
        self._lifecycle = lifecycle
        self._metrics = metrics
        self._authorization = None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse, or pass the request on with its body in one piece."""
        if scope["type"] != "http" or not scope["path"].startswith(GUARDED):
            await self._app(scope, receive, send)
            return
        since, sent = time.monotonic(), _Sent(send)
        try:
            await self._pass(scope, receive, sent)
        except Exception:
            sent.status = "500"
            raise
        finally:
            outcome = scope.get(OUTCOME, sent.status)
            self._metrics.count(_endpoint(scope["path"]), outcome, time.monotonic() - since)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        try:
            self._check_length(headers)
            refusal = self._refusal(headers)
            if refusal is not None:
                await self._discard(receive)
                raise refusal
            with self._lifecycle.work():
                body = await self._read(receive)
                if body is not None:
                    await self._app(scope, _Replayed(body, receive), send)
        except ApiError as error:
            await error_response(error, {"Connection": "close"})(scope, receive, send)

    def _check_length(self, headers: Headers) -> None:
        announced = headers.get("content-length", "0")
        digits = announced[:18]  # the rest of a longer number does not matter: it is too large
        if announced.isdecimal() and int(digits) > 2 * self._limits.max_body_bytes:
            raise self._too_large()

    def _refusal(self, headers: Headers) -> ApiError | None:
        if self._lifecycle.is_draining:
            return ApiError(503, "the server is stopping; try another one", code="draining")
        if self._authorization is None:
            return None
        given = headers.get("authorization", "").encode("latin-1")
        if hmac.compare_digest(given, self._authorization):
            return None
        return ApiError(
            401, "no valid API key; send it as 'Authorization: Bearer KEY'", code="invalid_api_key"
        )

    async def _discard(self, receive: Receive) -> None:
        """Read what a refused client still sends; a reset would take our answer from it."""
        size, more = 0, True
        with suppress(TimeoutError):
            async with asyncio.timeout(min(DISCARD_SECONDS, self._limits.body_seconds)):
                while more and size <= 2 * self._limits.max_body_bytes:
                    message = await receive()
                    size += len(message.get("body", b""))
                    more = message.get("more_body", False)

    async def _read(self, receive: Receive) -> bytes | None:
        """Read the body; None for a client that left."""
        limits = self._limits
        body = bytearray()
        try:
            async with asyncio.timeout(limits.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    body += message.get("body", b"")
                    # A little too much is read to its end, so that the client hears the refusal.
                    if len(body) > 2 * limits.max_body_bytes:
                        raise self._too_large()
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            text = f"the body did not arrive within {limits.body_seconds:g} s"
            raise ApiError(408, text, code="body_timeout") from None
        if len(body) > limits.max_body_bytes:
            raise self._too_large()
        return bytes(body)

    def _too_large(self) -> ApiError:
        text = f"the body is larger than {self._limits.max_body_bytes} bytes"
        return ApiError(413, text, code="body_too_large")


def _endpoint(path: str) -> str:
    """Name of an endpoint; what clients make up is 'other'."""
    return next((known for known in ENDPOINTS if path.startswith(known)), "other")


class _Sent:
    """A ``send`` that keeps the status of the answer."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = "left"

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = str(message["status"])
        await self._send(message)


class _Replayed:
    """A ``receive`` that gives the body once, then what the connection says."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}
