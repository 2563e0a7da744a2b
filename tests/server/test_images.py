"""Images of requests: what is taken, what is refused, and where remote ones may come from."""

import asyncio
import base64
import contextlib
import http.server
import ssl
import struct
import threading
import time
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from openv41.errors import ImageError
from openv41.io.image_processor import ImageLimits, load_image, process_image
from openv41.server.image_loader import DECODES, FETCHES, ImageLoader, ImageSource
from openv41.server.remote import RemoteImages, is_public
from tests.layers.mini import VISION
from tests.server.conftest import running
from tests.server.images import data_url, image_part, png

CHAT = "/v1/chat/completions"
PEM = Path(__file__).parent / "tls" / "images.test.pem"
PUBLIC = "93.184.215.14"


@pytest.fixture(scope="module")
def server(seeing):
    with running(seeing, max_images=3) as server:
        yield server


def chat(server, *parts, **options):
    text = {"type": "text", "text": "what?"}
    body = {"messages": [{"role": "user", "content": [*parts, text]}], "max_tokens": 1, **options}
    server.backend.seen.clear()
    return server.post(CHAT, json=body)


def file_part(data, **about):
    return {"type": "file", "file": {"file_data": data, **about}}


def as_text(data):
    return base64.b64encode(data).decode()


@pytest.mark.parametrize(
    "part",
    [
        image_part(png(1)),
        {"type": "image_url", "image_url": {"url": data_url(png(1)), "detail": "high"}},
        {"type": "image_url", "image_url": {"url": "DATA:;BASE64," + as_text(png(1))}},
        file_part(as_text(png(1))),
        file_part(data_url(png(1)), filename="cat.png"),
    ],
)
def test_every_way_to_send_an_image(server, part):
    answer = chat(server, part, image_part(png(2)))
    assert answer.status_code == 200, answer.text
    (request,) = server.backend.seen
    images = [process_image(load_image(png(seed)), VISION) for seed in (1, 2)]
    assert [i.content_hash for i in request.images] == [i.content_hash for i in images]
    token = server.service.model.image_token_id
    assert request.prompt.count(token) == sum(image.grid.span_length for image in images)
    assert answer.json()["usage"]["prompt_tokens"] == len(request.prompt)


def test_images_count_for_the_length_of_a_prompt(server, seeing):
    image = process_image(load_image(png(1, 240, 240)), VISION)
    assert image.grid.span_length > 512
    plain = chat(server).json()["usage"]["prompt_tokens"]
    with running(seeing, max_prompt_tokens=plain + 512) as small:
        answer = chat(small, image_part(png(1, 240, 240)))
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def bomb():
    """A small PNG that says it is 50,000 pixels wide and high."""
    chunks = {b"IHDR": struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0), b"IDAT": b""}
    data = b"\x89PNG\r\n\x1a\n"
    for name, body in chunks.items():
        check = struct.pack(">I", zlib.crc32(name + body))
        data += struct.pack(">I", len(body)) + name + body + check
    return data


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (image_part(b"nonsense"), "messages[0].content[1]: cannot be read as an image"),
        (file_part("!", filename="cat.png"), "content[1] ('cat.png'): the data URL is no valid"),
        (image_part(bomb()), "has more than the 67,108,864 pixels allowed; scale it"),
        ({"type": "image_url", "image_url": {"url": "data:image/png,abc"}}, "of the form"),
        ({"type": "image_url", "image_url": {"url": "https://a/b.png"}}, "fetches no images"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "fetches no images"),
        ({"type": "image_url", "image_url": {"url": "/etc/passwd"}}, "fetches no images"),
        (image_part(png(1, 40_000, 1)), "the longer side may be at most 5000 times"),
    ],
)
def test_images_that_cannot_be(server, part, text):
    error = chat(server, image_part(png(1)), part).json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", "messages")
    assert error["code"] == "invalid_image"
    assert text in error["message"]
    assert not server.backend.seen


def test_refusals_that_no_image_is_read_for(server, seeing):
    error = chat(server, *[image_part(b"")] * 4).json()["error"]
    assert error["message"] == "the chat has 4 images, must be at most 3"
    error = chat(server, file_part("", file_id="file-1")).json()["error"]
    assert "files are not stored; send file_data" in error["message"]
    error = chat(server, {"type": "image_url", "image_url": {}}).json()["error"]
    assert "image_url.url: Field required" in error["message"]
    with running(replace(seeing, vision=None)) as blind:
        error = chat(blind, image_part(png(1))).json()["error"]
    assert error["message"] == "messages[0].content[0]: this model sees no images"


def test_decoding_leaves_the_event_loop_alone(monkeypatch):
    """The loop turns while an image is processed."""
    threads = []

    def slow(data, limits, *, name):
        threads.append(threading.current_thread())
        time.sleep(0.2)
        return load_image(data, limits, name=name)

    monkeypatch.setattr("openv41.server.image_loader.load_image", slow)

    async def both():
        source = ImageSource("a", data_url(png(1)))
        task = asyncio.create_task(ImageLoader().load([source], VISION))
        turns = 0
        while not task.done():
            await asyncio.sleep(0.01)
            turns += 1
        return turns

    assert asyncio.run(both()) >= 5
    assert threads[0] is not threading.main_thread()


def test_few_images_are_decoded_at_once(monkeypatch):
    """Also where those who asked for them have left."""
    lock, running, most = threading.Lock(), [], []

    def slow(data, limits, *, name):
        with lock:
            running.append(name)
            most.append(len(running))
        time.sleep(0.05)
        with lock:
            running.remove(name)
        return load_image(data, limits, name=name)

    monkeypatch.setattr("openv41.server.image_loader.load_image", slow)

    async def many():
        loader = ImageLoader()
        loads = [
            asyncio.create_task(loader.load([ImageSource(str(n), data_url(png(1)))], VISION))
            for n in range(3 * DECODES)
        ]
        await asyncio.sleep(0.02)
        for load in loads[:DECODES]:
            load.cancel()
        await asyncio.gather(*loads, return_exceptions=True)

    asyncio.run(many())
    assert len(most) >= 2 * DECODES
    assert max(most) == DECODES


# remote


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
     "0.0.0.0", "224.0.0.1", "240.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1",
     "::1", "::", "fe80::1", "fc00::1", "fec0::1", "ff02::1", "2001:db8::1",
     "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::",
     "2001:0:7f00:1::"],
)  # fmt: skip
def test_addresses_that_are_not_public(address):
    assert not is_public(address)


@pytest.mark.parametrize("address", [PUBLIC, "8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8"])
def test_addresses_that_are_public(address):
    assert is_public(address)


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers by the path: a picture, redirects, and what should not be."""

    def do_GET(self):
        self.server.seen.append((self.path, self.headers["Host"]))
        kind, _, rest = self.path[1:].partition("/")
        if kind == "to":
            self.send_response(302)
            self.send_header("Location", rest)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if kind == "slow":
            time.sleep(1)
        body = png(1) if kind in ("png", "slow") else b"x" * 100_000
        self.send_response(404 if kind == "none" else 200)
        if kind != "long":
            self.send_header("Content-Length", str(len(body) + (kind == "short")))
        if kind == "packed":
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def web():
    """A local TLS server that calls itself images.test."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.seen = []
    server.handle_error = lambda *args: None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(PEM)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


class Net:
    """Names and connections of a world in which ``web`` has a public address."""

    def __init__(self, web, names):
        self.web, self.names = web, names
        self.asked, self.reached = [], []

    async def resolve(self, host, port):
        self.asked.append(host)
        found = self.names[host]
        return found.pop(0) if found and isinstance(found[0], list) else found

    async def connect(self, address, port, host):
        self.reached.append((address, port))
        context = ssl.create_default_context(cafile=PEM)
        port = self.web.server_address[1]
        return await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=host)

    def remote(self, **options):
        return RemoteImages(resolve=self.resolve, connect=self.connect, **options)


def fetch(net, url, max_bytes=50_000, **options):
    return asyncio.run(net.remote(**options).fetch(url, max_bytes))


def test_a_remote_image(web, seeing):
    net = Net(web, {"images.test": [PUBLIC], "other.test": [PUBLIC]})
    web.seen.clear()
    assert fetch(net, "https://images.test/png/a?b=c") == png(1)
    assert fetch(net, "https://images.test/to/https://other.test:8443/png") == png(1)
    assert web.seen[0] == ("/png/a?b=c", "images.test")
    assert web.seen[-1] == ("/png", "other.test:8443")
    assert net.reached == [(PUBLIC, 443), (PUBLIC, 443), (PUBLIC, 8443)]
    with running(seeing, images=ImageLoader(remote=net.remote())) as server:
        url = {"type": "image_url", "image_url": {"url": "https://images.test/png"}}
        answer = chat(server, url)
        assert answer.status_code == 200, answer.text
        image = process_image(load_image(png(1)), VISION)
        assert server.backend.seen[0].images[0].content_hash == image.content_hash
        url = {"type": "image_url", "image_url": {"url": "https://images.test/none"}}
        error = chat(server, url).json()["error"]
        assert error["message"] == (
            "messages[0].content[0]: the image's host answers with status 404"
        )


@pytest.mark.parametrize(
    "addresses",
    [["127.0.0.1"], ["10.0.0.7"], ["::1"], ["::ffff:169.254.169.254"], [PUBLIC, "10.0.0.7"], []],
)
def test_hosts_nearby_are_not_asked(web, addresses):
    net = Net(web, {"images.test": addresses})
    with pytest.raises(ImageError, match="not on the public internet"):
        fetch(net, "https://images.test/png")
    assert net.reached == []


def test_redirects_are_checked_like_the_first_url(web):
    """Also where a name leads elsewhere the second time it is asked for."""
    net = Net(web, {"images.test": [[PUBLIC], ["127.0.0.1"]], "nearby": ["192.168.0.1"]})
    with pytest.raises(ImageError, match="not on the public internet"):
        fetch(net, "https://images.test/to/https://images.test/png")
    assert net.asked == ["images.test"] * 2
    net = Net(web, {"images.test": [PUBLIC], "nearby": ["192.168.0.1"]})
    with pytest.raises(ImageError, match="not on the public internet"):
        fetch(net, "https://images.test/to/https://nearby/png")
    with pytest.raises(ImageError, match="begins with 'http', must be https"):
        fetch(net, "https://images.test/to/http://images.test/png")
    web.seen.clear()
    with pytest.raises(ImageError, match="more than 3 redirects"):
        fetch(net, "https://images.test/to/" * 1 + "https://images.test/to/" * 4 + "/png")
    assert {address for address, _ in net.reached} == {PUBLIC}


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("http://images.test/png", "begins with 'http', must be https"),
        ("ftp://images.test/png", "begins with 'ftp', must be https"),
        ("https:///png", "must be plain ASCII"),
        ("https://user:word@images.test/png", "without user names"),
        ("https://images.test/a b", "must be plain ASCII"),
        ("https://images.test/a\r\nX: y", "must be plain ASCII"),
        ("https://caf\u00e9.test/", "must be plain ASCII"),
        ("https://images.test:99999/", "must be plain ASCII"),
        ("https://[::1/", "must be plain ASCII"),
        ("https://images.test/" + "a" * 5000, "at most 4096 characters"),
        ("https://images.test/big", "has more than the 50,000 bytes allowed"),
        ("https://images.test/long", "has more than the 50,000 bytes allowed"),
        ("https://images.test/none", "answers with status 404"),
        ("https://images.test/packed", "answers with status 200"),
    ],
)
def test_urls_that_bring_nothing(web, url, text):
    with pytest.raises(ImageError, match=text):
        fetch(Net(web, {"images.test": [PUBLIC]}), url)


class Watched(RemoteImages):
    """Counts the fetches that run at once; the first one is the last to arrive."""

    running = most = 0

    async def fetch(self, url, max_bytes):
        Watched.running += 1
        Watched.most = max(Watched.most, Watched.running)
        number = int(url.rpartition("/")[2])
        try:
            await asyncio.sleep(0.05 if number == 0 else 0.01)
            if number == 99:
                raise ImageError("there is none")
            return png(number, 12 + number, 6)
        finally:
            Watched.running -= 1


def test_some_images_are_fetched_at_once():
    loader = ImageLoader(remote=Watched())
    sources = [ImageSource(f"image {n}", f"https://images.test/{n}") for n in range(2 * FETCHES)]
    sources[3] = ImageSource("image 3", data_url(png(3)))
    images = asyncio.run(loader.load(sources, VISION))
    wanted = [png(n, 12 + (n if n != 3 else 0), 6) for n in range(2 * FETCHES)]
    hashes = [process_image(load_image(data), VISION).content_hash for data in wanted]
    assert [image.content_hash for image in images] == hashes
    assert Watched.most == FETCHES
    sources[1] = ImageSource("image 1", "https://images.test/99")
    with pytest.raises(ImageError, match="image 1: there is none"):
        asyncio.run(loader.load(sources, VISION))
    assert Watched.running == 0


def test_the_certificates_are_read_once(monkeypatch):
    seen = []

    async def open_connection(address, port, **options):
        seen.append(options)

    monkeypatch.setattr(asyncio, "open_connection", open_connection)
    remote = RemoteImages()
    for host in ("a.test", "b.test"):
        asyncio.run(remote.connect(PUBLIC, 443, host))
    assert [options["server_hostname"] for options in seen] == ["a.test", "b.test"]
    assert seen[0]["ssl"] is seen[1]["ssl"]
    assert seen[0]["ssl"].verify_mode is ssl.CERT_REQUIRED


def test_time_is_limited(web):
    began = time.monotonic()
    with pytest.raises(ImageError, match=r"did not arrive within 0\.3 s"):
        fetch(Net(web, {"images.test": [PUBLIC]}), "https://images.test/slow", seconds=0.3)
    assert time.monotonic() - began < 0.9


def test_answers_that_break_off(web):
    with pytest.raises(ImageError, match="does not speak HTTP"):
        fetch(Net(web, {"images.test": [PUBLIC]}), "https://images.test/short", 200_000)


def test_the_certificate_must_be_that_of_the_host(web):
    with pytest.raises(ImageError, match="SSLCertVerificationError; check its URL, or"):
        fetch(Net(web, {"wrong.test": [PUBLIC]}), "https://wrong.test/png")


def test_limits_of_images_hold_for_remote_ones(web):
    loader = ImageLoader(ImageLimits(max_bytes=100), Net(web, {"images.test": [PUBLIC]}).remote())
    source = ImageSource("image 1", "https://images.test/png")
    with pytest.raises(ImageError, match="image 1: the image has more than the 100 bytes"):
        asyncio.run(loader.load([source], VISION))
