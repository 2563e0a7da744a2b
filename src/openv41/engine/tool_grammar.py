"""Grammars of tool calls: the markup of the prompt format around values that fit JSON schemas.

Text parameters stand as they are in the markup, all others as JSON: a schema is split into what it
says of texts, which becomes a pattern, and of all else, which stays a schema. Parameters come in
the order of the tool's schema. What cannot be expressed is an InputError; names that do not fit
into their tags are a PromptError.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from openv41.engine.grammar import JSON_STYLE, check_size
from openv41.errors import InputError
from openv41.prompt.dsml import (
    CALLS,
    INVOKE,
    INVOKE_END,
    JSON_KIND,
    PARAMETER,
    PARAMETER_END,
    TEXT_KIND,
    check_names,
)
from openv41.prompt.messages import JsonObject, describe_tool

Schema = JsonObject | bool

_NOTES = frozenset(
    ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly",
     "$comment", "$schema", "$id", "$defs", "definitions", "format", "strict", "nullable")
)  # fmt: skip
_TEXT_RULES = frozenset(("minLength", "maxLength", "pattern"))
_KINDS_OF = {
    "string": ("minLength", "maxLength", "pattern"),
    "object": ("properties", "required", "additionalProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
_TYPES = ("object", "array", "number", "boolean", "null", "string")
_UNCLEAR = ("not", "if", "then", "else", "allOf", "dependentSchemas", "dependentRequired")
_ROOT = _NOTES | {"type", "properties", "required", "additionalProperties"}
_DEFINITIONS = ("$defs", "definitions")
_MAX_DEPTH = 32  # references and choices inside each other; some schemas contain themselves
_MAX_TOOLS = 256  # twice what OpenAI's API allows
_MAX_NAME = 64  # characters that the model may give a parameter which the schema does not name


def calls_lark(
    tools: Sequence[JsonObject],
    marker: int,
    *,
    opening: str = "",
    many: bool = True,
    answer: JsonObject | None = None,
) -> str:
    """Lark grammar of a block of calls, of its rest behind ``opening``, or of another answer.

    Args:
        tools: Function tools as in OpenAI's API.
        marker: Id of the token that tags start with.
        opening: What comes before the first call, ``MARK`` for the marker.
        many: Whether there may be several calls.
        answer: Schema of a JSON text that may stand in place of the block.
    """
    if len(tools) > _MAX_TOOLS:
        raise InputError(f"{len(tools)} tools, must be at most {_MAX_TOOLS}")
    mark = f"<[{marker}]>"
    lead = " ".join(mark if part == "MARK" else _quote(part) for part in _split_marks(opening))
    names = [f"call_{number}" for number in range(len(tools))]
    rules = [
        f"start: block{' | answer' if answer is not None else ''}",
        f"block: {lead} call{'+' if many else ''} {_quote('</')} {mark} {_quote(CALLS)}",
        f"call: {' | '.join(names)}",
    ]
    if answer is not None:
        check_size(answer, "the JSON schema")
        rules.append(f"answer: {_json_rule(answer)}")
    for name, tool in zip(names, tools, strict=True):
        rules += _Tool(name, describe_tool(tool), mark).rules()
    return "\n".join(rules) + "\n"


class _Tool:
    """Rules of the calls of one tool."""

    def __init__(self, prefix: str, function: JsonObject, mark: str) -> None:
        self._prefix, self._mark = prefix, mark
        self._name = function["name"]
        self._where = f"tool {self._name!a}"
        schema = function.get("parameters")
        self._root: JsonObject = {"properties": {}} if schema is None else schema
        self._check_root()
        self._defs = {key: self._root[key] for key in _DEFINITIONS if key in self._root}

    def rules(self) -> Iterator[str]:
        prefix, mark = self._prefix, self._mark
        properties = dict(self._root.get("properties") or {})
        required = self._root.get("required") or []
        extra = self._root.get("additionalProperties", "properties" not in self._root)
        for key in required:
            if key not in properties and extra is False:
                raise InputError(f"{self._where}: {key!a} is required and may not be given")
            properties.setdefault(key, {} if extra is True else extra)
        check_names(self._name, properties)
        opening = _quote(f'{INVOKE}"{self._name}">\n')
        yield (
            f"{prefix}: {_quote('<')} {mark} {opening} {prefix}_first_0 "
            f"{_quote(f'{chr(10)}</')} {mark} {_quote(f'{INVOKE_END}{chr(10)}')}"
        )
        for number, (key, schema) in enumerate(properties.items()):
            skip = f" | {prefix}_{{}}_{number + 1}" if key not in required else ""
            rest = f"{prefix}_more_{number + 1}"
            for kind, before in (("first", "<"), ("more", "\n<")):
                tag = f"{prefix}_{kind}_{number}: {_quote(before)} {mark} {prefix}_value_{number}"
                yield f"{tag} {mark} {_quote(PARAMETER_END)} {rest}{skip.format(kind)}"
            yield from self._value(f"{prefix}_value_{number}", _quote(f'"{key}"'), schema)
        yield from self._end(len(properties), extra, list(properties))

    def _end(self, number: int, extra: Schema, known: Sequence[str]) -> Iterator[str]:
        """Rules for what follows the parameters that the schema names."""
        prefix, mark = self._prefix, self._mark
        if extra is False:
            yield f'{prefix}_first_{number}: ""'
            yield f'{prefix}_more_{number}: ""'
            return
        tail = f"{mark} {prefix}_other {mark} {_quote(PARAMETER_END)}"
        yield f'{prefix}_first_{number}: "" | {_quote("<")} {tail} {prefix}_more_{number}'
        yield f"{prefix}_more_{number}: ({_quote(chr(10) + '<')} {tail})*"
        name = f"{prefix}_NAME".upper()
        taken = "|".join(re.escape(key).replace("/", r"\/") for key in known if "\n" not in key)
        other_than = f' & ~/"({taken})"/' if taken else ""
        yield f'{name}: /"[^"\\n]{{1,{_MAX_NAME}}}"/{other_than}'
        yield from self._value(f"{prefix}_other", name, extra)

    def _value(self, rule: str, name: str, schema: Schema) -> Iterator[str]:
        """Rules of a parameter, from after its first marker to before its last."""
        texts, others = _split(schema, self._defs, f"{self._where}, parameter {name}")
        lead = f"{_quote(PARAMETER)} {name}"
        choices = []
        for place, pattern in enumerate(texts):
            terminal = f"{rule}_text_{place}".upper()
            choices.append(f"{lead} {_quote(TEXT_KIND)} {terminal}")
            yield f"{terminal}: {pattern}"
        for place, other in enumerate(others):
            below = f"{rule}_json_{place}"
            choices.append(f"{lead} {_quote(JSON_KIND)} {below} {_quote('</')}")
            yield f"{below}: {_json_rule({**self._defs, **other})}"
        yield f"{rule}: {' | '.join(choices)}"

    def _check_root(self) -> None:
        root = self._root
        if not isinstance(root, Mapping) or root.get("type", "object") != "object":
            raise InputError(f"{self._where}: its parameters must be the schema of an object")
        check_size(root, self._where)
        if unknown := sorted(set(root) - _ROOT):
            raise InputError(
                f"{self._where}: {unknown[0]!a} of its parameters cannot be enforced; allowed are "
                "properties, required and additionalProperties"
            )
        required = root.get("required") or []
        if not isinstance(root.get("properties") or {}, Mapping) or not isinstance(required, list):
            raise InputError(f"{self._where}: properties must be an object, required a list")
        if not isinstance(root.get("additionalProperties", True), bool | Mapping):
            raise InputError(f"{self._where}: additionalProperties must be a schema")
        if not all(isinstance(key, str) for key in required):
            raise InputError(f"{self._where}: required must be a list of names")


def _split(
    schema: Schema, defs: JsonObject, where: str, depth: int = 0
) -> tuple[list[str], list[JsonObject]]:
    """Patterns of the texts that fit a schema, with the end of their tag; schemas of all else."""
    if not isinstance(schema, bool | Mapping) or schema is False or depth > _MAX_DEPTH:
        raise InputError(f"{where}: {_short(schema)} is no schema that a value can fit")
    if schema is True:
        schema = {}
    _check_references(schema, where)
    if "$ref" in schema:
        _refuse_more(schema, {"$ref"}, where)
        return _split(_resolve(schema["$ref"], defs, where), defs, where, depth + 1)
    for kind in ("anyOf", "oneOf", "allOf"):
        if kind in schema:
            return _split_union(schema, kind, defs, where, depth)
    if "enum" in schema or "const" in schema:
        return _split_values(schema, where)
    types = _types(schema, where)
    texts: list[str] = []
    others: list[JsonObject] = []
    if "string" in types:
        if found := [key for key in _UNCLEAR if key in schema]:
            raise InputError(f"{where}: {found[0]!a} cannot be enforced on text")
        texts.append(_pattern(schema, where))
    if rest := [name for name in types if name != "string"]:
        dropped = _TEXT_RULES | {"format", *_DEFINITIONS}
        kept = {key: value for key, value in schema.items() if key not in dropped}
        others.append({**kept, "type": rest if len(rest) > 1 else rest[0]})
    return texts, others


def _split_union(
    schema: JsonObject, kind: str, defs: JsonObject, where: str, depth: int
) -> tuple[list[str], list[JsonObject]]:
    _refuse_more(schema, {kind}, where)
    branches = schema[kind]
    if not isinstance(branches, list) or not branches:
        raise InputError(f"{where}: {kind} must be a list of schemas")
    if kind == "allOf" and len(branches) > 1:
        raise InputError(f"{where}: allOf of several schemas cannot be enforced")
    parts = [_split(branch, defs, where, depth + 1) for branch in branches]
    texts = [text for part, _ in parts for text in part]
    others = [other for _, part in parts for other in part]
    if kind == "oneOf" and len(texts) > 1:
        raise InputError(f"{where}: oneOf with several kinds of text cannot be enforced")
    if kind == "oneOf" and len(others) > 1:
        others = [{"oneOf": others}]
    return texts, others


def _split_values(schema: JsonObject, where: str) -> tuple[list[str], list[JsonObject]]:
    """Values that are listed one by one."""
    kind = "const" if "const" in schema else "enum"
    _refuse_more(schema, {kind, "type"}, where)
    values = [schema["const"]] if kind == "const" else schema["enum"]
    if not isinstance(values, list):
        raise InputError(f"{where}: enum must be a list of values")
    texts = [value for value in values if isinstance(value, str)]
    others = [value for value in values if not isinstance(value, str)]
    types = _types(schema, where) if "type" in schema else _TYPES
    patterns = [" | ".join(_quote(text + "</") for text in texts)]
    listed: JsonObject = {"enum": others}
    if "type" in schema and others:
        rest = [name for name in types if name != "string"]
        listed = {**listed, "type": rest}
        others = others if rest else []
    if not (texts and "string" in types):
        patterns = []
    if not patterns and not others:
        raise InputError(f"{where}: {_short(schema)} is no schema that a value can fit")
    rest_schemas: list[JsonObject] = [listed] if others else []
    return patterns, rest_schemas


def _types(schema: JsonObject, where: str) -> Sequence[str]:
    """Types that a value may have; told by the other keywords where they are not said."""
    given = schema.get("type")
    if given is None:
        for name, keys in _KINDS_OF.items():
            if any(key in schema for key in keys):
                return (name,)
        return _TYPES
    types = given if isinstance(given, list) else [given]
    known = (*_TYPES, "integer")
    if not types or not all(name in known for name in types):
        raise InputError(f"{where}: type is {_short(given)}, must be of {', '.join(known)}")
    return types


def _pattern(schema: JsonObject, where: str) -> str:
    """Terminal of the texts that fit a schema, with the end of their tag."""
    least, most = (schema.get(key) for key in ("minLength", "maxLength"))
    for bound in (least, most):
        if bound is not None and (type(bound) is not int or bound < 0):
            raise InputError(f"{where}: minLength and maxLength must be numbers of characters")
    parts = []
    if least is not None or most is not None:
        span = f"{least or 0},{'' if most is None else most}"
        parts.append(rf"/(?s:.{{{span}}})<\//")
    if "pattern" in schema:
        parts.append(_searched(schema["pattern"], where))
    return " & ".join(parts) or r"/(?s:.*)<\//"


def _searched(pattern: object, where: str) -> str:
    """Terminal of the texts in which a pattern is found."""
    if not isinstance(pattern, str):
        raise InputError(f"{where}: pattern is {_short(pattern)}, must be text")
    begins, ends = pattern.startswith("^"), re.search(r"(?<!\\)(\\\\)*\$\Z", pattern) is not None
    inner = pattern[begins : len(pattern) - ends]
    bare = re.sub(r"\\.|\[[^\]]*\]", "", inner)
    if (begins or ends) and "|" in re.sub(r"\([^()]*\)", "", bare):
        raise InputError(
            f"{where}: pattern {_short(pattern)} cannot be enforced; put its alternatives into "
            "brackets: '^(a|b)$'"
        )
    if "^" in bare or "$" in bare or "\n" in inner:
        raise InputError(
            f"{where}: pattern {_short(pattern)} cannot be enforced; it may have ^ at its start "
            "and $ at its end only, and no line break"
        )
    inner = re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", inner)
    return f"/{'' if begins else '(?s:.*)'}({inner}){'' if ends else '(?s:.*)'}<\\//"


def _refuse_more(schema: JsonObject, known: set[str], where: str) -> None:
    if more := sorted(set(schema) - known - _NOTES):
        raise InputError(
            f"{where}: {more[0]!a} beside {min(known)!a} cannot be enforced; write one schema"
        )


def _resolve(reference: object, defs: JsonObject, where: str) -> Schema:
    parts = str(reference).removeprefix("#/").split("/")
    found: Any = defs
    for part in parts:
        found = found.get(part) if isinstance(found, Mapping) else None
    if found is None:
        raise InputError(f"{where}: there is nothing at {_short(reference)}")
    schema: Schema = found
    return schema


def _check_references(schema: object, where: str) -> None:
    """Refuse references to other places than the definitions: parts move into other schemas."""
    if isinstance(schema, Mapping):
        target = schema.get("$ref", "#/$defs/")
        if not str(target).startswith(tuple(f"#/{key}/" for key in _DEFINITIONS)):
            raise InputError(f"{where}: $ref is {_short(target)}, must begin with '#/$defs/'")
        schema = list(schema.values())
    if isinstance(schema, list):
        for item in schema:
            _check_references(item, where)


def _json_rule(schema: JsonObject) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": JSON_STYLE})


def _split_marks(text: str) -> list[str]:
    return [part for part in re.split("(MARK)", text) if part]


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=True)
    return text if len(text) <= 60 else text[:57] + "..."
