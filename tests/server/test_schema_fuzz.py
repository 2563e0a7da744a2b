"""Bodies of any shape: an answer or a refusal, never a failure of the server."""

import json

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance

from openv41.server.schemas import FIELDS
from tests.server.images import data_url, png

TEXT = st.text(st.characters(codec=None), max_size=6)
SCALAR = st.one_of(st.none(), st.booleans(), st.integers(), st.integers(-2, 30), st.floats(), TEXT)
JSON = st.recursive(
    SCALAR,
    lambda below: st.lists(below, max_size=3) | st.dictionaries(TEXT, below, max_size=3),
    max_leaves=6,
)
PART = st.one_of(
    st.fixed_dictionaries({"type": st.just("text"), "text": TEXT}),
    st.sampled_from(["data:,a", "data:;base64,AAAA", data_url(png(1)), "https://a", ""]).map(
        lambda url: {"type": "image_url", "image_url": {"url": url}}
    ),
    st.fixed_dictionaries({"type": st.just("file"), "file": st.just({"file_data": "AA=="}) | JSON}),
)
CALL = st.fixed_dictionaries(
    {"function": st.fixed_dictionaries({"name": TEXT, "arguments": TEXT | st.just('{"a": 1}')})},
    optional={"id": TEXT, "type": st.just("function")},
)
ROLES = ["system", "user", "assistant", "developer", "tool", "latest_reminder"]
MESSAGE = st.fixed_dictionaries(
    {
        "role": st.sampled_from(ROLES) | JSON,
        "content": TEXT | st.lists(PART, max_size=2) | JSON,
    },
    optional={
        "name": JSON,
        "tool_calls": st.lists(CALL, max_size=2) | JSON,
        "tool_call_id": TEXT,
        "reasoning_content": TEXT,
        "prefix": st.booleans(),
        "task": st.sampled_from(["title", "action", "none"]),
    },
)
TYPE = st.sampled_from(["string", "integer", "object", "array", "null", "boolean", "text"])
SCHEMA = st.recursive(
    st.booleans() | st.fixed_dictionaries({}, optional={"type": TYPE | st.lists(TYPE)}),
    lambda below: st.fixed_dictionaries(
        {},
        optional={
            "type": TYPE,
            "properties": st.dictionaries(TEXT, below, max_size=2),
            "required": st.lists(TEXT, max_size=2),
            "anyOf": st.lists(below, max_size=2),
            "items": below,
            "enum": st.lists(SCALAR, max_size=2),
            "pattern": TEXT,
            "maxLength": st.integers(-1, 9),
            "additionalProperties": below,
            "$ref": st.sampled_from(["#", "#/$defs/a", "b"]),
            "$defs": st.just({"a": {"$ref": "#/$defs/a"}}),
        },
    ),
    max_leaves=5,
)
TOOL = st.builds(
    lambda name, schema: {"type": "function", "function": {"name": name, "parameters": schema}},
    TEXT,
    SCHEMA,
)
FORMAT = st.one_of(
    st.sampled_from([{"type": "text"}, {"type": "json_object"}]),
    SCHEMA.map(lambda schema: {"type": "json_schema", "json_schema": {"schema": schema}}),
)
HELLO = {"role": "user", "content": "hello"}
PROMPT = st.one_of(TEXT, st.lists(TEXT), st.lists(st.integers(-1, 260)), JSON)
SENSIBLE = {
    "n": st.integers(0, 3),
    "stream": st.booleans(),
    "echo": st.booleans(),
    "logprobs": st.integers(0, 21) | st.booleans(),
    "prompt_logprobs": st.integers(0, 21),
    "logit_bias": st.dictionaries(st.integers(-1, 300).map(str), st.floats(-101, 101)),
    "temperature": st.floats(-0.1, 3),
    "max_tokens": st.integers(-1, 600),
    "stop": TEXT | st.lists(TEXT, max_size=3),
    "model": st.sampled_from(["echo", "other"]),
    "tools": st.lists(TOOL, max_size=2) | JSON,
    "tool_choice": st.sampled_from(["auto", "none", "required"]) | JSON,
    "response_format": FORMAT | JSON,
    "reasoning_effort": st.sampled_from(["low", "none", 7, 101]) | JSON,
    "thinking": st.sampled_from([{"type": "enabled"}, {"type": "disabled"}]) | JSON,
}
ANY = {name: JSON for name in FIELDS if name not in SENSIBLE}


def bodies(required):
    every = {**ANY, **SENSIBLE}
    few = st.dictionaries(st.sampled_from(sorted(every)), st.none(), max_size=4)
    options = few.flatmap(lambda names: st.fixed_dictionaries({n: every[n] for n in names}))
    whole = st.builds(lambda options, own: {**options, **own}, options, required)
    return whole | st.dictionaries(TEXT, JSON, max_size=3) | JSON


@pytest.mark.property
@pytest.mark.parametrize(
    ("name", "path", "required"),
    [
        ("shared", "/v1/completions", {"prompt": PROMPT}),
        ("shared", "/v1/chat/completions", {"messages": st.lists(MESSAGE, max_size=3)}),
        ("formatted", "/v1/chat/completions", {"messages": st.lists(MESSAGE, max_size=3)}),
        ("formatted", "/v1/chat/completions", {"messages": st.just([HELLO])}),
    ],
)
def test_no_body_breaks_the_server(request, name, path, required):
    seen, shared = set(), request.getfixturevalue(name)
    least = {"prompt": "a"} if path == "/v1/completions" else {"messages": [HELLO]}

    @settings(max_examples=60, suppress_health_check=list(HealthCheck))
    @given(bodies(st.fixed_dictionaries(required)))
    @example(least)
    def send(body):
        answer = shared.post(path, content=json.dumps(body).encode())
        seen.add(answer.status_code)
        assert answer.status_code in (200, 400, 404, 429), answer.text
        if answer.status_code != 200:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        elif answer.headers["content-type"] != "application/json":
            assert answer.text.endswith("data: [DONE]\n\n")
        else:
            assert answer.json()["choices"]

    send()
    assert {200, 400} <= seen  # both were tried
    shared.wait_for(shared.is_idle)


@pytest.mark.property
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_the_published_schema(shared, mode):
    """Requests that schemathesis makes up: such as the schema allows, and such as it forbids."""
    schema = schemathesis.openapi.from_dict(shared.get("/openapi.json").json())
    checks = [not_a_server_error, status_code_conformance, response_schema_conformance]
    operations = [found.ok() for found in schema.get_all_operations()]
    if mode is GenerationMode.NEGATIVE:  # only bodies can be wrong
        operations = [operation for operation in operations if operation.body]
    assert len(operations) == (2 if mode is GenerationMode.NEGATIVE else 6)
    cases = st.one_of(*(operation.as_strategy(generation_mode=mode) for operation in operations))
    seen = set()
    with requests.Session() as session:

        @settings(max_examples=15, suppress_health_check=list(HealthCheck))
        @given(cases)
        def send(case):
            answer = case.call(base_url=shared.url, session=session)
            seen.add(case.operation.path)
            case.validate_response(answer, checks=checks)

        send()
    assert seen >= {"/v1/completions", "/v1/chat/completions"}
    shared.wait_for(shared.is_idle)
