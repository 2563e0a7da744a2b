"""The markup of tool calls: parameters from JSON arguments and back, blocks of calls, tags.

A block, with D for the marker token (the blanks after it belong to the format)::

    <D calls>
    <D invoke name="NAME">
    <D parameter name="KEY" string="true">text, not escaped</D parameter>
    <D parameter name="KEY" string="false">JSON</D parameter>
    </D invoke>
    </D calls>
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from openv41.errors import PromptError
from openv41.prompt.tokens import DSML, SEALED, SEALED_DSML, Piece, check_unicode, unseal

ARGUMENTS = "arguments"  # name of the one parameter that holds arguments which are no JSON object

MAX_NAME = 1024  # characters; without a bound a tag that never ends would be read again and again

# Parts of tags as they stand after the marker; a name in quotes follows INVOKE and PARAMETER.
CALLS, INVOKE_END, PARAMETER_END = " calls>", " invoke>", " parameter>"
INVOKE, PARAMETER = " invoke name=", " parameter name="
TEXT_KIND, JSON_KIND = ' string="true">', ' string="false">'

# Tags in sealed text, after the marker; names hold no marker.
_SEALS = SEALED.pattern[1:-1]
_KINDS = f"{TEXT_KIND}|{JSON_KIND}"
INVOKE_TAG = re.compile(rf'{INVOKE}"([^"\n{_SEALS}]{{1,{MAX_NAME}}})">')
PARAMETER_TAG = re.compile(rf'{PARAMETER}"([^{_SEALS}]{{0,{MAX_NAME}}}?)"({_KINDS})')
MAX_TAG = len(f'{PARAMETER}""{JSON_KIND}') + MAX_NAME
CLOSE_PARAMETER, CLOSE_INVOKE, CLOSE_CALLS = (
    f"</{SEALED_DSML}{end}" for end in (PARAMETER_END, INVOKE_END, CALLS)
)


class Parameter(NamedTuple):
    """One argument as it stands in a prompt: ``value`` is text, or JSON if not ``is_text``."""

    name: str
    value: str
    is_text: bool


def dump_json(value: object, where: str) -> str:
    """JSON as the format writes it: blanks after commas and colons, characters as they are."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise PromptError(f"{where} cannot be written as JSON: {error}") from None
    check_unicode(text, where)
    return text


def to_parameters(arguments: str | Mapping[str, Any], where: str) -> tuple[Parameter, ...]:
    """Parameters of a call; anything but an object is one parameter.

    JSON may be encoded twice, as in the released encoder.
    """
    value: object = arguments
    for _ in range(2):
        if isinstance(value, str):
            value = _load_json(value)
    if not isinstance(value, Mapping):
        assert isinstance(arguments, str), f"arguments are a string or an object: {arguments!a}"
        return (Parameter(ARGUMENTS, arguments, True),)
    out = []
    for name, item in value.items():
        is_text = isinstance(item, str)
        text = item if isinstance(item, str) else dump_json(item, f"{where}[{name!a}]")
        out.append(Parameter(name, text, is_text))
    return tuple(out)


def _load_json(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def to_arguments(parameters: Iterable[Parameter]) -> str:
    """JSON object of the parameters; values that are not text pass as they are, valid or not."""
    items = (
        f"{json.dumps(name, ensure_ascii=False)}: "
        f"{json.dumps(value, ensure_ascii=False) if is_text else value}"
        for name, value, is_text in parameters
    )
    return "{" + ", ".join(items) + "}"


def check_names(name: str, keys: Iterable[str]) -> None:
    """Refuse names of a tool and its arguments that do not fit into their tags."""
    if '"' in name or "\n" in name:
        raise PromptError(f"tool name {name!a} must not hold quotes or line breaks")
    for key in keys:
        if re.search(f'"({_KINDS})', key):
            raise PromptError(f"argument name {key!a} of {name!a} would end its own tag")
        if len(key) > MAX_NAME:
            raise PromptError(f"an argument name of {name!a} {_is_long(key)}")
    if len(name) > MAX_NAME:
        raise PromptError(f"tool name {name[:40]!a}... {_is_long(name)}")


def _is_long(name: str) -> str:
    return f"has {len(name)} characters, must have at most {MAX_NAME}"


def split_name(full_name: str) -> tuple[str, str]:
    """Namespace, or nothing, and local name of ``namespace::name``."""
    namespace, _, name = full_name.partition("::")
    return (namespace, name) if namespace and name else ("", full_name)


def join_name(namespace: str, name: str) -> str:
    """Name with its namespace, if it has one."""
    return f"{namespace}::{name}" if namespace else name


def render_calls(calls: Sequence[tuple[str, Sequence[Parameter]]]) -> Iterator[Piece]:
    """A block of calls, each a full name and its parameters."""
    yield from _tag("<", CALLS + "\n")
    for name, parameters in calls:
        yield from _tag("<", f'{INVOKE}"{name}">\n')
        for number, (key, value, is_text) in enumerate(parameters):
            kind = TEXT_KIND if is_text else JSON_KIND
            lead = "\n<" if number else "<"
            yield from _tag(lead, f'{PARAMETER}"{key}"{kind}{value}')
            yield from _tag("</", PARAMETER_END)
        yield from _tag("\n</", INVOKE_END + "\n")
    yield from _tag("</", CALLS)


def _tag(lead: str, rest: str) -> Iterator[Piece]:
    yield Piece(lead, False)
    yield Piece(DSML, True)
    yield Piece(rest, False)


def parse_calls(block: str) -> list[tuple[str, tuple[Parameter, ...]]]:
    """Calls of a sealed block, from after ``calls>`` and its line break to the closing tag."""
    reader = _Reader(block)
    calls = []
    while not reader.take(CLOSE_CALLS):
        reader.expect(f"<{SEALED_DSML}")
        name = reader.match(INVOKE_TAG, "an invoke tag")[1]
        reader.expect("\n")
        calls.append((name, _parse_parameters(reader, name)))
        reader.expect("\n")
    if not calls:
        raise PromptError("the block of tool calls is empty")
    if reader.rest:
        raise PromptError(f"text after the block of tool calls: {_short(reader.rest)}")
    return calls


def _parse_parameters(reader: "_Reader", name: str) -> tuple[Parameter, ...]:
    parameters: list[Parameter] = []
    while not reader.take("\n" + CLOSE_INVOKE):
        if parameters:
            reader.expect("\n")
        reader.expect(f"<{SEALED_DSML}")
        key, kind = reader.match(PARAMETER_TAG, "a parameter tag").groups()
        if any(key == parameter.name for parameter in parameters):
            raise PromptError(f"the call of {name!a} has the parameter {key!a} twice")
        value = unseal(reader.until(CLOSE_PARAMETER))
        parameters.append(Parameter(key, value, kind == TEXT_KIND))
    return tuple(parameters)


class _Reader:
    """Sealed text that is read from left to right; what is not as expected is an error."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.place = 0

    @property
    def rest(self) -> str:
        return self.text[self.place :]

    def take(self, literal: str) -> bool:
        found = self.text.startswith(literal, self.place)
        self.place += len(literal) if found else 0
        return found

    def expect(self, literal: str) -> None:
        if not self.take(literal):
            raise self._error(f"{unseal(literal)!a}")

    def match(self, pattern: re.Pattern[str], what: str) -> re.Match[str]:
        found = pattern.match(self.text, self.place)
        if found is None:
            raise self._error(what)
        self.place = found.end()
        return found

    def until(self, literal: str) -> str:
        end = self.text.find(literal, self.place)
        if end < 0:
            raise self._error(f"a value that ends with {unseal(literal)!a}")
        value, self.place = self.text[self.place : end], end + len(literal)
        return value

    def _error(self, wanted: str) -> PromptError:
        return PromptError(
            f"in the block of tool calls: expected {wanted}, got {_short(self.rest)}"
        )


def _short(sealed: str) -> str:
    return f"{unseal(sealed)[:40]!a}" if sealed else "the end of the text"
