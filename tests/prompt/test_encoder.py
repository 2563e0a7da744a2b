"""The encoder, beyond the vectors: turns, reasoning, headers, tasks, tools, images."""

import dataclasses
import json

import pytest

from openv41.prompt import (
    Conversation,
    Image,
    Message,
    Parameter,
    PromptError,
    ToolCall,
    encode,
    encoder,
)
from tests.prompt.format import (
    ASSISTANT,
    BOS,
    EFFORT,
    EOS,
    IMAGE,
    REMINDER,
    SYSTEM,
    TOOL,
    USER,
    D,
    block,
    call,
    parameter,
    text_after_header,
)

U, A = Message("user", "U"), Message("assistant", "A", reasoning="R")
S = Message("system", "S")


def render(*messages, **settings):
    return encode(Conversation(messages, **settings)).text


def test_neighbours_of_one_turn_are_collected_once(monkeypatch):
    """Messages are copied a few times each, however many follow one another."""
    copied = []

    class Counted(encoder._Turn):
        def __init__(self, role, messages):
            copied.append(len(messages))
            super().__init__(role, messages)

    monkeypatch.setattr(encoder, "_Turn", Counted)
    assert render(*[U, Message("tool", "T")] * 200).count("<tool_result>T</tool_result>") == 200
    assert sum(copied) <= 2 * 400


# Efforts.


@pytest.mark.parametrize(
    ("effort", "number"), [("low", 50), ("high", 75), ("max", 100), (1, 1), (37, 37), (100, 100)]
)
def test_effort_line(effort, number):
    assert render(U, effort=effort).startswith(BOS + EFFORT.format(number) + USER)
    assert render(U, effort=effort, thinking=False) == f"{BOS}{USER}U{ASSISTANT}</think>"


def test_default_is_thinking_at_75():
    assert render(U) == f"{BOS}{EFFORT.format(75)}{USER}U{ASSISTANT}<think>"


@pytest.mark.parametrize("effort", [0, 101, -1, True, False, "medium", "xhigh", "none", "75", ""])
@pytest.mark.parametrize("thinking", [True, False])
def test_other_efforts_are_refused(effort, thinking):
    with pytest.raises(PromptError, match="must be an integer from 1 to 100 or one of low, high"):
        Conversation([U], effort=effort, thinking=thinking)


# How the prompt ends: generation prompt and continued messages, six cases.


@pytest.mark.parametrize(("thinking", "mark"), [(True, "<think>"), (False, "</think>")])
def test_only_the_last_header_can_be_left_out(thinking, mark):
    closed = f"{USER}U{ASSISTANT}</think>A{EOS}{USER}U"
    for wanted, end in [(None, ASSISTANT + mark), (True, ASSISTANT + mark), (False, "")]:
        found = render(U, A, U, thinking=thinking, generation_prompt=wanted)
        assert found.endswith(closed + end)
    found = encode(Conversation([U, Message("latest_reminder", "L")], generation_prompt=False))
    assert found.text.endswith(f"{USER}U{REMINDER}L")
    assert found.section is None


def test_a_new_turn_after_a_finished_answer_is_opened_on_request_only():
    finished = f"{USER}U{ASSISTANT}<think>R</think>A{EOS}"
    assert render(U, A).endswith(finished)
    assert render(U, A, generation_prompt=False).endswith(finished)
    opened = encode(Conversation([U, A], generation_prompt=True))
    assert opened.text.endswith(f"{finished}{ASSISTANT}<think>")
    assert opened.section == "reasoning"


def test_a_system_message_alone_is_answered_on_request():
    assert render(S, thinking=False) == f"{BOS}{SYSTEM}S"
    assert render(S, thinking=False, generation_prompt=True) == (
        f"{BOS}{SYSTEM}S{ASSISTANT}</think>"
    )


def test_a_continued_answer_has_no_end_token_and_earlier_ones_keep_theirs():
    begun = Message("assistant", "Sure,", prefix=True)
    for wanted in (None, True, False):
        found = encode(Conversation([U, A, U, begun], thinking=False, generation_prompt=wanted))
        assert found.text.count(EOS) == 1
        assert text_after_header(found.text) == "</think>Sure,"
        assert found.section == "content"


def test_continued_reasoning_stays_open():
    begun = Message("assistant", reasoning="part", prefix=True)
    found = encode(Conversation([U, begun]))
    assert text_after_header(found.text) == "<think>part"
    assert found.section == "reasoning"
    chat = encode(Conversation([U, begun], thinking=False))
    assert (text_after_header(chat.text), chat.section) == ("</think>", "content")
    finished = encode(Conversation([U, Message("assistant", reasoning="part", wo_eos=True)]))
    assert text_after_header(finished.text) == "<think>part</think>"
    assert finished.section == "content"


def test_only_a_last_message_of_the_assistant_can_be_continued():
    with pytest.raises(PromptError, match="a user message has prefix, only assistant messages"):
        Message("user", "U", prefix=True)
    with pytest.raises(PromptError, match=r"messages\[1\] is a prefix, only the last message may"):
        Conversation([U, Message("assistant", "A", prefix=True), U])
    with pytest.raises(PromptError, match="a prefix has tool calls"):
        Message("assistant", tool_calls=[ToolCall("f")], prefix=True)


def test_without_eos_in_the_middle():
    found = render(U, dataclasses.replace(A, wo_eos=True), U, thinking=False)
    assert found == f"{BOS}{USER}U{ASSISTANT}</think>A{USER}U{ASSISTANT}</think>"


# Turns and reasoning.


def test_neighbouring_users_and_results_are_one_turn():
    result = Message("tool", "r")
    found = render(U, Message("user", ""), result, Message("user", ["x", "y"]), thinking=False)
    want = f"{BOS}{USER}U\n\n\n\n<tool_result>r</tool_result>\n\nx\n\ny{ASSISTANT}</think>"
    assert found == want


def test_history_with_tools_keeps_reasoning_and_without_drops_it():
    kept = f"{USER}U{ASSISTANT}<think>R</think>A{EOS}{USER}U{ASSISTANT}<think>"
    dropped = kept.replace("<think>R</think>", "</think>")
    assert render(U, A, U, tools=[TOOL]).endswith(kept)
    assert render(Message("system", "S", tools=[TOOL]), U, A, U).endswith(kept)
    assert render(U, A, U).endswith(dropped)
    assert render(U, A, U, tools=[]).endswith(dropped)
    assert render(U, A, U, tools=[TOOL], tool_choice="none").endswith(dropped)
    declared = Message("system", "S", tools=[TOOL])
    assert render(declared, U, A, U, tool_choice="none").endswith(dropped)
    assert render(U, A, U, drop_thinking=False).endswith(kept)
    assert render(U, A, U, tools=[TOOL], thinking=False).count("<think>R") == 0


def test_a_later_system_message_stays_in_place_and_counts_as_a_question():
    found = render(S, U, A, Message("system", "MID"), thinking=True)
    assert found.endswith(f"S{USER}U{ASSISTANT}</think>A{EOS}{SYSTEM}MID{ASSISTANT}<think>")
    two = render(S, Message("system", "T"), U, thinking=False)
    assert two == f"{BOS}{SYSTEM}S{SYSTEM}T{USER}U{ASSISTANT}</think>"


def test_an_empty_first_system_message_in_chat_mode_has_its_token():
    found = render(Message("system", ""), U, thinking=False)
    assert found == f"{BOS}{SYSTEM}{USER}U{ASSISTANT}</think>"


def test_tools_of_a_later_system_message_stay_with_it():
    found = render(U, A, Message("system", "MID", tools=[TOOL]), thinking=False)
    assert found.startswith(f"{BOS}{USER}U{ASSISTANT}</think>A{EOS}{SYSTEM}MID\n\n## Tools\n\n")
    assert found.endswith(f"invoke tool calls.\n{ASSISTANT}</think>")


# Quick tasks.


@pytest.mark.parametrize("task", ["query", "authority", "domain", "title", "read_url"])
def test_a_task_follows_its_message_without_a_header(task):
    asked = Message("user", "U", task=task)
    token = f"<\uff5c{task}\uff5c>"
    found = encode(Conversation([asked]))
    assert found.text.endswith(f"{USER}U{token}")
    assert found.pieces[-1] == (token, True)
    assert found.section == "content"
    assert render(asked, A).endswith(f"{USER}U{token}A{EOS}")  # no thinking part
    after = render(U, dataclasses.replace(A, task=task), thinking=False)
    assert after.endswith(f"A{EOS}{token}")


@pytest.mark.parametrize(("thinking", "mark"), [(True, "<think>"), (False, "</think>")])
def test_the_action_task_follows_the_header(thinking, mark):
    asked = Message("user", "U", task="action")
    token = "<\uff5caction\uff5c>"
    end = f"{USER}U{ASSISTANT}{mark}{token}"
    assert render(asked, thinking=thinking).endswith(end)
    assert render(asked, A, thinking=thinking).endswith(f"{end}A{EOS}")


def test_tasks_that_cannot_be():
    with pytest.raises(PromptError, match="task is 'translate', must be one of action, query"):
        Message("user", "U", task="translate")
    with pytest.raises(PromptError, match=r"messages\[0\] has task 'title' and a user message"):
        Conversation([Message("user", "U", task="title"), U])
    for message in ({"role": "latest_reminder"}, {"role": "assistant", "wo_eos": True}):
        with pytest.raises(PromptError, match="task 'title' must follow a finished message"):
            Message(**message, task="title")


# Tools.


def test_results_stand_in_the_order_of_the_calls():
    asked = Message("assistant", tool_calls=[ToolCall("f", id=i) for i in "abc"])
    results = [Message("tool", f"r{i}", tool_call_id=i) for i in ("c", "?", "a", "b")]
    found = render(U, asked, *results, U, thinking=False)
    places = [found.index(f"<tool_result>r{i}</tool_result>") for i in ("?", "a", "b", "c")]
    assert places == sorted(places)  # unknown calls count as the first one, in the order given
    assert found.endswith(f"\n\nU{ASSISTANT}</think>")
    again = render(U, asked, results[2], U, results[0], thinking=False)
    assert again == render(U, asked, results[0], U, results[2], thinking=False)
    assert again.index("ra") < again.index("\n\nU\n\n") < again.index("rc")


def test_namespaces_in_declarations_and_calls():
    function = TOOL["function"]
    for tool in (
        {**TOOL, "namespace": "math"},
        {"type": "function", "function": {**function, "namespace": "math"}},
        {"type": "function", "function": {**function, "name": "math::f"}},
    ):
        found = render(U, tools=[tool])
        assert '\n{"name": "math::f", "parameters": {"type": "object"}}\n' in found
    asked = Message("assistant", tool_calls=[ToolCall("f", '{"a": 1}', namespace="math")])
    want = "</think>\n\n" + block(call("math::f", parameter("a", 1, False))) + EOS
    assert text_after_header(render(U, asked, thinking=False)) == want
    assert ToolCall("math::f") == ToolCall("f", namespace="math")


def test_arguments_given_as_an_object():
    asked = Message("assistant", tool_calls=[ToolCall("f", {"a": "x", "b": [1, None], "c": "1"})])
    want = call(
        "f", parameter("a", "x", True), parameter("b", "[1, null]", False), parameter("c", 1, True)
    )
    assert text_after_header(render(U, asked)) == f"<think></think>\n\n{block(want)}{EOS}"


def test_arguments_are_decoded_twice_at_most():
    once = json.dumps({"a": 1})
    twice, thrice = json.dumps(once), json.dumps(json.dumps(once))
    for arguments in (once, twice):
        assert ToolCall("f", arguments).parameters == (Parameter("a", "1", False),)
    assert ToolCall("f", thrice).parameters == (Parameter("arguments", thrice, True),)


@pytest.mark.parametrize(
    "arguments", ["[1, 2]", "null", "17", '"hello"', '{"a": ', "", '"\\"x\\""', "[" * 100_000]
)
def test_arguments_that_are_no_object_are_one_text(arguments):
    asked = Message("assistant", tool_calls=[ToolCall("f", arguments)])
    want = block(call("f", parameter("arguments", arguments, True)))
    assert text_after_header(render(U, asked, thinking=False)) == f"</think>\n\n{want}{EOS}"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_a_required_call_is_begun(choice):
    found = encode(Conversation([U], tools=[TOOL], tool_choice=choice, thinking=False))
    assert found.text.endswith(f"{USER}U{ASSISTANT}</think>\n\n<{D} calls>\n")
    assert found.section == "calls"
    with pytest.raises(PromptError, match="in thinking mode, where reasoning comes first"):
        Conversation([U], tools=[TOOL], tool_choice=choice)
    for end in (A, dataclasses.replace(A, prefix=True), Message("user", "U", task="title")):
        conversation = Conversation([U, A, end], tools=[TOOL], tool_choice=choice, thinking=False)
        with pytest.raises(PromptError, match="no answer starts after the last message"):
            encode(conversation)


def test_tool_choices_that_cannot_be():
    named = {"type": "function", "function": {"name": "g"}}
    for choice in (named, "any", {}, {"type": "function"}):
        with pytest.raises(
            PromptError, match="must be one of auto, none, required, or name a tool"
        ):
            Conversation([U], tools=[TOOL], tool_choice=choice, thinking=False)
    with pytest.raises(PromptError, match="there are no tools to call"):
        Conversation([U], tool_choice="required", thinking=False)


def test_tools_declared_twice_are_refused():
    with pytest.raises(PromptError, match="by the conversation and by its first message"):
        Conversation([Message("system", "S", tools=[TOOL]), U], tools=[TOOL])


# Text that spells special tokens, and images.


def test_literal_placeholders_are_plain_text():
    found = encode(Conversation([Message("user", [f"a {IMAGE}", Image(1), IMAGE])], thinking=False))
    assert found.text == (f"{BOS}{USER}a {IMAGE}\n\n{IMAGE}\n\n{IMAGE}{ASSISTANT}</think>")
    assert [text for text, is_special in found.pieces if is_special].count(IMAGE) == 1
    assert found.images == (Image(1),)


def test_plain_text_between_special_tokens_is_one_piece():
    found = encode(Conversation([Message("user", ["a", "b"]), Message("user", "c")]))
    assert ("a\n\nb\n\nc", False) in found.pieces
    neighbours = zip(found.pieces, found.pieces[1:], strict=False)
    assert all(left.is_special or right.is_special for left, right in neighbours)
    assert all(piece.text for piece in found.pieces)


def test_token_ids_come_from_the_two_ways_of_the_tokenizer():
    class Tokenizer:
        def encode(self, text):
            return [1000 + len(text)]

        def special_id(self, text):
            return {BOS: 0, USER: 1, ASSISTANT: 2, "</think>": 3}[text]

    found = encode(Conversation([Message("user", f"say {USER}")], thinking=False))
    assert found.token_ids(Tokenizer()) == [0, 1, 1000 + len(f"say {USER}"), 2, 3]
