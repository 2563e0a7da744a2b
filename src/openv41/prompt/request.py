"""Conversations from chat requests in the form of OpenAI's API."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from openv41.errors import PromptError
from openv41.prompt.messages import Conversation, Image, Message, Part, ToolCall, effort_number

_KINDS: dict[str, type | tuple[type, ...]] = {
    "text": str,
    "true or false": bool,
    "a list": (list, tuple),
    "an object": Mapping,
    "text or an object": (str, Mapping),
    "text or a list": (str, list, tuple),
}
_SETTINGS = {  # field of a request: setting of a conversation, kind
    "tools": ("tools", "a list"),
    "tool_choice": ("tool_choice", "text or an object"),
    "response_format": ("response_format", "an object"),
    "drop_thinking": ("drop_thinking", "true or false"),
    "add_generation_prompt": ("generation_prompt", "true or false"),
}
_FIELDS = {  # field of a message in a request: field of a message, kind
    "reasoning_content": ("reasoning", "text"),
    "tool_call_id": ("tool_call_id", "text"),
    "tools": ("tools", "a list"),
    "task": ("task", "text"),
    "wo_eos": ("wo_eos", "true or false"),
    "prefix": ("prefix", "true or false"),
}


def from_request(request: Mapping[str, Any]) -> Conversation:
    """Read a conversation from the fields of a chat request; other fields are left alone.

    Messages may hold ``reasoning_content``, ``tools``, ``task``, ``wo_eos`` and ``prefix``.
    ``thinking: {"type": "disabled"}`` and ``reasoning_effort: "none"`` are chat mode;
    ``continue_final_message`` makes the last message a prefix.
    """
    entries = _get(request, "messages", "a list") or ()
    messages = [_placed(place, entry) for place, entry in enumerate(entries)]
    if _get(request, "continue_final_message", "true or false") and messages:
        if messages[-1].role != "assistant":
            raise PromptError(
                f"the last message is of role {messages[-1].role}, only one of the assistant can "
                "be continued"
            )
        messages[-1] = replace(messages[-1], prefix=True)
    settings = _read(request, _SETTINGS)
    mode = (_get(request, "thinking", "an object") or {}).get("type", "enabled")
    if mode not in ("enabled", "disabled"):
        raise PromptError(f"thinking.type is {mode!a}, must be enabled or disabled")
    effort = request.get("reasoning_effort")
    if effort is not None and effort != "none":
        settings["effort"] = effort_number(effort)
    return Conversation(messages, thinking=mode == "enabled" and effort != "none", **settings)


def _placed(place: int, entry: object) -> Message:
    try:
        if not isinstance(entry, Mapping):
            raise PromptError(f"is {entry!a}, must be an object")
        return _message(entry)
    except PromptError as error:
        raise PromptError(f"messages[{place}]: {error}", param="messages") from None


def _message(entry: Mapping[str, Any]) -> Message:
    fields = _read(entry, _FIELDS)
    calls = tuple(_call(call) for call in _get(entry, "tool_calls", "a list") or ())
    role = _get(entry, "role", "text") or ""
    return Message(role, _content(entry), tool_calls=calls, **fields)


def _call(call: object) -> ToolCall:
    if not isinstance(call, Mapping):
        raise PromptError(f"tool call is {call!a}, must be an object")
    function = _get(call, "function", "an object") or {}
    arguments = _get(function, "arguments", "text or an object")
    return ToolCall(
        _get(function, "name", "text") or "",
        "{}" if arguments is None else arguments,
        id=_get(call, "id", "text") or "",
        namespace=_get(call, "namespace", "text") or _get(function, "namespace", "text") or "",
    )


def _content(entry: Mapping[str, Any]) -> str | tuple[Part, ...]:
    content = _get(entry, "content", "text or a list") or ""
    return content if isinstance(content, str) else tuple(_parts(content))


def _parts(blocks: Sequence[object]) -> Iterator[Part]:
    for block in blocks:
        kind = block.get("type") if isinstance(block, Mapping) else None
        inner = block.get(kind) if isinstance(block, Mapping) and isinstance(kind, str) else None
        if kind == "image_url" and isinstance(inner, Mapping):
            inner = inner.get("url")
        if kind == "text" and isinstance(inner, str):
            yield inner
        elif kind in ("image", "image_url") and inner is not None:
            yield Image(inner)
        else:
            raise PromptError(f"content block is {block!a}, must be text, image or image_url")


def _read(source: Mapping[str, Any], table: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
    found = {ours: _get(source, name, kind) for name, (ours, kind) in table.items()}
    return {name: value for name, value in found.items() if value is not None}


def _get(source: Mapping[str, Any], name: str, kind: str) -> Any:  # noqa: ANN401  (JSON)
    value = source.get(name)
    if value is not None and not isinstance(value, _KINDS[kind]):
        raise PromptError(f"{name} is {value!a}, must be {kind}")
    return value
