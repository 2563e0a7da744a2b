"""Conversations from chat requests in the form of OpenAI's API."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from openv41.errors import PromptError
from openv41.prompt.messages import Conversation, Image, Message, Part, ToolCall

_SAME_NAME = ("tool_call_id", "tools", "task", "wo_eos", "prefix")


def from_request(request: Mapping[str, Any]) -> Conversation:
    """Read a conversation from the fields of a chat request; other fields are left alone.

    ``messages`` may hold ``reasoning_content``, ``tools``, ``task``, ``wo_eos`` and ``prefix``.
    ``thinking: {"type": "disabled"}`` and ``reasoning_effort: "none"`` are chat mode.
    ``continue_final_message`` makes the last message a prefix.
    """
    entries = request.get("messages")
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        raise PromptError(f"messages is {entries!a}, must be a list")
    messages = [_placed(place, entry) for place, entry in enumerate(entries)]
    if request.get("continue_final_message") and messages:
        if messages[-1].role != "assistant":
            raise PromptError(
                f"the last message is of the {messages[-1].role}, only one of the assistant can be "
                "continued"
            )
        messages[-1] = replace(messages[-1], prefix=True)
    mode = request.get("thinking") or {}
    if not isinstance(mode, Mapping) or mode.get("type", "enabled") not in ("enabled", "disabled"):
        raise PromptError(f"thinking is {mode!a}, must have type enabled or disabled")
    effort = request.get("reasoning_effort")
    settings: dict[str, Any] = {
        "thinking": mode.get("type", "enabled") == "enabled" and effort != "none",
        "effort": None if effort == "none" else effort,
        "tools": request.get("tools"),
        "tool_choice": request.get("tool_choice"),
        "response_format": request.get("response_format"),
        "drop_thinking": request.get("drop_thinking"),
        "generation_prompt": request.get("add_generation_prompt"),
    }
    return Conversation(messages, **{k: v for k, v in settings.items() if v is not None})


def _placed(place: int, entry: object) -> Message:
    try:
        if not isinstance(entry, Mapping):
            raise PromptError(f"is {entry!a}, must be an object")
        return message_from(entry)
    except PromptError as error:
        raise PromptError(f"messages[{place}]: {error}") from None


def message_from(entry: Mapping[str, Any]) -> Message:
    """Read one message."""
    fields = {name: entry[name] for name in _SAME_NAME if entry.get(name) is not None}
    calls = entry.get("tool_calls") or ()
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise PromptError(f"tool_calls is {calls!a}, must be a list")
    return Message(
        entry.get("role"),  # type: ignore[arg-type]  # checked by the message
        _content(entry.get("content")),
        reasoning=entry.get("reasoning_content") or "",
        tool_calls=tuple(_call(call) for call in calls),
        **fields,
    )


def _call(call: object) -> ToolCall:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise PromptError(f"tool call is {call!a}, must have a function")
    return ToolCall(
        function.get("name"),  # type: ignore[arg-type]  # checked by the call
        function.get("arguments", "{}"),
        id=call.get("id") or "",
        namespace=call.get("namespace") or function.get("namespace") or "",
    )


def _content(content: object) -> str | tuple[Part, ...]:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise PromptError(f"content is {content!a}, must be text or a list of blocks")
    return tuple(_blocks(content))


def _blocks(blocks: Iterable[object]) -> Iterable[Part]:
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
            raise PromptError(
                f"content block is {block!a}, must be a text, an image or an image_url"
            )
