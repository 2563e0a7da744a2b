"""Images from the web: https alone, from public addresses, within limits of size and time.

A host is resolved once. All of its addresses must be public, and the connection goes to one of
them, so that no second look-up can lead elsewhere; each redirect begins anew.
"""

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from urllib.parse import SplitResult, urljoin, urlsplit

import h11

from openv41.errors import ImageError

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
Connect = Callable[[str, int, str], Awaitable[Streams]]

MAX_URL = 4096  # characters
MAX_HEAD = 1 << 16  # bytes of an answer before its body
REDIRECTS = (301, 302, 303, 307, 308)
_GLOBAL_IPV6 = ipaddress.IPv6Network("2000::/3")


def is_public(address: str) -> bool:
    """Whether an address belongs to the public internet, and not to some network nearby."""
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            return is_public(str(ip.ipv4_mapped))
        tunnelled = ip.sixtofour is not None or ip.teredo is not None
        return ip in _GLOBAL_IPV6 and ip.is_global and not tunnelled
    return ip.is_global and not (ip.is_multicast or ip.is_reserved)


async def resolve(host: str, port: int) -> list[str]:
    """Addresses of a host."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


def tls_connect() -> Connect:
    """A way to open TLS connections to addresses; the certificate must be that of the host."""
    context = ssl.create_default_context()  # reads the system's certificates

    async def connect(address: str, port: int, host: str) -> Streams:
        return await asyncio.open_connection(address, port, ssl=context, server_hostname=host)

    return connect


@dataclass(frozen=True, kw_only=True)
class RemoteImages:
    """Fetches images; the limits hold for all redirects together."""

    seconds: float = 10.0
    max_redirects: int = 3
    resolve: Resolve = resolve
    connect: Connect = field(default_factory=tls_connect)

    async def fetch(self, url: str, max_bytes: int) -> bytes:
        """Bytes at a URL; raises ImageError with the reason."""
        try:
            async with asyncio.timeout(self.seconds):
                for _ in range(self.max_redirects + 1):
                    found = await self._get(_checked(url), max_bytes)
                    if isinstance(found, bytes):
                        return found
                    url = urljoin(url, found)
        except TimeoutError:
            raise ImageError(f"the image did not arrive within {self.seconds:g} s") from None
        except (OSError, ValueError) as error:
            raise ImageError(
                f"the image cannot be fetched: {type(error).__name__}; check its URL, or send the "
                "image as a data URL"
            ) from error
        raise ImageError(f"more than {self.max_redirects} redirects lead to the image")

    async def _get(self, url: SplitResult, max_bytes: int) -> bytes | str:
        """Body of an answer, or where it redirects to."""
        host, port = str(url.hostname), url.port or 443
        addresses = await self.resolve(host, port)
        if not addresses or not all(map(is_public, addresses)):
            raise ImageError("the image's host is not on the public internet")
        reader, writer = await self._open(addresses, port, host)
        try:
            return await _Exchange(reader, writer).get(url, max_bytes)
        except h11.ProtocolError:
            raise ImageError("the image's host does not speak HTTP") from None
        finally:
            writer.transport.abort()

    async def _open(self, addresses: Sequence[str], port: int, host: str) -> Streams:
        for address in addresses[:-1]:
            try:
                return await self.connect(address, port, host)
            except OSError:
                continue
        return await self.connect(addresses[-1], port, host)


class _Exchange:
    """One request and its answer."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD)

    async def get(self, url: SplitResult, max_bytes: int) -> bytes | str:
        target = (url.path or "/") + (f"?{url.query}" if url.query else "")
        headers = [
            ("Host", url.netloc),
            ("Accept", "image/*"),
            ("Accept-Encoding", "identity"),
            ("User-Agent", "openv41"),
            ("Connection", "close"),
        ]
        request = h11.Request(method="GET", target=target, headers=headers)
        self._writer.write((self._http.send(request) or b"") + (self._end() or b""))
        await self._writer.drain()
        answer = await self._next()
        while isinstance(answer, h11.InformationalResponse):
            answer = await self._next()
        if not isinstance(answer, h11.Response):
            raise ImageError("the image's host gave no answer")
        fields = dict(answer.headers)
        if answer.status_code in REDIRECTS and b"location" in fields:
            return fields[b"location"].decode("latin-1")
        if answer.status_code != 200 or fields.get(b"content-encoding", b"identity") != b"identity":
            raise ImageError(f"the image's host answers with status {answer.status_code}")
        return await self._body(max_bytes)

    def _end(self) -> bytes | None:
        return self._http.send(h11.EndOfMessage())

    async def _body(self, max_bytes: int) -> bytes:
        body = bytearray()
        while isinstance(event := await self._next(), h11.Data):
            body += event.data
            if len(body) > max_bytes:
                raise ImageError(f"the image has more than the {max_bytes:,} bytes allowed")
        if not isinstance(event, h11.EndOfMessage):
            raise ImageError("the image broke off")
        return bytes(body)

    async def _next(self) -> object:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(await self._reader.read(MAX_HEAD))
        return event


def _checked(url: str) -> SplitResult:
    """Take a URL apart, if it is one that may be fetched."""
    try:
        parts = urlsplit(url)
        port_is_good = parts.port != 0
    except ValueError:
        port_is_good = False
    is_clean = url.isascii() and url.isprintable() and " " not in url and len(url) <= MAX_URL
    if not (is_clean and port_is_good and parts.hostname) or "@" in parts.netloc:
        raise ImageError(
            f"the image's URL must be plain ASCII without user names, at most {MAX_URL} characters"
        )
    if parts.scheme != "https":
        raise ImageError(
            f"the image's URL begins with {parts.scheme[:16]!a}, must be https or data"
        )
    return parts
