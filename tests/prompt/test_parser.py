"""The strict parser: what it reads, what it refuses, and that it undoes the encoder."""

import pytest
from hypothesis import given, settings

from openv41.prompt import Message, Parameter, PromptError, ToolCall, parse
from tests.prompt.format import (
    BOS,
    EOS,
    D,
    answer_pieces,
    answer_text,
    block,
    call,
    parameter,
)
from tests.prompt.strategies import answers, awkward_text, plain_text, to_message

CALLS = block(call("f", parameter("a", "x", True), parameter("b", "[1]", False)), call("n::g", ""))
TWICE = block(call("f", parameter("a", 1, False), parameter("a", 2, False)))
END, NEWLINE, QUOTE = "parameter>", "\n", '"'


def test_an_answer_with_everything():
    found = parse(f"why\n</think>\nbecause\n\n{CALLS}{EOS}")
    assert found == Message(
        "assistant",
        "\nbecause",
        reasoning="why\n",
        tool_calls=[ToolCall("f", '{"a": "x", "b": [1]}'), ToolCall("g", namespace="n")],
    )
    assert found.tool_calls[0].parameters == (
        Parameter("a", "x", True),
        Parameter("b", "[1]", False),
    )


def test_where_an_answer_starts():
    assert parse(f"hi{EOS}", "content") == Message("assistant", "hi")
    want = Message("assistant", tool_calls=parse(f"\n\n{CALLS}{EOS}", "content").tool_calls)
    assert parse(f"{CALLS.removeprefix(f'<{D} calls>' + NEWLINE)}{EOS}", "calls") == want


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        ("r</think>a", "the answer does not end with '<.*end.*of.*sentence.*>'"),
        (f"r</think>a{EOS}b", "text after '<.*end.*of.*sentence.*>': 'b'"),
        (f"r{EOS}", "the reasoning does not end with '</think>'"),
        (f"r\n\n{CALLS}</think>{EOS}", r"DSML.*' in the reasoning, at character 4"),
        (f"r<think></think>{EOS}", "'<think>' in the reasoning, at character 1"),
        (f"{BOS}</think>{EOS}", "'<.*begin.*>' in the reasoning, at character 0"),
        (f"r</think>a</think>{EOS}", "'</think>' in the content, at character 1"),
        (f"r</think>ab<think>{EOS}", "'<think>' in the content, at character 2"),
        (f"r</think>a{D}{EOS}", "DSML.*' in the content, at character 1"),
        (f"r</think>a{BOS}{EOS}", "'<.*begin.*>' in the content, at character 1"),
        (f"r</think>a\n{CALLS}{EOS}", "DSML.*' in the content, at character 3"),
        (f"r</think>\n\n{CALLS}x{EOS}", "text after the block of tool calls: 'x'"),
        (f"r</think>\n\n{CALLS.replace(' ', '')}{EOS}", "DSML.*' in the content"),
        (
            f"r</think>\n\n{CALLS.replace(D + ' invoke', D + 'invoke')}{EOS}",
            "expected an invoke tag",
        ),
        (f"r</think>\n\n{CALLS[:-1]}{EOS}", r"expected '<.*', got '</.*calls'"),
        (f"r</think>\n\n<{D} calls>\n</{D} calls>{EOS}", "the block of tool calls is empty"),
        (f"r</think>\n\n{block(call('', ''))}{EOS}", "expected an invoke tag"),
        (f"r</think>\n\n{TWICE}{EOS}", "the call of 'f' has the parameter 'a' twice"),
        (
            f"r</think>\n\n{CALLS.replace(' string=' + QUOTE + 'true' + QUOTE, '')}{EOS}",
            "expected a parameter tag",
        ),
        (f"r</think>\n\n{CALLS.replace('>' + NEWLINE, '>')}{EOS}", "DSML.*' in the content"),
        (
            f"r</think>\n\n{CALLS.replace(END + NEWLINE, END)}{EOS}",
            r"expected '\\n', got",
        ),
        (f"r</think>\n\n{block(call('f', parameter('a', 1, False)[:-3]))}{EOS}", "that ends with"),
    ],
)
def test_answers_that_are_refused(answer, match):
    with pytest.raises(PromptError, match=match):
        parse(answer)


def test_text_that_only_spells_markers_is_text():
    spelled = f"{EOS}{D}</think>"
    message = Message("assistant", spelled, reasoning=spelled, tool_calls=[ToolCall("f", spelled)])
    found = parse(answer_pieces(message))
    assert (found.content, found.reasoning) == (spelled, spelled)
    assert found.tool_calls[0].parameters == (Parameter("arguments", spelled, True),)
    with pytest.raises(PromptError, match="text after"):
        parse(answer_text(message))


@pytest.mark.property
@settings(max_examples=80)
@given(entry=answers(awkward_text))
def test_parsing_undoes_encoding(entry):
    message = to_message(entry)
    found = parse(answer_pieces(message))
    assert found == message
    assert [c.parameters for c in found.tool_calls] == [c.parameters for c in message.tool_calls]


@pytest.mark.property
@settings(max_examples=100)
@given(entry=answers(plain_text, thinking=False))
def test_parsing_undoes_encoding_of_bare_text_in_chat_mode(entry):
    message = to_message(entry)
    assert parse(answer_text(message, thinking=False), "content") == message


@pytest.mark.parametrize(
    "value",
    ["1.50", "1e5", '"17"', " [1,2]", '{"b":1,"a":2}', r'"\u00e9"', "not json", "", "[", "NaN"],
)
def test_encoding_undoes_parsing_byte_for_byte(value):
    """Also where the JSON is not how the encoder would write it, or is none."""
    want = "r</think>c\n\n" + block(
        call("f", parameter("x", value, False), parameter("y", value, True)), call("n::g", "")
    )
    assert answer_text(parse(want + EOS)) == want + EOS
