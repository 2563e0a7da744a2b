"""Chats in the prompt format over the engine: images, reasoning, tools, formats of answers."""

import json

import jsonschema_rs
import openai
import pytest

from openv41.engine.async_engine import AsyncEngine
from openv41.engine.engine import Engine, EngineConfig
from openv41.engine.paged_store import CacheConfig
from openv41.engine.request import Request
from openv41.engine.sampler import SamplingConfig
from openv41.io.image_processor import load_image, process_image
from openv41.prompt import Conversation, Image, Message, encode
from openv41.prompt.tokens import DSML, IMAGE, THINK, THINK_END
from openv41.server.app import make_service
from openv41.server.backend import ServedModel
from openv41.server.limits import Limits
from tests.server.conftest import served
from tests.server.seeing import VISION, data_url, image_part, make_seeing, png

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "question"}]
CHATTING = {"thinking": {"type": "disabled"}}
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Berlin"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
        "note": {"type": "string", "maxLength": 8},
        "where": {
            "type": "object",
            "properties": {"at": {"type": ["boolean", "null"]}},
            "required": ["at"],
            "additionalProperties": False,
        },
    },
    "required": ["city", "where"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    checkpoint = make_seeing(tmp_path_factory.mktemp("seeing"), std=0.3)
    return Engine.load(
        checkpoint,
        numerics="f32",
        config=EngineConfig(cache=CacheConfig(num_pages=256, max_requests=4)),
    )


@pytest.fixture(scope="module")
def server(engine):
    model = ServedModel.of(engine, "seeing")
    service = make_service(
        AsyncEngine(engine), model, limits=Limits(max_concurrency=4), stats=engine.stats
    )
    with served(service) as running:
        yield running


@pytest.fixture
def client(server):
    with server.openai(timeout=60) as client:
        yield client


def ask(client, messages=HELLO, **options):
    extra = {"return_token_ids": True, **options.pop("extra_body", {})}
    settings = {"model": "seeing", "seed": 0, "max_tokens": 8, **options}
    return client.chat.completions.create(messages=messages, extra_body=extra, **settings)


def special(server, text):
    return server.service.model.tokenizer.special_id(text)


def question(data):
    return [{"role": "user", "content": [image_part(data), {"type": "text", "text": "what?"}]}]


def test_an_image_over_http_is_that_of_the_engine(engine, server, client):
    images = [process_image(load_image(png(seed)), VISION) for seed in (1, 2)]
    answers = [
        ask(client, question(png(seed)), logprobs=True, temperature=0, extra_body=CHATTING)
        for seed in (1, 2)
    ]
    prompt = encode(Conversation([Message("user", [Image(0), "what?"])], thinking=False))
    ids = []
    for token in prompt.token_ids(engine.tokenizer):
        is_image = token == special(server, IMAGE)
        ids += [token] * (images[0].grid.span_length if is_image else 1)
    assert images[0].grid.span_length == images[1].grid.span_length == 5
    requests = [
        Request(
            prompt=tuple(ids),
            images=(image,),
            max_tokens=8,
            sampling=SamplingConfig(temperature=0.0),
            logprobs=0,
        )
        for image in images
    ]
    wanted = engine_alone(engine).generate(requests)
    found = []
    for answer, want in zip(answers, wanted, strict=True):
        body = answer.model_dump()
        assert body["prompt_token_ids"] == ids
        assert answer.usage.prompt_tokens == len(ids)
        logprobs = [entry.logprob for entry in answer.choices[0].logprobs.content]
        assert logprobs == pytest.approx([x.logprob for x in want.logprobs], abs=1e-4)
        assert tuple(body["choices"][0]["token_ids"][: len(want.tokens)]) == want.tokens
        found.append(logprobs)
    assert found[0] != pytest.approx(found[1], abs=1e-4)  # equal ids, other images


def engine_alone(engine):
    """The same model in an engine of its own."""
    return Engine(engine.model, engine.tokenizer, engine.config)
