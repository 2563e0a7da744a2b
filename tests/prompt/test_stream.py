"""The streaming parser: right for every split, and for answers that break the format."""

import itertools
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openv41.errors import PromptError
from openv41.prompt import (
    ArgumentsDelta,
    CallStart,
    End,
    Message,
    ReasoningDelta,
    StreamParser,
    TextDelta,
    ToolCall,
    collect,
    parse,
    stream,
)
from openv41.prompt.dsml import MAX_NAME
from tests.prompt.format import EOS, D, answer_pieces, block, call, parameter
from tests.prompt.strategies import FRAGMENTS, answers, awkward_text, to_message

WEATHER = block(
    call("get", parameter("city", "\u5317\u4eac \U0001f642", True), parameter("days", 2, False)),
    call(
        "n::get", parameter("q", 'a "b"\n\\ </x> < </', True), parameter("o", '{"a": [1]}', False)
    ),
    call("ping", ""),
)
ONE = block(call("f", parameter("a", "x", True)))
# Answers in the format, as (text, where it starts).
ANSWERS = {
    "content": (f"Hello\n\n<b>\n{EOS}", "content"),
    "empty": (EOS, "content"),
    "reasoning": (f"\nhm < </th\n\n</think>\n\nSo\n\n\n{EOS}", "reasoning"),
    "calls": (f"hm</think>Let me see.\n\n{WEATHER}{EOS}", "reasoning"),
    "calls after line breaks": (f"</think>a\n\n\n\n{WEATHER}{EOS}", "reasoning"),
    "calls alone": (f"\n\n{WEATHER}{EOS}", "content"),
    "calls begun": (f"{WEATHER.partition(chr(10))[2]}{EOS}", "calls"),
    "markup in arguments": (
        "</think>\n\n"
        + block(
            call(
                "f",
                parameter("a", f'<{D} invoke name="g">\n</{D} invoke></{D} calls>', True),
                parameter("b", f"</think></{D}parameter></{D} parameter <{D} calls>", True),
                parameter("c", f'{{"k": "</{D} param"}}', False),
            )
        )
        + EOS,
        "reasoning",
    ),
}
# Answers out of the format: text, start, and what the events tell, in brief.
ODD = {
    "block inside reasoning": (
        f"hm\n\n{ONE}{EOS}",
        "reasoning",
        {"reasoning": "hm", "calls": 1},
    ),
    "block inside reasoning without a blank line": (
        f"hm{ONE}",
        "reasoning",
        {"reasoning": "hm", "calls": 1},
    ),
    "reasoning reopened": (
        "hm</think>a<think>b</think>c",
        "reasoning",
        {"reasoning": "hm", "content": "abc"},
    ),
    "reasoning opened in chat": ("<think>a</think>b", "content", {"content": "ab"}),
    "reasoning after calls": (
        f"</think>\n\n{ONE}<think>b</think>c\n\n{ONE}{EOS}",
        "reasoning",
        {"calls": 1},
    ),
    "reasoning without end": ("hm\n\n", "reasoning", {"reasoning": "hm\n\n", "complete": False}),
    "reasoning ended by the end": (f"hm{EOS}", "reasoning", {"reasoning": "hm", "complete": False}),
    "one line break before calls": (f"a\n{ONE}", "content", {"content": "a", "calls": 1}),
    "lone marker": (f"a\n\n<{D} foo> <{D}x", "content", {"content": "a\n\n< foo> <x"}),
    "marker without bracket": (f"{D} calls>{D}", "content", {"content": " calls>"}),
    "unspaced tags": (
        f"a<{D}calls><{D}invoke>",
        "content",
        {"content": "a<calls><invoke>"},
    ),
    "cut in the block's tag": (f"a\n\n<{D} cal", "content", {"content": "a", "complete": False}),
    "cut in an invoke tag": (
        f'a\n\n<{D} calls>\n<{D} invoke name="f',
        "content",
        {"content": "a", "complete": False},
    ),
    "cut before the first parameter": (
        f'\n\n<{D} calls>\n<{D} invoke name="f">\n',
        "content",
        {"calls": 1, "arguments": [""], "complete": False},
    ),
    "cut in a text": (
        f'\n\n<{D} calls>\n<{D} invoke name="f">\n<{D} parameter name="a" string="true">x"y</',
        "content",
        {"calls": 1, "arguments": [r'{"a": "x\"y</'], "complete": False},
    ),
    "cut in a closing tag": (
        f'\n\n<{D} calls>\n<{D} invoke name="f">\n<{D} parameter name="a" string="false">1</{D} p',
        "content",
        {"calls": 1, "arguments": ['{"a": 1'], "complete": False},
    ),
    "ended in a value": (
        f'\n\n<{D} calls>\n<{D} invoke name="f">\n<{D} parameter name="a" string="false">1{EOS}</',
        "content",
        {"calls": 1, "arguments": ['{"a": 1'], "complete": False},
    ),
    "value that is no JSON": (
        "\n\n" + block(call("f", parameter("a", "{oops", False))),
        "content",
        {"calls": 1, "arguments": ['{"a": {oops}']},
    ),
    "parameter twice": (
        "\n\n" + block(call("f", parameter("a", 1, False), parameter("a", 2, False))),
        "content",
        {"calls": 1, "arguments": ['{"a": 1, "a": 2}']},
    ),
    "parameter tag without kind": (
        "\n\n" + block(call("f", f'<{D} parameter name="a">1</{D} parameter>')),
        "content",
        {"calls": 1, "arguments": ["{}"]},
    ),
    "parameter outside a call": (
        "\n\n" + block(parameter("a", 1, False), call("f", "")),
        "content",
        {"calls": 1, "arguments": ["{}"]},
    ),
    "call without end": (
        f'\n\n<{D} calls><{D} invoke name="f"><{D} invoke name="g"></{D} calls>',
        "content",
        {"calls": 2, "arguments": ["{}", "{}"]},
    ),
    "text around tags": (
        "\n\n" + block("x < y", call("f", "junk", parameter("a", 1, False), "junk"), "z"),
        "content",
        {"calls": 1, "arguments": ['{"a": 1}']},
    ),
    "text after calls": (f"a\n\n{ONE} tail", "content", {"content": "a", "calls": 1}),
    "text after the end": (f"a{EOS}b</think>{EOS}", "content", {"content": "a"}),
    "block without calls": (f"a\n\n<{D} calls>\n</{D} calls>", "content", {"content": "a"}),
}
ALL = ANSWERS | ODD


def numbered(index):
    return f"id{index}"


def read(pieces, section):
    """Events of the pieces, each a text or a pair with whether it is special."""
    parser = StreamParser(section, new_id=numbered)
    events = []
    for piece in pieces:
        events += parser.feed(*piece) if isinstance(piece, tuple) else parser.feed(piece)
    return events + parser.finish()


def joined(events):
    """What the events tell, without how the text was cut."""
    end = events[-1]
    assert isinstance(end, End)
    assert not any(isinstance(event, End) for event in events[:-1])
    order = [type(event) for event, _ in itertools.groupby(events, key=type)]
    told = [kind for kind in (ReasoningDelta, TextDelta, CallStart) if kind in order]
    first = {kind: next(i for i, e in enumerate(events) if isinstance(e, kind)) for kind in told}
    assert sorted(first, key=first.get) == told, "reasoning, content and calls come in this order"
    return collect(events), end


@pytest.mark.parametrize("name", ANSWERS)
def test_events_join_to_what_the_strict_parser_reads(name):
    text, section = ANSWERS[name]
    message, end = joined(read([text], section))
    want = parse(text, section)
    assert message == with_ids(want)
    assert end == End("tool_calls" if want.tool_calls else "stop", complete=True)


def with_ids(message):
    calls = [
        ToolCall(found.name, found.arguments, id=numbered(index), namespace=found.namespace)
        for index, found in enumerate(message.tool_calls)
    ]
    return Message("assistant", message.content, reasoning=message.reasoning, tool_calls=calls)


@pytest.mark.parametrize("name", ALL)
def test_every_split_tells_the_same(name):
    text, section = ALL[name][:2]
    want = joined(read([text], section))
    for place in range(1, len(text)):
        assert joined(read([text[:place], text[place:]], section)) == want, f"split at {place}"
    assert joined(read(text, section)) == want, "one character at a time"
    for _ in range(20):
        cuts = sorted(random.choices(range(len(text) + 1), k=random.randint(2, 12)))
        parts = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
        assert joined(read(parts, section)) == want, parts


@pytest.mark.parametrize("name", ANSWERS)
def test_no_marker_is_told_but_inside_arguments(name):
    text, section = ANSWERS[name]
    events = read(text, section)
    told = "".join(e.text for e in events if isinstance(e, ReasoningDelta | TextDelta))
    assert not any(mark in told for mark in (D, EOS, "<think>", "</think>"))


@pytest.mark.parametrize("name", ODD)
def test_answers_out_of_the_format(name):
    text, section, want = ODD[name]
    message, end = joined(read([text], section))
    assert message.reasoning == want.get("reasoning", "")
    assert message.content == want.get("content", "")
    assert len(message.tool_calls) == want.get("calls", 0)
    if "arguments" in want:
        assert [found.arguments for found in message.tool_calls] == want["arguments"]
    assert end.reason == ("tool_calls" if message.tool_calls else "stop")
    assert end.complete == want.get("complete", True)


def test_events_in_order():
    text = f"hm</think>hi\n\n{block(call('n::f', parameter('a', 'x', True)), call('g', ''))}{EOS}"
    assert read([text], "reasoning") == [
        ReasoningDelta("hm"),
        TextDelta("hi"),
        CallStart(0, "id0", "f", "n"),
        ArgumentsDelta(0, '{"a": "'),
        ArgumentsDelta(0, "x"),
        ArgumentsDelta(0, '"'),
        ArgumentsDelta(0, "}"),
        CallStart(1, "id1", "g"),
        ArgumentsDelta(1, "{}"),
        End("tool_calls", complete=True),
    ]


def test_text_is_told_at_once_unless_it_may_begin_markup():
    parser = StreamParser("content")
    told = [parser.feed(text) for text in ("Wo", "rd ", "<", "b>", "\n", "\n", "\n", "x", "\n\n<")]
    texts = ["".join(event.text for event in events) for events in told]
    assert texts == ["Wo", "rd ", "", "<b>", "", "", "\n", "\n\nx", ""]
    assert parser.finish() == [TextDelta("\n\n<"), End("stop", complete=True)]
    assert parser.finish() == []
    assert parser.feed("more") == []


def test_arguments_are_told_while_they_are_written():
    parser = StreamParser("calls")
    parser.feed(f'<{D} invoke name="f">\n<{D} parameter name="a" string="true">')
    assert parser.feed("long text") == [ArgumentsDelta(0, "long text")]
    assert parser.feed(' "quoted"\n') == [ArgumentsDelta(0, r" \"quoted\"\n")]


def test_a_broken_tag_does_not_hold_back_the_next_one():
    parser = StreamParser("calls", new_id=numbered)
    assert parser.feed(f"<{D} invoke n") == []
    assert parser.feed(f'>\n<{D} invoke name="f">') == [CallStart(0, "id0", "f")]


class Counting:
    """A pattern that counts the characters it may look at."""

    def __init__(self, pattern):
        self.pattern, self.read = pattern, 0

    def match(self, text, place):
        self.read += len(text) - place
        return self.pattern.match(text, place)


def test_a_tag_without_end_is_not_read_again_and_again(monkeypatch):
    """A search of all that came would read 2 * 10^8 characters here."""
    counting = Counting(stream.PARAMETER_TAG)
    monkeypatch.setattr(stream, "PARAMETER_TAG", counting)
    parser = StreamParser("calls", new_id=numbered)
    parser.feed(f'<{D} invoke name="f">\n<{D} parameter name="')
    for _ in range(20_000):
        assert parser.feed("a") == []
    assert counting.read < 10**6
    assert parser.feed(f'<{D} parameter name="b" string="false">1') == [
        ArgumentsDelta(0, '{"b": '),
        ArgumentsDelta(0, "1"),
    ]


def test_the_longest_names_that_tags_have():
    for count, names in ((MAX_NAME, 1), (MAX_NAME + 1, 0)):
        text = block(call("f" * count, parameter("a" * count, 1, False)), call("g", ""))
        told = joined(read(text, "calls"))
        assert told == joined(read([text], "calls"))
        assert [len(call.name) for call in told[0].tool_calls] == [count] * names + [1]
    with pytest.raises(PromptError, match="expected an invoke tag"):
        parse(f"\n\n{block(call('f' * (MAX_NAME + 1), ''))}{EOS}", "content")


def test_ids_of_calls_are_fresh():
    starts = []
    for _ in range(2):
        parser = StreamParser("content")
        starts += [e for e in parser.feed(f"\n\n{WEATHER}") if isinstance(e, CallStart)]
    assert [start.id[:8] for start in starts] == ["call_00_", "call_01_", "call_02_"] * 2
    assert {len(start.id) for start in starts} == {len("call_00_") + 24}
    assert len({start.id for start in starts}) == 6


# Tokens: a marker counts where it is the special token, and not where text spells it.


def test_spelled_markers_in_ordinary_tokens_are_text():
    spelled = f"a</think>\n\n{WEATHER}{EOS}"
    message, end = joined(
        read([(spelled, False), ("</think>", True), (spelled, False)], "reasoning")
    )
    assert message == Message("assistant", spelled, reasoning=spelled)
    assert end == End("stop", complete=True)


def test_a_spelled_marker_across_known_and_unknown_text_is_text():
    assert joined(read(["</t", ("hink>", False)], "reasoning"))[0].reasoning == "</think>"
    assert joined(read(["</t", ("</think>", True), "a"], "reasoning"))[0] == Message(
        "assistant", "a", reasoning="</t"
    )


def test_other_special_tokens_are_text_as_spelled():
    assert joined(read([("<|EOT|>", True)], "content"))[0].content == "<|EOT|>"


@pytest.mark.property
@settings(max_examples=60)
@given(entry=answers(awkward_text), cuts=st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_streamed_pieces_give_the_message(entry, cuts):
    message = to_message(entry)
    pieces, sizes = [], itertools.cycle(cuts)
    for text, is_special in answer_pieces(message):
        start = 0
        while start < len(text):
            size = len(text) if is_special else next(sizes)
            pieces.append((text[start : start + size], is_special))
            start += size
    found, end = joined(read(pieces, "reasoning"))
    assert found == with_ids(message)
    assert end.complete


@pytest.mark.property
@settings(max_examples=100)
@given(
    text=st.lists(st.sampled_from([*FRAGMENTS, f"<{D} calls>\n"]), max_size=20).map("".join),
    section=st.sampled_from(["reasoning", "content", "calls"]),
    place=st.integers(0, 200),
)
def test_any_text_gives_events_that_no_split_changes(text, section, place):
    want = joined(read([text], section))
    assert joined(read(text, section)) == want
    assert joined(read([text[:place], text[place:]], section)) == want
    for found in want[0].tool_calls:
        assert isinstance(found.arguments, str)
    assert not any(mark in want[0].content + want[0].reasoning for mark in (EOS, D + " calls>\n"))


def test_joined_arguments_are_json():
    text, section = ANSWERS["calls"]
    message, _ = joined(read(text, section))
    assert [json.loads(found.arguments) for found in message.tool_calls] == [
        {"city": "\u5317\u4eac \U0001f642", "days": 2},
        {"q": 'a "b"\n\\ </x> < </', "o": {"a": [1]}},
        {},
    ]
