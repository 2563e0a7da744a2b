"""``--set key=value``: typed changes of nested configuration classes."""

import types
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from difflib import SequenceMatcher
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from openv41.errors import ConfigError

Config = TypeVar("Config")
TRUE, FALSE = ("true", "yes", "1"), ("false", "no", "0")


def parse_settings(settings: Iterable[str]) -> dict[str, str]:
    """Split ``key=value`` words; the last of equal keys wins."""
    parsed, problems = {}, []
    for setting in settings:
        key, separator, value = setting.partition("=")
        if separator and key.strip():
            parsed[key.strip()] = value.strip()
        else:
            problems.append(f"{setting!r} is not of the form key=value")
    _raise_if(problems)
    return parsed


def apply_settings(config: Config, settings: Mapping[str, str], *, prefix: str = "") -> Config:
    """Change fields by their paths; all problems of one call are reported together."""
    paths = field_paths(config)
    changes: dict[str, Any] = {}
    problems = []
    for path, text in settings.items():
        if path not in paths:
            problems.append(unknown_path(prefix + path, [prefix + known for known in paths]))
            continue
        try:
            changes[path] = _parse(text, paths[path])
        except ValueError:
            problems.append(f"{prefix}{path} is {text!r}, must be {_describe(paths[path])}")
    _raise_if(problems)
    return _rebuild(config, changes)


def field_paths(config: object) -> dict[str, Any]:
    """Type of every field that holds a plain value, by its dotted path."""
    hints = get_type_hints(type(config))
    paths: dict[str, Any] = {}
    for spec in fields(config):  # type: ignore[arg-type]
        value = getattr(config, spec.name)
        if is_dataclass(value):
            paths |= {f"{spec.name}.{name}": hint for name, hint in field_paths(value).items()}
        elif not _holds_component(hints[spec.name]):
            paths[spec.name] = hints[spec.name]
    return paths


def unknown_path(path: str, known: Iterable[str]) -> str:
    """Say that a path is unknown, with the valid ones, the closest first."""
    leaf = path.rpartition(".")[2]

    def distance(other: str) -> float:
        whole = SequenceMatcher(None, path, other).ratio()
        return -max(whole, SequenceMatcher(None, leaf, other.rpartition(".")[2]).ratio() - 0.05)

    return f"there is no setting {path!r}; there are {', '.join(sorted(known, key=distance))}"


def _rebuild(config: Config, changes: Mapping[str, Any]) -> Config:
    """Replace each component once, so that only the final values are checked."""
    own: dict[str, Any] = {}
    below: dict[str, dict[str, Any]] = {}
    for path, value in changes.items():
        head, _, rest = path.partition(".")
        if rest:
            below.setdefault(head, {})[rest] = value
        else:
            own[head] = value
    own |= {head: _rebuild(getattr(config, head), inner) for head, inner in below.items()}
    return replace(config, **own) if own else config  # type: ignore[type-var]


def _parse(text: str, hint: Any) -> Any:  # noqa: ANN401 -- whatever the annotation says
    origin, choices = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if text.lower() == "none":
            return None
        return _parse(text, next(c for c in choices if c is not types.NoneType))
    if origin is Literal:
        if text in choices:
            return text
        raise ValueError(text)
    if origin is tuple:
        return tuple(_parse(part.strip(), choices[0]) for part in text.split(",") if part.strip())
    if hint is bool:
        if text.lower() not in (*TRUE, *FALSE):
            raise ValueError(text)
        return text.lower() in TRUE
    return hint(text)


def _describe(hint: Any) -> str:  # noqa: ANN401 -- whatever the annotation says
    names = {int: "a whole number such as 1_000", float: "a number", bool: "true or false"}
    origin, choices = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return f"{_describe(next(c for c in choices if c is not types.NoneType))}, or none"
    if origin is Literal:
        return f"one of {', '.join(map(str, choices))}"
    if origin is tuple:
        return "whole numbers with commas between them"
    return names.get(hint, "text")


def _holds_component(hint: Any) -> bool:  # noqa: ANN401 -- whatever the annotation says
    return any(is_dataclass(part) for part in (hint, *get_args(hint)))


def _raise_if(problems: list[str]) -> None:
    if problems:
        raise ConfigError("--set", problems)
