"""The server over the real engine and a tiny random model."""

import asyncio

import openai
import pytest

from openv41.engine.engine import Engine, EngineConfig
from openv41.engine.paged_store import CacheConfig
from openv41.engine.request import Request
from openv41.engine.sampler import SamplingConfig
from openv41.server.backend import Backend
from tests.server.conftest import serving

pytestmark = pytest.mark.shapes

PROMPTS = ("To be", "or not", "x" * 70, "To be, or not")


@pytest.fixture(scope="module")
def engine(checkpoint):
    return Engine.load(
        checkpoint,
        numerics="f32",
        config=EngineConfig(cache=CacheConfig(num_pages=32, max_requests=4)),
    )


@pytest.fixture(scope="module")
def expected(engine):
    """Offline answers of the engine."""
    requests = [
        Request(
            prompt=(0, *engine.tokenizer.encode(text)),
            max_tokens=6,
            sampling=SamplingConfig(seed=seed, temperature=0.7),
            logprobs=2,
        )
        for seed, text in enumerate(PROMPTS)
    ]
    return engine.generate(requests)


@pytest.fixture(scope="module")
def server(engine, expected):
    with serving(engine, max_concurrency=4) as running:
        assert isinstance(running.backend, Backend)
        yield running


def test_answers_over_http_are_those_of_the_engine(server, expected):
    """Whole and streamed, beside requests that are wrong or given up."""

    async def one(client, seed, stream):
        answer = await client.completions.create(
            model="tiny",
            prompt=PROMPTS[seed],
            max_tokens=6,
            temperature=0.7,
            seed=seed,
            logprobs=2,
            stream=stream,
            extra_body={"return_token_ids": True},
        )
        chunks = [chunk async for chunk in answer] if stream else [answer]
        choices = [chunk.choices[0] for chunk in chunks]
        want = expected[seed]
        ids = [token for choice in choices for token in choice.token_ids]
        assert tuple(ids[: len(want.tokens)]) == want.tokens
        assert len(ids) <= len(want.tokens) + 1  # EOS, where it ended the answer
        assert "".join(choice.text for choice in choices) == want.text
        assert choices[-1].finish_reason == want.finish_reason.value
        found = [x for choice in choices for x in choice.logprobs.token_logprobs]
        own = [logprob.logprob for logprob in want.logprobs]
        assert found[: len(own)] == pytest.approx(own, abs=1e-4)

    async def given_up(client, text):
        stream = await client.completions.create(
            model="tiny", prompt=text, max_tokens=400, stream=True, extra_body={"ignore_eos": True}
        )
        await anext(aiter(stream))
        await stream.close()

    async def wrong(client):
        with pytest.raises(openai.BadRequestError):
            await client.completions.create(model="tiny", prompt="a", max_tokens=10_000)

    async def everyone():
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            kinds = [
                one(client, seed, stream)
                for seed in range(len(PROMPTS))
                for stream in (False, True)
            ]
            kinds += [given_up(client, text) for text in PROMPTS[:2]] + [wrong(client)]
            await asyncio.gather(*kinds)

    asyncio.run(asyncio.wait_for(everyone(), 60))
    server.wait_for(lambda: server.backend.engine.is_idle)
    stats = server.backend.engine.stats()
    assert (stats.queued, stats.running) == (0, 0)
    assert stats.pages_used == stats.pages_cached


def test_log_probabilities_of_a_prompt(server):
    with server.openai() as client:
        answer = client.completions.create(
            model="tiny", prompt="To be", max_tokens=1, echo=True, logprobs=1, temperature=0
        )
    logprobs = answer.choices[0].logprobs
    assert logprobs.token_logprobs[0] is None
    assert all(value < 0 for value in logprobs.token_logprobs[1:])
    assert answer.choices[0].text.startswith("To be")
    assert logprobs.text_offset[:2] == [0, 0]


def test_a_second_request_finds_the_first_ones_prefix(server):
    body = {"prompt": "y" * 130, "max_tokens": 1}
    cold = server.post("/v1/completions", json=body).json()["usage"]
    warm = server.post("/v1/completions", json=body).json()["usage"]
    assert cold["prompt_tokens_details"]["cached_tokens"] <= 1  # BOS
    assert warm["prompt_tokens_details"]["cached_tokens"] >= 64


def test_metrics_of_the_engine(server):
    text = server.get("/metrics").text
    generated = server.backend.engine.stats().generated_tokens
    assert generated > 0
    assert f"openv41_generated_tokens_total {float(generated)}" in text
