"""Run the server until it is asked to stop; running answers are finished first."""

import asyncio
import errno
import logging
import signal
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from openv41.errors import InputError, OpenV41Error
from openv41.server.app import make_app
from openv41.server.lifecycle import Lifecycle
from openv41.server.streaming import Service

logger = logging.getLogger(__name__)

BACKLOG = 2048
KEEP_ALIVE_SECONDS = 5
CLOSE_SECONDS = 2  # for connections to close, once nothing is answered any more


class DrainingServer(uvicorn.Server):
    """Takes connections while it drains, so that new requests are refused in words."""

    def __init__(self, config: uvicorn.Config, lifecycle: Lifecycle, seconds: float) -> None:
        super().__init__(config)
        self._lifecycle = lifecycle
        self._drain_seconds = seconds
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and keep the loop for signals."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain on the first signal, leave on the second. The exit status stays 0."""
        if self._loop is None or self._lifecycle.is_draining:
            self.should_exit = self.force_exit = True
            return
        logger.info("%s: finishing %d requests", signal.Signals(sig).name, self._lifecycle.active)
        self._lifecycle.is_draining = True
        self._loop.call_soon_threadsafe(self._begin_drain)

    def _begin_drain(self) -> None:
        self._drain = asyncio.create_task(self._stop())

    async def _stop(self) -> None:
        await self._lifecycle.drain(self._drain_seconds)
        self.should_exit = True


def make_server(service: Service, *, api_key: str | None = None) -> DrainingServer:
    """Set up uvicorn for an application; sockets come from ``listen``."""
    config = uvicorn.Config(
        make_app(service, api_key=api_key),
        http="h11",
        ws="none",
        loop="asyncio",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=CLOSE_SECONDS,
    )
    return DrainingServer(config, service.lifecycle, service.limits.drain_seconds)


def bind(host: str, port: int) -> socket.socket:
    """Take the address to serve on, where nothing listens yet; port 0 takes a free one.

    Raises InputError if another program listens there.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        # Connections inherit it. asyncio sets it for sockets that name TCP as their protocol, and
        # this one does not; without it a small piece waits for the word that the last one arrived.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise _refused(host, port, error) from None
    return sock


def listen(host: str, port: int) -> socket.socket:
    """Open the socket to serve on."""
    sock = bind(host, port)
    sock.listen(BACKLOG)
    return sock


def serve(
    service: Service,
    sock: socket.socket,
    *,
    api_key: str | None = None,
    ready: Callable[[str], None],
) -> None:
    """Serve on a bound socket until SIGTERM or SIGINT; ``ready`` is told the address."""
    host, port = sock.getsockname()[:2]
    server = make_server(service, api_key=api_key)
    try:
        sock.listen(BACKLOG)
    except OSError as error:
        raise _refused(host, port, error) from None
    ready(f"http://{_address(host, port)}")
    try:
        server.run(sockets=[sock])
    except SystemExit:  # uvicorn's word for a start that failed
        raise OpenV41Error("the server did not start; the log above tells why") from None


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _refused(host: str, port: int, error: OSError) -> InputError:
    reason, hint = error.strerror or str(error), "choose another address with --host and --port"
    if error.errno == errno.EADDRINUSE:
        reason = "another program listens there"
        hint = "stop it, or choose another port with --port (0 takes a free one)"
    return InputError(f"cannot serve on {_address(host, port)}: {reason}; {hint}")
