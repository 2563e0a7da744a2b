"""Every refusal is the API's own error JSON with the right status, and disturbs nobody."""

import http.client
import json
import socket
import sys
import threading
import time

import openai
import pytest

from openv41.errors import ConfigError
from openv41.server.limits import Limits
from openv41.server.run import listen

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]
NAMED = {"type": "function", "function": {"name": "g"}}
CALL = {"type": "function", "function": {"name": 'a"b', "arguments": "{}"}}


def error_of(answer, status):
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    (only,) = answer.json()
    assert only == "error"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    ("body", "param", "text"),
    [
        ({}, "prompt", "prompt: Field required"),
        ({"prompt": None}, "prompt", "must be a text, texts, token ids, or lists of token ids"),
        ({"prompt": 7}, "prompt", "must be a text, texts"),
        ({"prompt": []}, "prompt", "at least 1 item"),
        ({"prompt": [[]]}, "prompt", "at least 1 item"),
        ({"prompt": ["a", 1]}, "prompt", "valid string"),
        ({"prompt": [1, "a"]}, "prompt", "valid integer"),
        ({"prompt": [1.0]}, "prompt", "valid integer"),
        ({"prompt": [True]}, "prompt", "valid integer"),
        ({"prompt": [-1]}, "prompt", "greater than or equal to 0"),
        ({"prompt": [259]}, "prompt", "token id 259 is outside the vocabulary of 259"),
        ({"prompt": "", "add_special_tokens": False}, "prompt", "holds no token"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"prompt": "a", "max_tokens": "3"}, "max_tokens", "valid integer"),
        ({"prompt": "a", "n": 0}, "n", "greater than or equal to 1"),
        ({"prompt": "a", "n": 129}, "n", "prompts times n is 129, must be at most 128"),
        ({"prompt": "a", "n": 2, "best_of": 3}, None, "best_of must equal n"),
        ({"prompt": "a", "temperature": -0.1}, "temperature", "greater than or equal to 0"),
        ({"prompt": "a", "top_p": 0}, "top_p", "greater than 0"),
        ({"prompt": "a", "top_k": -2}, "top_k", "greater than or equal to -1"),
        ({"prompt": "a", "logprobs": 21}, "logprobs", "less than or equal to 20"),
        ({"prompt": "a", "logprobs": True}, "logprobs", "valid integer"),
        ({"prompt": "a", "stop": ""}, "stop", "at least 1 character"),
        ({"prompt": "a", "stop": ["b"] * 17}, "stop", "at most 16 items"),
        ({"prompt": "a", "stop": "b" * 1025}, "stop", "at most 1024 characters"),
        ({"prompt": "a", "stop": ["b", "b" * 1025]}, "stop", "at most 1024 characters"),
        ({"prompt": "a", "stop_token_ids": [300]}, "stop_token_ids", "token id 300 is outside"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias", "'x' is no token id"),
        ({"prompt": "a", "logit_bias": {"300": 1}}, "logit_bias", "token id 300 is outside"),
        ({"prompt": "a", "logit_bias": {"3": 101}}, "logit_bias", "less than or equal to 100"),
        ({"prompt": "a", "suffix": "b"}, None, "suffix cannot be used here"),
        ({"prompt": "a", "top_q": 1}, "top_q", "unknown field 'top_q'; did you mean 'top_p'?"),
        ({"prompt": "\ud800"}, "prompt", "lone surrogate at character 0"),
        ({"prompt": ["a", "b\ud800"]}, "prompt", "lone surrogate at character 1"),
        ({"prompt": "a", "stop": ["\ud800"]}, "stop", "as a unicode string"),
        ({"prompt": "a", "stream_options": {}}, None, "stream_options needs stream"),
        ({"prompt": "a", "stream": True, "prompt_logprobs": 1}, None, "cannot be streamed"),
    ],
)
def test_completions_that_cannot_be(server, body, param, text):
    error = error_of(server.post(COMPLETIONS, content=json.dumps(body)), 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert text in error["message"]
    assert not server.backend.seen


@pytest.mark.parametrize(
    ("body", "param", "text"),
    [
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages", "'system'"),
        ({"messages": [{"role": "user"}]}, "messages", "a user message needs content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages",
            "image_url.url: Field required",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "messages", "'text'"),
        ({"messages": MESSAGES, "top_logprobs": 2}, None, "top_logprobs needs logprobs"),
        ({"messages": MESSAGES, "tools": TOOLS}, "tools", "lacks the prompt format's special"),
        ({"messages": MESSAGES, "thinking": {"type": "enabled"}}, "thinking", "lacks the prompt"),
        ({"messages": MESSAGES, "reasoning_effort": "low"}, "reasoning_effort", "lacks the prompt"),
        ({"messages": MESSAGES, "add_generation_prompt": False}, "add_generation_prompt", "lacks"),
        ({"messages": [*MESSAGES, {"role": "tool", "content": ""}]}, "messages", "[1].role cannot"),
        (
            {"messages": MESSAGES, "response_format": {"type": "xml"}},
            None,
            "must have type text, json_object, or json_schema",
        ),
        ({"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens", "writes BOS"),
        ({"messages": [{**MESSAGES[0], "tool_calls": [1]}]}, "messages", "valid dictionary"),
        ({"messages": MESSAGES, "functions": [{}]}, None, "functions cannot be used here: use"),
        (
            {
                "messages": MESSAGES,
                "add_generation_prompt": True,
                "continue_final_message": True,
            },
            None,
            "exclude each other",
        ),
    ],
)
def test_chats_that_cannot_be(server, body, param, text):
    error = error_of(server.post(CHAT, json=body), 400)
    assert error["param"] == param
    assert text in error["message"]
    assert not server.backend.seen


def of_schema(schema):
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


@pytest.mark.parametrize(
    ("options", "param", "text"),
    [
        ({"reasoning_effort": 0}, None, "effort is 0, must be an integer from 1 to 100"),
        ({"reasoning_effort": 101}, None, "effort is 101"),
        ({"reasoning_effort": True}, None, "effort is True"),
        ({"reasoning_effort": 2.5}, None, "effort is 2.5"),
        ({"reasoning_effort": "medium"}, None, "or one of low, high, max"),
        (
            {"thinking": {"type": "enabled"}, "chat_template_kwargs": {"thinking": False}},
            "thinking",
            "switches thinking both on and off",
        ),
        ({"thinking": {"type": "enabled"}, "reasoning_effort": "none"}, "thinking", "both on"),
        ({"tools": [{}]}, None, "must be {'type': 'function'"),
        ({"tools": [{"type": "code"}]}, None, "must be {'type': 'function'"),
        ({"tools": TOOLS, "tool_choice": "always"}, None, "must be one of auto, none, required"),
        ({"tools": TOOLS, "tool_choice": NAMED}, None, "tools: ['f']"),
        ({"tool_choice": "required"}, None, "there are no tools to call"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}]},
            None,
            "its parameters must be the schema of an object",
        ),
        ({"response_format": of_schema({"type": "texts"})}, None, "Invalid type: texts"),
        (
            {"response_format": of_schema({"type": "array", "uniqueItems": True})},
            None,
            "cannot be enforced: Unimplemented keys",
        ),
        ({"response_format": of_schema(7)}, None, "must have type text, json_object"),
        (
            {"response_format": {"type": "json_object"}, "add_generation_prompt": False},
            None,
            "need an answer that starts behind the prompt",
        ),
        ({"continue_final_message": True}, None, "only one of the assistant can be continued"),
        (
            {
                "messages": [*MESSAGES, {"role": "assistant", "content": "no"}],
                "continue_final_message": True,
                "response_format": {"type": "json_object"},
            },
            None,
            "'no', which is to be continued, does not fit",
        ),
        (
            {"messages": [{"role": "user", "content": "", "reasoning_content": "a"}]},
            "messages",
            "messages[0]: a user message has reasoning",
        ),
        (
            {"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [CALL]}]},
            "messages",
            "must not hold quotes",
        ),
        ({"messages": [{"role": "user", "content": "", "task": "sing"}]}, "messages", "task is"),
        ({"messages": [{**MESSAGES[0], "task": "title"}]}, None, "has no special token"),
    ],
)
def test_chats_that_the_format_refuses(formatted, options, param, text):
    formatted.backend.seen.clear()
    error = error_of(formatted.post(CHAT, json={"messages": MESSAGES, **options}), 400)
    assert error["type"] == "invalid_request_error"
    assert text in error["message"]
    assert error["param"] == param
    assert not formatted.backend.seen


@pytest.mark.parametrize(
    "options",
    [
        {"tools": TOOLS},
        {"tools": TOOLS, "tool_choice": "required"},
        {"response_format": {"type": "json_object"}},
    ],
)
def test_without_the_grammar_library(formatted, monkeypatch, options):
    """What cannot be enforced is refused, not ignored; all else is answered."""
    monkeypatch.setitem(sys.modules, "llguidance", None)
    error = error_of(formatted.post(CHAT, json={"messages": MESSAGES, **options}), 400)
    assert "pip install 'openv41[grammar]'" in error["message"]
    for free in (
        {},
        {"tools": TOOLS, "tool_choice": "none"},
        {"response_format": {"type": "text"}},
    ):
        body = {"messages": MESSAGES, "max_tokens": 1, **free}
        assert formatted.post(CHAT, json=body).status_code == 200


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"nonsense", b"[]", b'"text"', b"null", b"\xff\xfe", b"[" * 100_000, b"NaN",
     b'{"prompt": "a", "\\ud800": 1}', b'{"prompt": "a", "logit_bias": {"\\ud800": 1}}',
     b'{"prompt": "a", "temperature": NaN}', b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}"],
)  # fmt: skip
def test_bodies_that_are_no_request(server, content):
    error = error_of(server.post(COMPLETIONS, content=content), 400)
    assert error["type"] == "invalid_request_error"


def test_the_official_client_raises_its_own_errors(client):
    with pytest.raises(openai.BadRequestError, match="temperature: Input should be greater") as e:
        client.completions.create(model="echo", prompt="a", temperature=-1)
    assert (e.value.param, e.value.code) == ("temperature", "invalid_value")
    with pytest.raises(openai.NotFoundError, match="no model 'gpt'; it serves 'echo'") as e:
        client.chat.completions.create(model="gpt", messages=MESSAGES)
    assert e.value.code == "model_not_found"
    with pytest.raises(openai.RateLimitError, match="the engine's queue is full"):
        client.completions.create(model="echo", prompt="!full")
    with pytest.raises(openai.RateLimitError, match="the engine's queue is full"):
        client.completions.create(model="echo", prompt="!full", stream=True)


@pytest.mark.parametrize("word", ["!raise", "!error"])
def test_an_engine_that_fails_ends_one_request(client, server, word):
    with pytest.raises(openai.InternalServerError, match="internal error") as caught:
        client.completions.create(model="echo", prompt=f"{word} it")
    stream = client.completions.create(model="echo", prompt=f"{word} it", seed=0, stream=True)
    said = []
    with pytest.raises(openai.APIError, match="internal error"):
        said.extend(chunk.choices[0].text for chunk in stream)
    assert said == list(word[:2])
    assert "no page left" not in str(caught.value), "what went wrong inside is for the log"
    server.wait_for(server.is_idle)
    assert client.completions.create(model="echo", prompt="on", seed=0).choices[0].text == "on"


def test_an_error_of_the_requests_own_is_a_refusal(client, server):
    answer = server.post(COMPLETIONS, json={"prompt": "!fault"})
    assert error_of(answer, 400)["code"] == "constraint_failed"
    stream = client.completions.create(model="echo", prompt="!fault", seed=0, stream=True)
    with pytest.raises(openai.APIError, match="the answer cannot go on: too complex"):
        list(stream)


def test_one_failure_ends_the_choices_beside_it(server):
    answer = server.post(COMPLETIONS, json={"prompt": ["!hang", "!raise", "!hang"]})
    assert error_of(answer, 500)["code"] == "internal_error"
    server.wait_for(server.is_idle)
    assert server.backend.cancelled == 2


def test_routes_and_methods(server):
    assert "nothing at '/v2'" in error_of(server.get("/v2"), 404)["message"]
    assert error_of(server.get("/v1/models/gpt"), 404)["code"] == "model_not_found"
    answer = server.get(COMPLETIONS)
    assert "does not take GET" in error_of(answer, 405)["message"]
    assert answer.headers["allow"] == "POST"


def test_lengths(start):
    server = start(max_prompt_tokens=10, max_output_tokens=20)
    for body, code, text in [
        (
            {"prompt": "a" * 10},
            "context_length_exceeded",
            "prompt has 11 tokens, must be at most 10",
        ),
        (
            {"prompt": "a", "max_tokens": 21},
            "invalid_value",
            "max_tokens is 21, must be at most 20",
        ),
    ]:
        error = error_of(server.post(COMPLETIONS, json=body), 400)
        assert error["code"] == code
        assert text in error["message"]
    assert server.post(COMPLETIONS, json={"prompt": "a" * 9, "max_tokens": 20}).status_code == 200


def test_what_the_model_holds(server):
    for prompt, tokens, text in [
        ("a" * 511, 1, "prompt has 512 tokens, must be at most 511"),
        ("a" * 500, 12, "prompt has 501 tokens and max_tokens is 12; together at most 512 fit"),
    ]:
        body = {"prompt": prompt, "max_tokens": tokens}
        error = error_of(server.post(COMPLETIONS, json=body), 400)
        assert error["code"] == "context_length_exceeded"
        assert text in error["message"]
    body = {"prompt": "a" * 500, "max_tokens": 11}
    assert server.post(COMPLETIONS, json=body).status_code == 200


def test_large_bodies(start):
    server = start(max_body_bytes=1000)
    for size in (1001, 1999, 100_000):
        answer = server.post(COMPLETIONS, content=b" " * size)
        assert error_of(answer, 413)["code"] == "body_too_large"
        assert "larger than 1000 bytes" in answer.json()["error"]["message"]
    pieces = (b" " * 100 for _ in range(15))  # sent without a length
    error_of(server.post(COMPLETIONS, content=pieces), 413)
    body = json.dumps({"prompt": "a"}).encode().ljust(1000)
    assert server.post(COMPLETIONS, content=body).status_code == 200


def test_slow_bodies(start):
    server = start(body_seconds=0.3)
    with socket.create_connection(server.url.removeprefix("http://").split(":"), 5) as line:
        line.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
        answer = http.client.HTTPResponse(line)
        answer.begin()
        assert answer.status == 408
        assert json.loads(answer.read())["error"]["code"] == "body_timeout"
        answer.close()


def test_who_is_refused_is_read_to_its_end_or_for_a_bounded_time(start):
    """A socket that is closed with unread bytes resets, and may take our words from the client."""
    server = start(api_key="secret")
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n"
    waited = []
    for later in (b"123456789", b""):
        with socket.create_connection(server.url.removeprefix("http://").split(":"), 5) as line:
            began = time.monotonic()
            line.sendall(head)
            time.sleep(0.1)
            line.sendall(later)
            answer = http.client.HTTPResponse(line)
            answer.begin()
            waited.append(time.monotonic() - began)
            assert answer.status == 401
            assert json.loads(answer.read())["error"]["code"] == "invalid_api_key"
            answer.close()
    assert 0.1 < waited[0] < 1.0 <= waited[1]


def test_small_pieces_leave_at_once():
    with listen("127.0.0.1", 0) as sock, socket.create_connection(sock.getsockname()):
        served, _ = sock.accept()
        with served:
            assert served.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_full_queue(start):
    server = start(max_concurrency=1, max_queue=1)
    threads = [
        threading.Thread(target=server.post, args=(COMPLETIONS,), kwargs={"json": {"prompt": word}})
        for word in ("!wait one", "!wait two")
    ]
    for thread in threads:
        thread.start()
    server.wait_for(lambda: server.service.gate.running == server.service.gate.waiting == 1)
    assert server.backend.running == 1
    with server.openai() as client, pytest.raises(openai.RateLimitError, match="2 of 2 places"):
        client.completions.create(model="echo", prompt="three")
    answer = server.post(COMPLETIONS, json={"prompt": "three"})
    assert error_of(answer, 429)["code"] == "queue_full"
    assert answer.headers["retry-after"] == "1"
    server.backend.released = True
    for thread in threads:
        thread.join()
    assert server.post(COMPLETIONS, json={"prompt": "three"}).status_code == 200
    error = error_of(server.post(COMPLETIONS, json={"prompt": ["a", "b", "c"]}), 400)
    assert "asks for 3 choices, this server holds at most 2" in error["message"]


def test_choices_of_one_request_take_turns(start):
    server = start(max_concurrency=2)
    body = {"prompt": ["!wait a", "!wait b", "!wait c"], "seed": 0, "max_tokens": 3}
    answers = []
    thread = threading.Thread(target=lambda: answers.append(server.post(COMPLETIONS, json=body)))
    thread.start()
    server.wait_for(lambda: server.service.gate.waiting == 1)
    assert server.backend.running == 2
    server.backend.released = True
    thread.join()
    assert [choice["text"] for choice in answers[0].json()["choices"]] == ["!wa"] * 3


def test_time_is_limited(start):
    server = start(request_seconds=0.5)
    began = time.monotonic()
    error = error_of(server.post(COMPLETIONS, json={"prompt": "!hang"}), 504)
    assert (error["code"], error["message"]) == ("request_timeout", "no answer within 0.5 s")
    answer = server.post(COMPLETIONS, json={"prompt": "!hang", "seed": 0, "stream": True})
    first, last, rest = answer.text.split("\n\n")
    assert json.loads(first.removeprefix("data: "))["choices"][0]["text"] == "!"
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "request_timeout"
    assert rest == ""
    assert 1 <= time.monotonic() - began < 3
    server.wait_for(server.is_idle)
    assert server.backend.cancelled == 2


def test_the_key_is_asked_for(start):
    server = start(api_key="secret")
    for headers in ({}, {"authorization": "Bearer other"}, {"authorization": "secret"}):
        answer = server.get("/v1/models", headers=headers)
        assert error_of(answer, 401)["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
    with server.openai(api_key="secret") as client:
        assert [model.id for model in client.models.list()] == ["echo"]
    with server.openai(api_key="wrong") as client, pytest.raises(openai.AuthenticationError):
        client.completions.create(model="echo", prompt="a")
    assert server.get("/health").status_code == 200  # for load balancers
    assert not server.backend.seen


def test_limits_are_checked():
    with pytest.raises(ConfigError, match=r"2 problem\(s\)(?s:.*)max_concurrency is 0"):
        Limits(max_concurrency=0, max_queue=-1)
    with pytest.raises(ConfigError, match="request_seconds is inf, must be at least 0 and finite"):
        Limits(request_seconds=float("inf"))


def test_chats_of_too_many_messages(start):
    server = start(max_messages=3)
    assert server.post(CHAT, json={"messages": MESSAGES * 3, "max_tokens": 1}).status_code == 200
    error = error_of(server.post(CHAT, json={"messages": MESSAGES * 4}), 400)
    assert (error["code"], error["param"]) == ("too_many_messages", "messages")
    assert error["message"] == "the chat has 4 messages, must be at most 3"
