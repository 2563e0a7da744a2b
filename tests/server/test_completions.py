"""``/v1/completions`` as the official client sees it."""

import asyncio
import json
from dataclasses import fields, replace

import pytest

from openv41.server.backend import ServedModel
from openv41.server.image_loader import ImageLoader
from openv41.server.limits import Limits
from openv41.server.plans import make_plan
from openv41.server.schemas import CompletionBody
from tests.server.fake import BOS


def test_text_comes_back_with_usage(client, server):
    answer = client.completions.create(model="echo", prompt="hello", seed=0)
    assert (answer.object, answer.model) == ("text_completion", "echo")
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.logprobs) == ("hello", "stop", None)
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (6, 5, 11)
    assert usage.prompt_tokens_details.cached_tokens == 1
    (request,) = server.backend.seen
    assert request.prompt == (BOS, *server.service.model.tokenizer.encode("hello"))
    assert request.max_tokens == 16


def test_biases_are_read_once_for_all_choices(model):
    class Counting(ServedModel):
        asked = 0

        def is_token(self, token):
            Counting.asked += 1
            return super().is_token(token)

    about = {field.name: getattr(model, field.name) for field in fields(model) if field.init}
    body = CompletionBody(prompt="hello", n=100, seed=7, logit_bias={"5": 1.0, "6": -2.0})
    plan = asyncio.run(make_plan(body, Counting(**about), Limits(), ImageLoader()))
    assert Counting.asked == 2
    assert [request.sampling.seed for request in plan.requests] == list(range(7, 107))
    first, *others = plan.requests
    assert first.sampling.logit_bias == ((5, 1.0), (6, -2.0))
    for request in others:
        assert replace(request.sampling, seed=7) == first.sampling
        for name in (field.name for field in fields(first) if field.name != "sampling"):
            assert getattr(request, name) == getattr(first, name), name


def test_length_ends_an_answer(client):
    answer = client.completions.create(model="echo", prompt="abcde", seed=0, max_tokens=3)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("abc", "length")


def test_prompts_times_n_are_choices_in_order(client, server):
    answer = client.completions.create(model="echo", prompt=["abc", "xy"], n=2, seed=4)
    assert [(c.index, c.text) for c in answer.choices] == [
        (0, "bca"),  # seed 4 begins at place 1 of 3
        (1, "cab"),
        (2, "xy"),
        (3, "yx"),
    ]
    assert [request.sampling.seed for request in server.backend.seen] == [4, 5, 4, 5]
    assert answer.usage.prompt_tokens == 4 + 3  # each prompt once
    assert answer.usage.completion_tokens == 3 + 3 + 2 + 2


def test_without_a_seed_choices_differ(client, server):
    client.completions.create(model="echo", prompt="hello", n=3)
    client.completions.create(model="echo", prompt="hello", n=3)
    assert len({request.sampling.seed for request in server.backend.seen}) == 6


@pytest.mark.parametrize("seed", [-1, (1 << 63) - 1, 1 << 80])
def test_every_seed_is_taken(client, server, seed):
    client.completions.create(model="echo", prompt="hello", n=2, seed=seed)
    first, second = (request.sampling.seed for request in server.backend.seen)
    assert (first, second) == (seed % (1 << 63), (seed + 1) % (1 << 63))


def test_token_ids_are_taken_as_they_are(client, server):
    tokens = server.service.model.tokenizer.encode("hey")
    client.completions.create(model="echo", prompt=tokens, seed=0)
    answer = client.completions.create(model="echo", prompt=[tokens, tokens[:2]], seed=0)
    assert [choice.text for choice in answer.choices] == ["hey", "he"]
    assert [r.prompt for r in server.backend.seen] == [
        tuple(tokens),
        tuple(tokens),
        tuple(tokens[:2]),
    ]


def test_bos_can_be_left_out(client, server):
    options = {"add_special_tokens": False}
    client.completions.create(model="echo", prompt="hey", extra_body=options)
    assert len(server.backend.seen[0].prompt) == 3


def test_token_ids_are_returned(client, server):
    tokens = server.service.model.tokenizer.encode("hey")
    options = {"return_token_ids": True}
    answer = client.completions.create(model="echo", prompt="hey", seed=0, extra_body=options)
    choice = answer.choices[0].model_dump()
    assert choice["prompt_token_ids"] == [BOS, *tokens]
    assert choice["token_ids"] == tokens


def test_token_ids_are_streamed(client, server):
    tokens = server.service.model.tokenizer.encode("hey")
    options = {"return_token_ids": True}
    stream = client.completions.create(
        model="echo", prompt="hey", seed=0, stream=True, extra_body=options
    )
    pieces = [chunk.choices[0].model_dump() for chunk in stream]
    assert [p.get("prompt_token_ids") for p in pieces] == [[BOS, *tokens], None, None, None]
    assert [t for p in pieces for t in p["token_ids"]] == tokens


def test_every_sampling_field_arrives(client, server):
    client.completions.create(
        model="echo",
        prompt="hello",
        max_tokens=2,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.1,
        frequency_penalty=-0.2,
        logit_bias={"7": 5, "8": -1.5},
        seed=3,
        stop=["q", "r"],
        logprobs=2,
        user="somebody",
        extra_body={
            "top_k": 4,
            "min_p": 0.05,
            "repetition_penalty": 1.1,
            "stop_token_ids": [9],
            "ignore_eos": True,
            "prompt_logprobs": 1,
        },
    )
    (request,) = server.backend.seen
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 4)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.05, 1.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.1, -0.2)
    assert (sampling.logit_bias, sampling.seed) == (((7, 5.0), (8, -1.5)), 3)
    assert (request.stop, request.stop_ids, request.ignore_eos) == (("q", "r"), (9,), True)
    assert (request.logprobs, request.prompt_logprobs, request.max_tokens) == (2, 1, 2)


@pytest.mark.parametrize("top_k", [-1, 0, None])
def test_all_tokens_may_be_drawn(client, server, top_k):
    client.completions.create(model="echo", prompt="a", extra_body={"top_k": top_k})
    assert server.backend.seen[0].sampling.top_k is None


def test_streaming_gives_the_same_text(client):
    stream = client.completions.create(model="echo", prompt="hello", seed=1, stream=True)
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "elloh"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * 5 + ["stop"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_streaming_several_choices(client):
    stream = client.completions.create(model="echo", prompt="abc", n=3, seed=0, stream=True)
    texts = ["", "", ""]
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == ["abc", "bca", "cab"]


def test_usage_comes_last_where_asked_for(client):
    stream = client.completions.create(
        model="echo", prompt="hello", stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    assert (last.choices, last.usage.total_tokens) == ([], 11)
    assert all(chunk.usage is None for chunk in chunks)


def test_the_stream_on_the_wire(server):
    body = {"prompt": "ab", "seed": 0, "stream": True, "stream_options": {"include_usage": True}}
    answer = server.post("/v1/completions", json=body)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-store"
    *events, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    parsed = [json.loads(event.removeprefix("data: ")) for event in events]
    assert parsed[0]["choices"] == [
        {"index": 0, "text": "a", "logprobs": None, "finish_reason": None}
    ]
    assert [event["usage"] for event in parsed[:-1]] == [None] * 3


def test_logprobs(client):
    answer = client.completions.create(model="echo", prompt="abc", seed=0, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens == ["a", "b", "c"]
    assert logprobs.token_logprobs == [-0.5] * 3
    assert logprobs.text_offset == [0, 1, 2]
    assert len(logprobs.top_logprobs) == 3
    assert logprobs.top_logprobs[0]["a"] == -0.5
    assert sorted(logprobs.top_logprobs[0].values()) == [-1.5, -0.5]


def test_logprobs_are_streamed(client):
    stream = client.completions.create(model="echo", prompt="abc", seed=0, logprobs=0, stream=True)
    found = [chunk.choices[0].logprobs for chunk in stream]
    assert [logprobs.tokens for logprobs in found] == [["a"], ["b"], ["c"], []]
    assert [logprobs.text_offset for logprobs in found] == [[0], [1], [2], []]
    assert found[0].top_logprobs == [None]


def test_an_impossible_token_has_a_finite_logprob(client):
    answer = client.completions.create(model="echo", prompt="a", logprobs=3)
    assert min(answer.choices[0].logprobs.top_logprobs[0].values()) == -9999.0


def test_tokens_that_are_no_character_show_their_bytes(client, server):
    tokens = server.service.model.tokenizer.encode("\u00e9")
    assert len(tokens) == 2
    answer = client.completions.create(model="echo", prompt=tokens, seed=0, logprobs=1)
    assert answer.choices[0].logprobs.tokens == ["bytes:\\xc3", "bytes:\\xa9"]


def test_tokens_by_their_ids(client):
    options = {"return_tokens_as_token_ids": True}
    answer = client.completions.create(
        model="echo", prompt=[50, 51], seed=0, logprobs=1, extra_body=options
    )
    assert answer.choices[0].logprobs.tokens == ["token_id:50", "token_id:51"]


@pytest.mark.parametrize("stream", [False, True])
def test_echo(client, stream):
    answer = client.completions.create(model="echo", prompt="abc", seed=1, echo=True, stream=stream)
    chunks = list(answer) if stream else [answer]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "abcbca"


def test_echo_with_logprobs(client, server):
    answer = client.completions.create(
        model="echo", prompt="abc", seed=0, echo=True, logprobs=1, max_tokens=1
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens[1:] == ["a", "b", "c", "a"]
    assert logprobs.token_logprobs == [None, -0.5, -0.5, -0.5, -0.5]
    assert logprobs.text_offset == [0, 0, 1, 2, 3]
    assert logprobs.top_logprobs == [None, {"a": -0.5}, {"b": -0.5}, {"c": -0.5}, {"a": -0.5}]
    assert server.backend.seen[0].prompt_logprobs == 1


def test_prompt_logprobs(client, server):
    tokens = server.service.model.tokenizer.encode("ab")
    options = {"prompt_logprobs": 2}
    answer = client.completions.create(model="echo", prompt=tokens, seed=0, extra_body=options)
    first, second = answer.choices[0].model_dump()["prompt_logprobs"]
    assert first is None
    assert second[str(tokens[1])] == {"logprob": -0.5, "decoded_token": "b"}
    assert len(second) == 2


def test_stop_strings(client):
    answer = client.completions.create(model="echo", prompt="abcd", seed=0, stop="c")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("ab", "stop")


def test_ignore_eos(client):
    options = {"ignore_eos": True}
    answer = client.completions.create(
        model="echo", prompt="ab", seed=0, max_tokens=5, extra_body=options
    )
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("ababa", "length")


def test_empty_text_is_bos_alone(client, server):
    client.completions.create(model="echo", prompt="")
    assert server.backend.seen[0].prompt == (BOS,)


def test_the_default_length_fits_the_model(client, server):
    client.completions.create(model="echo", prompt="a" * 508)
    assert server.backend.seen[0].max_tokens == 512 - 509


def test_null_means_not_given(server):
    names = ("max_tokens", "temperature", "top_p", "n", "stop", "seed", "logit_bias", "stream",
             "logprobs", "echo", "best_of", "suffix", "user", "stream_options")  # fmt: skip
    answer = server.post("/v1/completions", json={"prompt": "a", **dict.fromkeys(names)})
    assert answer.status_code == 200, answer.text
    assert server.backend.seen[0].sampling.temperature == 1.0
