"""Answers to events while they are written, tolerantly: there are events for any text.

Joined, the events of an answer in the format are what the strict parser makes of it. Of others:

- A block of calls inside reasoning ends the reasoning; nothing ever opens it again.
- Markers that belong to no tag are dropped from reasoning and content, and kept in arguments.
- A tag whose name is longer than ``MAX_NAME`` is none.
- Text between the tags of a block, and all text after the block, is dropped.
- A call that breaks off keeps the arguments that came.
"""

import json
import re
import secrets
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from openv41.prompt.dsml import (
    CALLS,
    CLOSE_PARAMETER,
    INVOKE_END,
    INVOKE_TAG,
    MAX_TAG,
    PARAMETER_TAG,
    TEXT_KIND,
    split_name,
)
from openv41.prompt.messages import Message, ToolCall
from openv41.prompt.pieces import Section
from openv41.prompt.tokens import (
    SEALED,
    SEALED_DSML,
    SEALED_EOS,
    SEALED_THINK_END,
    Piece,
    partial_marker,
    seal,
    split_markers,
    unseal,
)

_State = Literal["reasoning", "content", "calls", "value", "after", "ended"]
_CLOSING: dict[str, _State] = {INVOKE_END: "calls", CALLS: "after"}
_LEAD_END = re.compile(r"(\n\n|\n)?<?\Z")  # all of a blank line and "<", or its beginning


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More content."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins; its arguments follow."""

    index: int
    id: str
    name: str
    namespace: str = ""


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More JSON text of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class End:
    """The answer is over; not ``complete`` if it broke off inside reasoning or calls."""

    reason: Literal["stop", "tool_calls"]
    complete: bool


Event = ReasoningDelta | TextDelta | CallStart | ArgumentsDelta | End
_Events = Generator[Event, None, bool]


def new_call_id(index: int) -> str:
    """Fresh name of a tool call."""
    return f"call_{index:02}_{secrets.token_hex(12)}"


class StreamParser:
    """Reads an answer in deltas, split anywhere, and tells what each adds.

    Args:
        section: Where the answer starts, as ``Prompt.section`` tells.
        new_id: Gives the id of the call with an index.
    """

    def __init__(
        self, section: Section = "reasoning", *, new_id: Callable[[int], str] = new_call_id
    ) -> None:
        self._new_id = new_id
        self._state: _State = section
        self._spelled = ""  # may begin a marker
        self._text = ""  # sealed, not yet told
        self._num_calls = 0
        self._in_call = False
        self._num_parameters = 0
        self._is_text = False
        self._readers: dict[_State, Callable[[bool], _Events]] = {
            "reasoning": self._read_text,
            "content": self._read_text,
            "calls": self._read_tags,
            "value": self._read_value,
            "after": self._read_rest,
        }

    def feed(self, text: str, is_special: bool | None = None) -> list[Event]:
        """Events of the next delta.

        Args:
            text: More of the answer, cut anywhere.
            is_special: True for the spelling of one special token, False for text of ordinary
                tokens, which never is a marker; None where unknown: every spelled marker counts.
        """
        if is_special is not None:
            pieces = [Piece(self._spelled, False), Piece(text, is_special)]
            self._spelled = ""
        else:
            pieces = list(split_markers(self._spelled + text))
            self._spelled = ""
            if pieces and not pieces[-1].is_special:
                last = pieces.pop().text
                cut = len(last) - partial_marker(last)
                pieces.append(Piece(last[:cut], False))
                self._spelled = last[cut:]
        self._text += seal(pieces)
        return list(self._read(final=False))

    def finish(self) -> list[Event]:
        """Events of what was held back, and the end, unless the answer's own end was told."""
        self._text += self._spelled
        self._spelled = ""
        return list(self._read(final=True))

    def _read(self, *, final: bool) -> Iterator[Event]:
        while self._state != "ended":
            more = yield from self._readers[self._state](final)
            if not more:
                break
        if final and self._state != "ended":
            yield self._end()
        if self._state == "ended":
            self._text = ""

    def _end(self) -> End:
        complete = self._state in ("content", "after")
        self._state = "ended"
        return End("tool_calls" if self._num_calls else "stop", complete)

    def _read_text(self, final: bool) -> _Events:
        """Reasoning or content; held back is only what may lead to a block of calls."""
        found = SEALED.search(self._text)
        if found is None:
            yield from self._tell(len(self._text) if final else _lead_start(self._text))
            return False
        marker, place = found[0], found.start()
        tag = self._text[place + 1 : place + 1 + len(CALLS)]
        if marker == SEALED_DSML and self._text.endswith("<", 0, place) and CALLS.startswith(tag):
            yield from self._tell(_lead_start(self._text[:place]))
            if tag != CALLS and not final:
                return False
            self._text = self._text.partition(SEALED_DSML)[2][len(CALLS) :]
            self._state = "calls"
        elif marker in (SEALED_EOS, SEALED_THINK_END):
            yield from self._tell(place)
            self._text = self._text[1:]
            if marker == SEALED_EOS:
                yield self._end()
            else:
                self._state = "content"
        else:  # out of place
            yield from self._tell(_lead_start(self._text[:place]))
            self._text = self._text.replace(marker, "", 1)
        return True

    def _tell(self, length: int) -> Iterator[Event]:
        text, self._text = self._text[:length], self._text[length:]
        if text:
            yield ReasoningDelta(text) if self._state == "reasoning" else TextDelta(text)

    def _read_tags(self, final: bool) -> _Events:
        """Tags of calls and parameters; text between them is dropped."""
        found = SEALED.search(self._text)
        if found is None:
            self._text = self._text[-len("</") :]
            return False
        place = found.end()
        length = 0
        if found[0] == SEALED_EOS:
            yield self._end()
        elif found[0] == SEALED_DSML:
            closes = self._text.endswith("</", 0, found.start())
            length = yield from self._closing(place) if closes else self._opening(place)
            is_short = len(self._text) - place < MAX_TAG
            if not length and not final and is_short and not SEALED.search(self._text, place):
                return False  # the tag may not be whole yet
        self._text = self._text[place + length :]
        return True

    def _closing(self, place: int) -> Generator[Event, None, int]:
        """Read a closing tag; return its length, 0 if it is none."""
        for tag, state in _CLOSING.items():
            if self._text.startswith(tag, place):
                yield from self._close_call()
                self._state = state
                return len(tag)
        return 0

    def _opening(self, place: int) -> Generator[Event, None, int]:
        """Read a tag that opens a call or a parameter; return its length, 0 if it is none."""
        call = INVOKE_TAG.match(self._text, place)
        if call:
            yield from self._close_call()
            namespace, name = split_name(call[1])
            index = self._num_calls
            yield CallStart(index, self._new_id(index), name, namespace)
            self._num_calls, self._num_parameters, self._in_call = index + 1, 0, True
            return len(call[0])
        parameter = PARAMETER_TAG.match(self._text, place) if self._in_call else None
        if parameter is None:
            return 0
        self._is_text = parameter[2] == TEXT_KIND
        lead = ", " if self._num_parameters else "{"
        name = json.dumps(parameter[1], ensure_ascii=False)
        yield self._arguments(f"{lead}{name}: " + ('"' if self._is_text else ""))
        self._num_parameters += 1
        self._state = "value"
        return len(parameter[0])

    def _close_call(self) -> Iterator[Event]:
        if self._in_call:
            self._in_call = False
            yield self._arguments("}" if self._num_parameters else "{}")

    def _read_value(self, final: bool) -> _Events:
        """The value of a parameter, up to its closing tag and nothing else."""
        value, closed, rest = self._text.partition(CLOSE_PARAMETER)
        before, broken, _ = value.partition(SEALED_EOS)
        if broken:
            value, closed, rest = before, "", ""
        elif not closed:
            cut = len(value) - _overlap(value, CLOSE_PARAMETER)
            value, rest = value[:cut], value[cut:]
            if final and SEALED_DSML not in rest:
                value, rest = value + rest, ""
        if value:
            text = unseal(value)
            text = json.dumps(text, ensure_ascii=False)[1:-1] if self._is_text else text
            yield self._arguments(text)
        self._text = rest
        if broken:
            yield self._end()
        elif closed:
            if self._is_text:
                yield self._arguments('"')
            self._state = "calls"
        return bool(closed)

    def _read_rest(self, _final: bool) -> _Events:
        """What follows the calls: dropped, up to the end."""
        if SEALED_EOS in self._text:
            yield self._end()
        self._text = ""
        return False

    def _arguments(self, text: str) -> ArgumentsDelta:
        return ArgumentsDelta(self._num_calls - 1, text)


@dataclass(frozen=True, slots=True)
class ToldCall:
    """What events tell of one call; ``start`` is None where it came before them."""

    index: int
    start: CallStart | None
    arguments: str


@dataclass(frozen=True, slots=True)
class Told:
    """What events tell, joined."""

    reasoning: str
    content: str
    calls: tuple[ToldCall, ...]


def join(events: Iterable[Event]) -> Told:
    """Join the texts of events."""
    reasoning, content = [], []
    starts: dict[int, CallStart] = {}
    arguments: dict[int, list[str]] = {}
    for event in events:
        if isinstance(event, ReasoningDelta):
            reasoning.append(event.text)
        elif isinstance(event, TextDelta):
            content.append(event.text)
        elif isinstance(event, CallStart):
            starts[event.index], arguments[event.index] = event, []
        elif isinstance(event, ArgumentsDelta):
            arguments.setdefault(event.index, []).append(event.text)
    calls = (ToldCall(i, starts.get(i), "".join(texts)) for i, texts in arguments.items())
    return Told("".join(reasoning), "".join(content), tuple(calls))


def collect(events: Iterable[Event]) -> Message:
    """Message that the events of one answer tell."""
    told = join(events)
    calls = []
    for call in told.calls:
        start = call.start
        assert start is not None, f"call {call.index} has no start"
        calls.append(ToolCall(start.name, call.arguments, id=start.id, namespace=start.namespace))
    return Message("assistant", told.content, reasoning=told.reasoning, tool_calls=calls)


def _lead_start(text: str) -> int:
    """Where the text's end begins what may lead to a block of calls."""
    found = _LEAD_END.search(text, max(0, len(text) - len("\n\n<")))
    assert found, f"the pattern matches at the end of any text: {text[-8:]!a}"
    return found.start()


def _overlap(text: str, tag: str) -> int:
    """Length of the longest end of ``text`` that begins ``tag``."""
    return next(n for n in range(min(len(text), len(tag)), -1, -1) if text.endswith(tag[:n]))
