"""The server under load: 64 clients get the offline answers, and no page or memory is lost."""

import asyncio
import random
import resource
import statistics
import time
from contextlib import aclosing

import openai
import pytest

from openv41.engine.engine import Engine, EngineConfig
from openv41.engine.paged_store import CacheConfig
from openv41.engine.request import Request
from openv41.engine.sampler import SamplingConfig
from tests.server.conftest import serving

# httpx leaves the inner generators of an abandoned stream to the garbage collector, which may run
# in the thread of the server, where the loop of the client cannot close them.
HTTPX_STREAMS = (
    "Response|AsyncResponseStream|BoundAsyncStream|PoolByteStream|HTTP11ConnectionByteStream"
)
pytestmark = pytest.mark.filterwarnings(
    rf"ignore:Exception ignored in. <async_generator object ({HTTPX_STREAMS})\."
    ":pytest.PytestUnraisableExceptionWarning"
)

CLIENTS = 64
KINDS = 24  # different requests
MAX_TOKENS = 4


def texts():
    """Prompts of mixed lengths, some of which begin alike."""
    maker = random.Random(5)
    starts = ["To be, or not to be", "Now is the winter", ""]
    return [
        starts[kind % 3] + "".join(maker.choices("abc xyz.", k=maker.randint(0, 60)))
        for kind in range(KINDS)
    ]


@pytest.fixture(scope="module")
def loaded(checkpoint):
    """An engine, what it answers alone, and the server over it."""
    cache = CacheConfig(num_pages=96, max_requests=16, poison=True)
    engine = Engine.load(checkpoint, numerics="f32", config=EngineConfig(cache=cache))
    offline = [
        engine.generate(
            [
                Request(
                    prompt=(0, *engine.tokenizer.encode(text)),
                    max_tokens=MAX_TOKENS,
                    sampling=SamplingConfig(temperature=0.5, seed=kind),
                )
            ]
        )[0].text
        for kind, text in enumerate(texts())
    ]
    with serving(engine, max_concurrency=CLIENTS, max_queue=1000, request_seconds=600.0) as server:
        yield engine, offline, server


async def ask(client, number, offline, waits):
    """One request of the mix: most complete, 5 % are given up, 2 % are wrong."""
    luck, kind = number * 37 % 100, number % KINDS
    body = {"model": "tiny", "prompt": texts()[kind], "temperature": 0.5, "seed": kind}
    if luck < 2:
        with pytest.raises(openai.BadRequestError):
            await client.completions.create(**body, max_tokens=100_000)
        return
    start = time.perf_counter()
    if luck < 7:
        stream = await client.completions.create(**body, max_tokens=200, stream=True)
        async with stream, aclosing(aiter(stream)) as chunks:
            await anext(chunks, None)
        return
    stream = luck % 2 == 0
    answer = await client.completions.create(**body, max_tokens=MAX_TOKENS, stream=stream)
    text = ""
    if stream:
        async for chunk in answer:
            if not text:
                waits.append(time.perf_counter() - start)
            text += chunk.choices[0].text
    else:
        text = answer.choices[0].text
    assert text == offline[kind], f"request {number}"


async def run_load(url, total, offline, each=lambda done: None):
    waits, numbers = [], iter(range(total))

    async def client_loop(client):
        for number in numbers:
            await ask(client, number, offline, waits)
            each(number)

    async with openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300
    ) as client:
        await asyncio.gather(*(client_loop(client) for _ in range(CLIENTS)))
    return sorted(waits)


def assert_nothing_is_held(engine, server):
    server.wait_for(lambda: engine.is_idle)
    stats = engine.stats()
    assert (stats.queued, stats.running) == (0, 0)
    assert stats.pages_used == stats.pages_cached
    assert len(engine.store._free_places) == engine.store.cache.max_requests


@pytest.mark.slow
def test_64_clients(loaded):
    engine, offline, server = loaded
    asyncio.run(run_load(server.url, 100, offline))
    assert_nothing_is_held(engine, server)


@pytest.mark.prove
def test_10_000_requests(loaded, record_proof):
    """Memory after the first thousand requests and at the end."""
    engine, offline, server = loaded
    peaks = {}

    def watch(number):
        if number in (1000, 9999):
            peaks[number] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    waits = asyncio.run(run_load(server.url, 10_000, offline, watch))
    assert_nothing_is_held(engine, server)
    assert peaks[9999] < peaks[1000] * 1.02 + 5
    record_proof(
        requests=10_000,
        clients=CLIENTS,
        first_token_p50_seconds=statistics.median(waits),
        first_token_p99_seconds=waits[int(len(waits) * 0.99)],
        peak_mb_after_1000=peaks[1000],
        peak_mb_after_10000=peaks[9999],
        preemptions=engine.stats().preemptions,
        prefix_hit_tokens=engine.stats().prefix_hit_tokens,
    )
