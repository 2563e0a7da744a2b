"""Chats in the prompt format over the engine: images, reasoning, tools, formats of answers."""

import json

import jsonschema_rs
import pytest

from openv41.engine.engine import Engine, EngineConfig
from openv41.engine.paged_store import CacheConfig
from openv41.engine.request import Request
from openv41.engine.sampler import SamplingConfig
from openv41.io.image_processor import load_image, process_image
from openv41.prompt import Conversation, Image, Message, encode
from openv41.prompt.tokens import ASSISTANT, DSML, EOS, IMAGE, THINK, THINK_END, USER
from tests.io.tiny_checkpoint import make_seeing
from tests.layers.mini import VISION
from tests.server.conftest import serving
from tests.server.images import image_part, png

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "question"}]
CHATTING = {"thinking": {"type": "disabled"}}
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Berlin"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    checkpoint = make_seeing(tmp_path_factory.mktemp("seeing"))
    return Engine.load(
        checkpoint,
        numerics="f32",
        config=EngineConfig(cache=CacheConfig(num_pages=512, max_requests=20)),
    )


@pytest.fixture(scope="module")
def server(engine):
    with serving(engine, max_concurrency=20) as running:
        yield running


@pytest.fixture
def client(server):
    with server.openai(timeout=60) as client:
        yield client


def engine_alone(engine):
    """The same model in an engine of its own."""
    return Engine(engine.model, engine.tokenizer, engine.config)


def ask(client, messages=HELLO, **options):
    extra = {"return_token_ids": True, **options.pop("extra_body", {})}
    settings = {"model": "tiny", "seed": 0, "max_tokens": 8, **options}
    return client.chat.completions.create(messages=messages, extra_body=extra, **settings)


def special(server, text):
    return server.service.model.tokenizer.special_id(text)


def biased(server, *, thinks=False):
    """A bias with which reasoning ends soon and JSON has few blanks."""
    tokenizer = server.service.model.tokenizer
    blanks = {str(tokenizer.encode(blank)[0]): -50 for blank in (" ", "\n", "\t", "\n\n", "\n\n\n")}
    return {str(special(server, THINK_END)): 9, **blanks} if thinks else blanks


def whole_of(stream):
    """Join the pieces of one choice."""
    message, calls, finish = {"content": "", "reasoning_content": ""}, {}, None
    for chunk in stream:
        for choice in chunk.choices:
            delta = choice.delta.model_dump(exclude_none=True)
            for name in message:
                message[name] += delta.get(name, "")
            for piece in delta.get("tool_calls", ()):
                function = piece["function"]
                if piece["index"] not in calls:
                    assert piece["id"].startswith("call_")
                    calls[piece["index"]] = [function["name"], ""]
                calls[piece["index"]][1] += function["arguments"]
            finish = choice.finish_reason or finish
    return message, list(calls.values()), finish


def taken_apart(choice):
    """The same of a whole answer."""
    said = choice.message
    message = {
        "content": said.content or "",
        "reasoning_content": getattr(said, "reasoning_content", None) or "",
    }
    calls = [[c.function.name, c.function.arguments] for c in said.tool_calls or ()]
    return message, calls, choice.finish_reason


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


def test_reasoning_is_told_apart(server, client):
    bias = biased(server, thinks=True) | {str(special(server, THINK_END)): 5}
    options = {"max_tokens": 24, "logit_bias": bias, "seed": 2}  # which thinks, and then no more
    answer = ask(client, **options)
    message, calls, finish = taken_apart(answer.choices[0])
    assert message["reasoning_content"]
    assert THINK_END not in message["reasoning_content"] + message["content"]
    ids = answer.model_dump()["choices"][0]["token_ids"]
    text = server.service.model.tokenizer.decode(ids)
    assert text.startswith(message["reasoning_content"] + THINK_END)
    assert (calls, finish) == ([], "length")
    prompt = answer.model_dump()["prompt_token_ids"]
    assert prompt[-1] == special(server, THINK)
    assert whole_of(ask(client, stream=True, **options)) == (message, calls, finish)


@pytest.mark.parametrize(
    "extra",
    [
        {"thinking": {"type": "disabled"}},
        {"chat_template_kwargs": {"thinking": False}},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "none"},
    ],
)
def test_reasoning_is_switched_off(server, client, extra):
    answer = ask(client, extra_body=extra)
    assert answer.model_dump()["prompt_token_ids"][-1] == special(server, THINK_END)
    assert "reasoning_content" not in answer.choices[0].message.model_dump()


@pytest.mark.parametrize(
    ("effort", "number"), [("low", 50), ("high", 75), ("max", 100), (1, 1), (100, 100), (None, 75)]
)
def test_efforts(server, client, effort, number):
    extra = {} if effort is None else {"reasoning_effort": effort}
    prompt = ask(client, extra_body=extra, max_tokens=1).model_dump()["prompt_token_ids"]
    text = server.service.model.tokenizer.decode(prompt)
    assert f"Reasoning Effort: {number} (range" in text


@pytest.mark.parametrize(
    ("messages", "options", "end"),
    [
        (HELLO, {}, "question{A}{T}"),
        (HELLO, {"add_generation_prompt": False}, "{U}question"),
        ([*HELLO, {"role": "assistant", "content": "yes"}], {}, "{t}yes{E}{A}{T}"),
        (
            [*HELLO, {"role": "assistant", "content": "yes"}],
            {"add_generation_prompt": False},
            "{A}{T}{t}yes{E}",
        ),
        (
            [*HELLO, {"role": "assistant", "content": "yes"}],
            {"continue_final_message": True},
            "{A}{T}{t}yes",
        ),
        (
            [*HELLO, {"role": "assistant", "reasoning_content": "hm"}],
            {"continue_final_message": True},
            "{A}{T}hm",
        ),
        ([*HELLO, {"role": "assistant", "content": "yes", "prefix": True}], {}, "{T}{t}yes"),
        ([{"role": "developer", "content": "answer"}], {}, "{U}answer{A}{T}"),
    ],
)
def test_where_the_answer_begins(server, client, messages, options, end):
    prompt = ask(client, messages, extra_body=options, max_tokens=1).model_dump()[
        "prompt_token_ids"
    ]
    names = {"U": USER, "A": ASSISTANT, "T": THINK, "t": THINK_END, "E": EOS}
    assert server.service.model.tokenizer.decode(prompt).endswith(end.format(**names))


@pytest.mark.slow
@pytest.mark.parametrize(("choice", "thinks"), [("required", False), ("named", True)])
def test_forced_calls_fit_their_tool(server, client, choice, thinks):
    named = {"type": "function", "function": {"name": "weather"}}
    options = {
        "tools": TOOLS,
        "tool_choice": named if choice == "named" else choice,
        "temperature": 1.0,
        "max_tokens": 600,
        "extra_body": {} if thinks else CHATTING,
        "logit_bias": biased(server, thinks=thinks),
    }
    choices = ask(client, n=3, **options).choices
    for found in choices:
        message, calls, finish = taken_apart(found)
        assert finish == "tool_calls"
        assert found.message.content is None
        assert bool(message["reasoning_content"]) <= thinks
        check_calls(calls)
        if choice == "named":
            assert [name for name, _ in calls] == ["weather"]
    streamed = whole_of(ask(client, stream=True, **options))
    assert streamed == taken_apart(choices[0])


def check_calls(calls):
    for name, arguments in calls:
        if name == "weather":
            jsonschema_rs.validate(WEATHER, json.loads(arguments))
        else:
            assert (name, json.loads(arguments)) == ("now", {})


@pytest.mark.slow
def test_free_calls_fit_their_tool(server, client):
    """A model that may call or not, and is inclined to: the marker opens a block after '<'."""
    opens = server.service.model.tokenizer.encode("<")[0]
    answer = ask(
        client,
        tools=TOOLS,
        n=4,
        seed=5,  # two of whose answers call the tool with arguments
        max_tokens=90,
        logit_bias={**biased(server), str(special(server, DSML)): 30, str(opens): 8},
        parallel_tool_calls=False,
        extra_body=CHATTING,
    )
    called = 0
    for choice in answer.choices:
        _, calls, finish = taken_apart(choice)
        assert finish == "length" or (finish == "tool_calls") == bool(calls)
        assert len(calls) <= 1
        if finish == "tool_calls":
            check_calls(calls)
            called += calls[0][0] == "weather"
    assert called


def test_a_round_of_tools(server, client):
    first = ask(
        client,
        tools=TOOLS[1:],
        tool_choice="required",
        max_tokens=600,
        extra_body=CHATTING,
        logit_bias=biased(server),
    )
    said = first.choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": f"result {number}"}
        for number, call in enumerate(said.tool_calls)
    ]
    second = ask(client, [*HELLO, said.model_dump(), *reversed(results)], tools=TOOLS, max_tokens=1)
    prompt = server.service.model.tokenizer.decode(second.model_dump()["prompt_token_ids"])
    block = prompt.rpartition(f"<{DSML} calls>")[2]
    assert block.count(f"<{DSML} invoke") == len(said.tool_calls)
    wanted = "\n\n".join(f"<tool_result>{r['content']}</tool_result>" for r in results)
    assert wanted in block  # in the order of the calls


@pytest.mark.parametrize("thinks", [False, True])
def test_formats_are_kept(server, client, thinks):
    schema = {"name": "weather", "schema": WEATHER, "strict": True}
    options = {
        "response_format": {"type": "json_schema", "json_schema": schema},
        "temperature": 1.0,
        "max_tokens": 600,
        "extra_body": {} if thinks else CHATTING,
        "logit_bias": biased(server, thinks=thinks),
    }
    choices = ask(client, n=3, **options).choices
    for choice in choices:
        message, calls, finish = taken_apart(choice)
        assert (calls, finish) == ([], "stop")
        jsonschema_rs.validate(WEATHER, json.loads(message["content"]))
    assert len({choice.message.content for choice in choices}) > 1
    assert whole_of(ask(client, stream=True, **options)) == taken_apart(choices[0])


def test_formats_and_tools_together(server, client):
    schema = {"name": "weather", "schema": WEATHER}
    opens = server.service.model.tokenizer.encode("\n\n")[0]  # a block begins with it
    answer = ask(
        client,
        tools=TOOLS,
        response_format={"type": "json_schema", "json_schema": schema},
        n=6,
        max_tokens=600,
        extra_body=CHATTING,
        logit_bias={**biased(server), str(opens): 1},
    )
    kinds = set()
    for choice in answer.choices:
        message, calls, finish = taken_apart(choice)
        kinds.add(finish)
        if finish == "stop":
            jsonschema_rs.validate(WEATHER, json.loads(message["content"]))
        else:
            assert calls
            assert not message["content"]
            check_calls(calls)
    assert kinds == {"stop", "tool_calls"}


def test_a_begun_format_is_continued(client):
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["yes", "no"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    begun = [*HELLO, {"role": "assistant", "content": '{"a": "y'}]
    answer = ask(
        client,
        begun,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "a", "schema": schema},
        },
        extra_body={**CHATTING, "continue_final_message": True},
        max_tokens=90,
    )
    assert json.loads('{"a": "y' + answer.choices[0].message.content) == {"a": "yes"}
