"""Answers of ``/v1/chat/completions``: what the model says, taken apart."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pydantic import BaseModel

from openv41.engine.prompt_format import AnswerReader
from openv41.engine.request import Event, FinishReason, TokenLogprob
from openv41.prompt import CallStart, join
from openv41.prompt import Event as PromptEvent
from openv41.prompt.dsml import join_name
from openv41.prompt.stream import ToldCall
from openv41.server.answers import (
    Alternative,
    CallFunction,
    CallPiece,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatDelta,
    ChatLogprob,
    ChatLogprobs,
    ChatMessage,
    ChatPiece,
    Finish,
    FunctionPiece,
    ToolCall,
)
from openv41.server.backend import ServedModel
from openv41.server.formats import Format, finish_of, finite
from openv41.server.plans import Plan
from openv41.server.schemas import ChatBody


class ChatFormat(Format):
    """Answers of ``/v1/chat/completions``."""

    prefix = "chatcmpl"

    def __init__(self, body: ChatBody, plan: Plan, model: ServedModel) -> None:
        super().__init__(body, plan, model)
        self.logprobs = bool(body.logprobs)
        self.most = body.top_logprobs or 0
        section = plan.prompts[0].section
        self._readers = [AnswerReader(model.tokenizer, section) for _ in plan.requests]
        self._has_calls = [False for _ in plan.requests]

    def opening(self, index: int) -> BaseModel | None:
        """Name the role."""
        delta = ChatDelta(role="assistant", content="")
        choice = ChatPiece(index=index, delta=delta, logprobs=None, finish_reason=None)
        ids = {"prompt_token_ids": list(self.plan.prompts[0].tokens)} if self.return_ids else {}
        return self._chunk(choice, ids)

    def piece(self, index: int, event: Event) -> BaseModel | None:
        """What one event adds."""
        said = self._read(index, [event])
        fields = _delta(said)
        if not fields and self._is_silent(replace(event, text="")):
            return None
        choice = ChatPiece(
            index=index,
            delta=ChatDelta(**fields),
            logprobs=self._logprobs([event]) if event.logprob is not None else None,
            finish_reason=self._finish(index, [event]),
            **self._extras([event]),
        )
        return self._chunk(choice, {})

    def closing(self) -> BaseModel:
        """Usage counts."""
        return ChatChunk(
            **self._about, object="chat.completion.chunk", choices=[], usage=self.usage()
        )

    def whole(self, events: Sequence[Sequence[Event]]) -> BaseModel:
        """Every choice from all of its events."""
        choices = [
            ChatChoice(
                index=index,
                message=_message(self._read(index, own)),
                logprobs=self._logprobs(own),
                finish_reason=self._finish(index, own),
                **self._extras(own),
            )
            for index, own in enumerate(events)
        ]
        extras: dict[str, Any] = {}
        if self.return_ids:
            extras["prompt_token_ids"] = list(self.plan.prompts[0].tokens)
        if self.with_prompt_logprobs:
            extras["prompt_logprobs"] = self._prompt_logprobs(events[0])
        return ChatCompletion(
            **self._about, object="chat.completion", choices=choices, usage=self.usage(), **extras
        )

    def _read(self, index: int, events: Sequence[Event]) -> list[PromptEvent]:
        said = [one for event in events for one in self._readers[index].read(event)]
        self._has_calls[index] |= any(isinstance(one, CallStart) for one in said)
        return said

    def _finish(self, index: int, events: Sequence[Event]) -> Finish | None:
        if events and events[-1].finish_reason is FinishReason.STOP and self._has_calls[index]:
            return "tool_calls"
        return finish_of(events)

    def _chunk(self, choice: ChatPiece, extras: dict[str, Any]) -> ChatChunk:
        return ChatChunk(
            **self._about,
            object="chat.completion.chunk",
            choices=[choice],
            **self._piece_extras(),
            **extras,
        )

    def _logprobs(self, events: Sequence[Event]) -> ChatLogprobs | None:
        if not self.logprobs:
            return None
        content = []
        for event in events:
            if event.logprob is not None:
                alternatives = [self._alternative(t) for t in event.top[: self.most]]
                own = self._alternative(event.logprob).model_dump()
                content.append(ChatLogprob(**own, top_logprobs=alternatives))
        return ChatLogprobs(content=content, refusal=None)

    def _alternative(self, token: TokenLogprob) -> Alternative:
        return Alternative(
            token=self._spell(token.token),
            logprob=finite(token.logprob),
            bytes=list(self.model.token_bytes(token.token)),
        )


def _delta(events: Sequence[PromptEvent]) -> dict[str, Any]:
    """Fields of a piece: those that something is said of."""
    told = join(events)
    fields: dict[str, Any] = {"reasoning_content": told.reasoning, "content": told.content}
    fields["tool_calls"] = [_call_piece(call) for call in told.calls]
    return {name: value for name, value in fields.items() if value}


def _call_piece(call: ToldCall) -> CallPiece:
    start = call.start
    if start is None:
        return CallPiece(index=call.index, function=FunctionPiece(arguments=call.arguments))
    name = join_name(start.namespace, start.name)
    function = FunctionPiece(name=name, arguments=call.arguments)
    return CallPiece(index=call.index, id=start.id, type="function", function=function)


def _message(events: Sequence[PromptEvent]) -> ChatMessage:
    """All of an answer; the content is null where there are only calls."""
    told = join(events)
    extras: dict[str, Any] = {}
    if told.reasoning:
        extras["reasoning_content"] = told.reasoning
    if told.calls:
        extras["tool_calls"] = [_tool_call(call) for call in told.calls]
    content = told.content or (None if told.calls else "")
    return ChatMessage(role="assistant", content=content, refusal=None, **extras)


def _tool_call(call: ToldCall) -> ToolCall:
    assert call.start is not None, f"call {call.index} has no start"
    name = join_name(call.start.namespace, call.start.name)
    function = CallFunction(name=name, arguments=call.arguments)
    return ToolCall(id=call.start.id, type="function", function=function)
