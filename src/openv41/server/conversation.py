"""From the body of a chat to its prompt, and to what its answer may hold."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from openv41.engine.constraint import Constraint
from openv41.engine.grammar import AnswerConstraint, Grammar
from openv41.engine.tool_grammar import calls_lark
from openv41.io.transcript import render_transcript
from openv41.prompt import Conversation, Prompt, encode, from_request
from openv41.prompt import Message as PromptMessage
from openv41.prompt.dsml import CALLS
from openv41.prompt.messages import schema_of
from openv41.prompt.tokens import DSML, THINK_END
from openv41.server.backend import ServedModel
from openv41.server.errors import ApiError
from openv41.server.image_loader import ImageSource
from openv41.server.schemas import ChatBody, FilePart, ImagePart, Message, Part

_OPENING = f"\n\n<MARK{CALLS}\n"
_TOOLS = "the calls of the tools"


@dataclass(frozen=True)
class Chat:
    """A chat in the prompt format, its images not read yet."""

    prompt: Prompt
    images: tuple[ImageSource, ...]
    constraint: Constraint | None


def read_chat(body: ChatBody, model: ServedModel) -> Chat:
    """Encode a chat in the prompt format; raises PromptError and InputError."""
    thinks = _thinks(body)
    # Read without reasoning, where a choice of tools is checked and may begin the calls.
    asked = from_request({**_fields(body), "thinking": {"type": "disabled"}})
    is_forced = asked.tool_choice not in ("auto", "none")
    conversation = asked
    if thinks:  # the prompt cannot begin the calls: the constraint enforces them after reasoning
        conversation = replace(
            asked,
            thinking=True,
            tools=asked.offered_tools,
            tool_choice="auto" if is_forced else asked.tool_choice,
        )
    prompt = encode(conversation)
    images = []
    for image in prompt.images:
        assert isinstance(image.source, ImageSource), f"no source of an image: {image.source!a}"
        images.append(image.source)
    constraint = _Rules(body, asked, prompt, model).constraint(is_forced=is_forced)
    return Chat(prompt, tuple(images), constraint)


def read_transcript(
    body: ChatBody, model: ServedModel
) -> tuple[tuple[int, ...], Constraint | None]:
    """Token ids of a chat as a plain transcript, which has no reasoning, tools and images."""
    given = {
        "tools": bool(body.tools),
        "tool_choice": body.tool_choice not in (None, "none", "auto"),
        "add_generation_prompt": body.add_generation_prompt is False,
        "continue_final_message": bool(body.continue_final_message),
        "thinking": _switches(body) - {False} != set(),
        "reasoning_effort": _effort(body) not in (None, "none"),
    }
    given |= {
        f"messages[{place}].{name}": bool(getattr(message, name))
        for place, message in enumerate(body.messages)
        for name in ("tool_calls", "reasoning_content", "prefix", "task")
    }
    messages = []
    for place, message in enumerate(body.messages):
        parts = _parts(message, place)
        given[f"messages[{place}].role"] = message.role in ("tool", "latest_reminder")
        given[f"messages[{place}].content"] = any(part["type"] != "text" for part in parts)
        messages.append((message.role, "".join(str(part.get("text", "")) for part in parts)))
    if found := [name for name, is_given in given.items() if is_given]:
        raise ApiError(
            400,
            f"{found[0]} cannot be used here: the tokenizer of this checkpoint lacks the prompt "
            "format's special tokens, so that chats are plain transcripts",
            code="invalid_value",
            param=found[0].split("[", maxsplit=1)[0],
        )
    schema = _content_schema(body)
    constraint = None
    if schema is not None:
        grammar = model.grammars.json(schema)
        constraint = AnswerConstraint(
            compiler=model.grammars, has_reasoning=False, content=grammar, calls=None
        )
    ids = render_transcript(messages, model.tokenizer, bos_id=model.bos_id, eos_id=model.eos_id)
    return ids, constraint


class _Rules:
    """What the answer to one chat may hold."""

    def __init__(
        self, body: ChatBody, asked: Conversation, prompt: Prompt, model: ServedModel
    ) -> None:
        self._tools, self._section, self._model = asked.offered_tools, prompt.section, model
        self._schema = _content_schema(body)
        one_tool = bool(asked.chosen_tool)  # such a choice asks for exactly one call
        self._many = body.parallel_tool_calls is not False and not one_tool
        last = asked.messages[-1]
        self._begun = _text(last) if last.prefix else ""

    def constraint(self, *, is_forced: bool) -> Constraint | None:
        if not self._tools and self._schema is None:
            return None
        if self._section is None:
            raise ApiError(
                400,
                "tools and response_format need an answer that starts behind the prompt; leave "
                "add_generation_prompt on, or end with a user's message",
                code="invalid_value",
            )
        tokenizer = self._model.tokenizer
        return AnswerConstraint(
            compiler=self._model.grammars,
            has_reasoning=self._section == "reasoning",
            content=self._content(is_forced=is_forced),
            calls=self._calls(f"{CALLS}\n") if self._tools else None,
            think_end_id=tokenizer.special_id(THINK_END),
            marker_id=tokenizer.special_id(DSML),
        )

    def _content(self, *, is_forced: bool) -> Grammar | None:
        if is_forced:
            return self._calls("" if self._section == "calls" else _OPENING)
        if self._schema is None:
            return None
        grammars = self._model.grammars
        grammar = (
            self._calls(_OPENING, answer=self._schema)
            if self._tools
            else grammars.json(self._schema)
        )
        return grammars.advance(grammar, self._begun)

    def _calls(self, opening: str, answer: Mapping[str, Any] | None = None) -> Grammar:
        marker = self._model.tokenizer.special_id(DSML)
        text = calls_lark(self._tools, marker, opening=opening, many=self._many, answer=answer)
        return self._model.grammars.lark(text, _TOOLS)


def _fields(body: ChatBody) -> dict[str, Any]:
    """Fields of a request as the prompt format reads them."""
    options, effort = body.chat_template_kwargs, _effort(body)
    asks = body.add_generation_prompt
    return {
        "messages": [_entry(place, message) for place, message in enumerate(body.messages)],
        "tools": body.tools,
        "tool_choice": body.tool_choice,
        "response_format": body.response_format,
        "drop_thinking": None if options is None else options.drop_thinking,
        "add_generation_prompt": True if asks is None else asks,
        "continue_final_message": body.continue_final_message,
        "reasoning_effort": None if effort == "none" else effort,
    }


def _entry(place: int, message: Message) -> dict[str, Any]:
    calls = [
        {"id": call.id, "function": call.function.model_dump()} for call in message.tool_calls or ()
    ]
    return {
        "role": "user" if message.role == "developer" else message.role,
        "content": _parts(message, place),
        "reasoning_content": message.reasoning_content,
        "tool_calls": calls,
        "tool_call_id": message.tool_call_id,
        "prefix": message.prefix,
        "task": message.task,
    }


def _parts(message: Message, place: int) -> list[dict[str, Any]]:
    if message.content is None:
        return []
    if isinstance(message.content, str):
        return [{"type": "text", "text": message.content}]
    return [
        _part(part, f"messages[{place}].content[{number}]")
        for number, part in enumerate(message.content)
    ]


def _part(part: Part, where: str) -> dict[str, Any]:
    if isinstance(part, ImagePart):
        return {"type": "image", "image": ImageSource(where, part.image_url.url)}
    if isinstance(part, FilePart):
        data, name = part.file.file_data, part.file.filename
        url = data if data[:5].lower() == "data:" else f"data:;base64,{data}"
        return {
            "type": "image",
            "image": ImageSource(f"{where} ({name!a:.80})" if name else where, url),
        }
    return {"type": "text", "text": part.text}


def _text(message: PromptMessage) -> str:
    """Text of a message as the prompt has it."""
    parts = [message.content] if isinstance(message.content, str) else message.content
    return "\n\n".join(part for part in parts if isinstance(part, str))


def _switches(body: ChatBody) -> set[bool]:
    """What the request says about reasoning, in each of the forms that clients send."""
    options = body.chat_template_kwargs
    said = [] if options is None else [options.thinking, options.enable_thinking]
    if body.thinking is not None:
        said.append(body.thinking.type == "enabled")
    if _effort(body) == "none":
        said.append(False)
    return {switch for switch in said if switch is not None}


def _thinks(body: ChatBody) -> bool:
    """Whether the model reasons first: as asked for, by default yes."""
    said = _switches(body)
    if len(said) > 1:
        text = "the request switches thinking both on and off"
        raise ApiError(400, text, code="invalid_value", param="thinking")
    return said.pop() if said else True


def _effort(body: ChatBody) -> object:
    options = body.chat_template_kwargs
    inner = None if options is None else options.reasoning_effort
    return inner if body.reasoning_effort is None else body.reasoning_effort


def _content_schema(body: ChatBody) -> Mapping[str, Any] | None:
    """Schema that the content must fit."""
    schema = schema_of(body.response_format)
    if body.response_format is not None and body.response_format.get("type") == "json_object":
        return {"type": "object"}
    return schema
