"""What a conversation may hold, and what is said about the rest."""

import pytest

from openv41.prompt import Conversation, Image, Message, PromptError, ToolCall, encode, from_request
from tests.prompt.format import TOOL

U = Message("user", "U")


@pytest.mark.parametrize("role", ["developer", "function", "User", ""])
def test_unknown_roles(role):
    with pytest.raises(PromptError, match=f"role is '{role}', must be one of system, user, assis"):
        Message(role, "U")


@pytest.mark.parametrize(
    ("role", "field", "value"),
    [
        ("user", "reasoning", "R"),
        ("tool", "tool_calls", [ToolCall("f")]),
        ("user", "tool_call_id", "a"),
        ("assistant", "tools", [TOOL]),
        ("system", "wo_eos", True),
    ],
)
def test_fields_of_other_roles(role, field, value):
    with pytest.raises(PromptError, match=f"a {role} message has {field}, only"):
        Message(role, "U", **{field: value})


def test_a_conversation_needs_a_message():
    with pytest.raises(PromptError, match="the conversation has no messages"):
        Conversation([])


@pytest.mark.parametrize(
    "broken",
    [
        lambda: Message("user", "a\ud800"),
        lambda: Message("user", ["a", "\udc01"]),
        lambda: Message("assistant", reasoning="\udfff"),
        lambda: ToolCall("f", r'{"a": "\ud800"}'),
        lambda: ToolCall("f", r'{"\ud800": 1}'),
        lambda: ToolCall("f", r'{"a": ["\ud800"]}'),
        lambda: Conversation([U], tools=[{"function": {"name": "f", "description": "\ud800"}}]),
    ],
)
def test_lone_surrogates(broken):
    with pytest.raises(PromptError, match=r"is not valid Unicode: '\\u[\da-f]{4}' at character"):
        broken()


def test_names_that_would_end_their_own_tag():
    for name in ('f"', "f\n", 'f">\n'):
        with pytest.raises(PromptError, match="must not hold quotes or line breaks"):
            ToolCall(name)
    with pytest.raises(PromptError, match="of 'f' would end its own tag"):
        ToolCall("f", {'a" string="true">x': 1})
    for build in (lambda: ToolCall("f" * 1025), lambda: ToolCall("f", {"a" * 1025: 1})):
        with pytest.raises(PromptError, match="has 1025 characters, must have at most 1024"):
            build()
    assert ToolCall("f" * 1024, {"a" * 1024: 1}).parameters[0].name == "a" * 1024
    assert ToolCall("f", {'a" string="true" ': 1}).parameters[0].name == 'a" string="true" '


def test_names_and_namespaces_of_calls():
    with pytest.raises(PromptError, match="tool call '' in namespace '': it needs a name"):
        ToolCall("")
    with pytest.raises(PromptError, match="and a namespace without '::'"):
        ToolCall("f", namespace="a::b")
    assert (ToolCall("a::b::c").namespace, ToolCall("a::b::c").name) == ("a", "b::c")
    assert [ToolCall(name).full_name for name in ("::f", "f::", "a::f")] == ["::f", "f::", "a::f"]


def test_arguments_that_are_no_json():
    with pytest.raises(PromptError, match=r"arguments of 'f'\['a'\] cannot be written as JSON"):
        ToolCall("f", {"a": object()})


@pytest.mark.parametrize(
    ("tool", "match"),
    [
        ({"type": "function"}, "must be {'type': 'function', 'function': {'name': ...}}"),
        ({"function": {"name": ""}}, "must be {'type': 'function'"),
        ({**TOOL, "type": "custom"}, "tool 'f' has type 'custom', must be function"),
        ({**TOOL, "namespace": "a::b"}, "tool 'f' has namespace 'a::b', must be a plain name"),
        ({"function": {"name": "f", "x": {1, 2}}}, "tool 'f' cannot be written as JSON"),
    ],
)
def test_tools_that_are_none(tool, match):
    with pytest.raises(PromptError, match=match):
        Conversation([U], tools=[tool])
    with pytest.raises(PromptError, match=match):
        Message("system", tools=[tool])


@pytest.mark.parametrize(
    "response_format",
    [{}, {"type": "xml"}, {"type": "json_schema"}, {"json_schema": {"schema": {}}}],
)
def test_response_formats_that_are_none(response_format):
    with pytest.raises(PromptError, match="must have type text, json_object, or json_schema"):
        Conversation([U], response_format=response_format)


def test_a_text_response_format_says_nothing():
    assert encode(Conversation([U], response_format={"type": "text"})) == encode(Conversation([U]))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"messages": "hi"}, "messages is 'hi', must be a list"),
        ({"messages": []}, "the conversation has no messages"),
        ({"messages": ["hi"]}, r"messages\[0\]: is 'hi', must be an object"),
        ({"messages": [{"content": "hi"}]}, r"messages\[0\]: role is '', must be one of"),
        ({"thinking": {"type": "auto"}}, "thinking.type is 'auto', must be enabled or disabled"),
        ({"thinking": True}, "thinking is True, must be an object"),
        ({"reasoning_effort": 50.0}, "effort is 50.0, must be an integer from 1 to 100"),
        ({"reasoning_effort": 101}, "effort is 101, must be an integer from 1 to 100"),
        ({"reasoning_effort": "medium"}, "effort is 'medium', must be an integer from 1 to 100 or"),
        ({"tools": TOOL}, "tools is {.*, must be a list"),
        ({"tool_choice": 1}, "tool_choice is 1, must be text or an object"),
        ({"continue_final_message": True}, "the last message is of role user, only one of the ass"),
    ],
)
def test_requests_that_cannot_be_read(change, match):
    with pytest.raises(PromptError, match=match):
        from_request({"messages": [{"role": "user", "content": "U"}], **change})


@pytest.mark.parametrize(
    ("entry", "match"),
    [
        ({"role": "user", "content": 5}, "content is 5, must be text or a list"),
        ({"role": "user", "content": ["a"]}, "content block is 'a', must be text, image or image_"),
        ({"role": "user", "content": [{"type": "audio", "audio": {}}]}, "content block is {'type'"),
        ({"role": "user", "task": "chat"}, "task is 'chat', must be one of action"),
        ({"role": "assistant", "prefix": "yes"}, "prefix is 'yes', must be true or false"),
        ({"role": "assistant", "tool_calls": [5]}, "tool call is 5, must be an object"),
        ({"role": "assistant", "tool_calls": [{"id": "a"}]}, "tool call '' in namespace ''"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]},
            r"arguments is \[1\], must be text or an object",
        ),
    ],
)
def test_messages_that_cannot_be_read(entry, match):
    with pytest.raises(PromptError, match=r"messages\[1\]: " + match):
        from_request({"messages": [{"role": "user", "content": "U"}, entry]})


def test_a_request_in_full():
    found = from_request(
        {
            "model": "any",
            "messages": [
                {"role": "user", "content": [{"type": "image", "image": b"png"}]},
                {
                    "role": "assistant",
                    "content": None,
                    "reasoning_content": "R",
                    "tool_calls": [
                        {"id": "a", "type": "function", "function": {"name": "f", "arguments": {}}},
                        {"id": "b", "namespace": "n", "function": {"name": "g", "arguments": "{}"}},
                    ],
                },
                {"role": "tool", "tool_call_id": "a", "content": "r"},
                {"role": "assistant", "content": "A", "reasoning_content": None},
            ],
            "thinking": None,
            "reasoning_effort": 7,
            "tools": [TOOL],
            "drop_thinking": False,
            "add_generation_prompt": True,
            "continue_final_message": True,
        }
    )
    calls = (ToolCall("f", {}, id="a"), ToolCall("g", id="b", namespace="n"))
    assert found == Conversation(
        (
            Message("user", (Image(b"png"),)),
            Message("assistant", reasoning="R", tool_calls=calls),
            Message("tool", "r", tool_call_id="a"),
            Message("assistant", "A", prefix=True),
        ),
        effort=7,
        tools=(TOOL,),
        drop_thinking=False,
        generation_prompt=True,
    )
    assert from_request({"messages": [{"role": "user"}], "reasoning_effort": "none"}) == (
        Conversation([Message("user")], thinking=False)
    )
