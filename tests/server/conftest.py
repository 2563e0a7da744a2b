import contextlib
import threading
import time
from dataclasses import replace

import httpx
import openai
import pytest

from openv41.engine.async_engine import AsyncEngine
from openv41.prompt.tokens import IMAGE
from openv41.server.app import make_service
from openv41.server.backend import ServedModel
from openv41.server.limits import Limits
from openv41.server.run import listen, make_server
from tests.io.tiny_checkpoint import make_checkpoint, make_tokenizer
from tests.layers.mini import VISION
from tests.server.fake import FakeBackend, make_model

PATIENCE = 5.0  # seconds that anything here may take at most


class Running:
    """A server on a free port, and its clients."""

    def __init__(self, service, server, url, client):
        self.service = service
        self.backend = service.backend
        self.server = server
        self.url = url
        self._client = client

    def openai(self, **options):
        return openai.OpenAI(
            base_url=f"{self.url}/v1",
            **{"api_key": "none", "max_retries": 0, "timeout": PATIENCE, **options},
        )

    def post(self, path, **options):
        headers = {"content-type": "application/json"}
        return self._client.post(path, headers=headers, **options)

    def get(self, path, **options):
        return self._client.get(path, **options)

    def wait_for(self, condition):
        end = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < end, "waited in vain"
            time.sleep(0.005)

    def is_idle(self):
        service = self.service
        counts = (self.backend.running, service.gate.running, service.gate.waiting)
        return (*counts, service.lifecycle.active) == (0, 0, 0, 0)


@contextlib.contextmanager
def running(model, *, api_key=None, images=None, **limits):
    backend = FakeBackend(model)
    service = make_service(
        backend, model, limits=Limits(**limits), stats=backend.stats, images=images
    )
    with served(service, api_key=api_key) as server:
        yield server
    assert backend.is_started
    assert backend.is_stopped


@contextlib.contextmanager
def serving(engine, **limits):
    """A server over a real engine."""
    service = make_service(
        AsyncEngine(engine),
        ServedModel.of(engine, "tiny"),
        limits=Limits(**limits),
        stats=engine.stats,
    )
    with served(service) as server:
        yield server


@contextlib.contextmanager
def served(service, *, api_key=None):
    server = make_server(service, api_key=api_key)
    with listen("127.0.0.1", 0) as sock:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        try:
            with httpx.Client(base_url=url, timeout=PATIENCE, trust_env=False) as client:
                yield Running(service, server, url, client)
        finally:
            server.should_exit = True
            thread.join(PATIENCE)
    assert not thread.is_alive(), "the server does not stop"


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def seeing(model, tmp_path_factory):
    """A model that sees and whose chats are in the prompt format."""
    tokenizer = make_tokenizer(tmp_path_factory.mktemp("seeing"))
    return replace(
        model,
        tokenizer=tokenizer,
        num_tokens=tokenizer.vocab_size,
        vision=VISION,
        image_token_id=tokenizer.special_id(IMAGE),
        max_length=4096,
    )


@pytest.fixture(scope="session")
def formatted(seeing):
    with running(seeing) as server:
        yield server


@pytest.fixture(scope="session")
def shared(model):
    with running(model) as server:
        yield server


@pytest.fixture
def server(shared):
    """The shared server; a test may leave nothing running in it."""
    shared.backend.seen.clear()
    shared.backend.cancelled = 0
    yield shared
    shared.wait_for(shared.is_idle)


@pytest.fixture
def client(server):
    with server.openai() as client:
        yield client


@pytest.fixture
def start(model):
    """Return a way to start a server with limits of its own."""
    with contextlib.ExitStack() as stack:
        yield lambda **options: stack.enter_context(running(model, **options))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))
