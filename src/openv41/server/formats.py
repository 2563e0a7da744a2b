"""From the engine's events to the bodies of answers, whole or in pieces."""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from openv41.engine.request import Event, FinishReason, TokenLogprob
from openv41.server.answers import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Finish,
    PromptLogprobs,
    PromptToken,
    Usage,
)
from openv41.server.backend import ServedModel
from openv41.server.plans import Plan
from openv41.server.schemas import CompletionBody, Sampling

LEAST_LOGPROB = -9999.0  # JSON has no infinity


class Format(ABC):
    """One answer on its way out; ``body`` says what its client asked for."""

    prefix: str

    def __init__(self, body: Sampling, plan: Plan, model: ServedModel) -> None:
        self.plan = plan
        self.model = model
        self.return_ids = bool(body.return_token_ids)
        self.with_usage = bool(body.stream_options and body.stream_options.include_usage)
        self.spell_as_ids = bool(body.return_tokens_as_token_ids)
        self.with_prompt_logprobs = body.prompt_logprobs is not None
        self.most_prompt_logprobs = body.prompt_logprobs or 0
        self._about: dict[str, Any] = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model.name,
        }
        self._cached: dict[int, int] = {}
        self._written = 0

    def count(self, index: int, event: Event) -> None:
        """Keep what the usage counts need."""
        self._written += event.token is not None
        if event.cached_tokens:
            self._cached[index // self.plan.n] = event.cached_tokens

    def usage(self) -> Usage:
        """Count prompts once each, however many choices they have."""
        read = sum(len(prompt.tokens) for prompt in self.plan.prompts)
        return Usage(
            prompt_tokens=read,
            completion_tokens=self._written,
            total_tokens=read + self._written,
            prompt_tokens_details={"cached_tokens": sum(self._cached.values())},
        )

    @abstractmethod
    def opening(self, index: int) -> BaseModel | None:
        """Piece before the first token of a choice."""

    @abstractmethod
    def piece(self, index: int, event: Event) -> BaseModel | None:
        """Piece of one event; None if it shows nothing."""

    @abstractmethod
    def closing(self) -> BaseModel:
        """Piece with the usage counts and no choice."""

    @abstractmethod
    def whole(self, events: Sequence[Sequence[Event]]) -> BaseModel:
        """Build the answer of all choices."""

    def _is_silent(self, event: Event) -> bool:
        says = event.text or event.finish_reason or event.logprob is not None
        return not (says or (self.return_ids and event.token is not None))

    def _extras(self, events: Sequence[Event]) -> dict[str, Any]:
        """Token ids of a choice, where asked for."""
        return {"token_ids": _tokens(events)} if self.return_ids else {}

    def _piece_extras(self) -> dict[str, Any]:
        """Without usage counts, as every piece but the last says where they were asked for."""
        return {"usage": None} if self.with_usage else {}

    def _spell(self, token: int) -> str:
        """A token as text; one that is no whole character as its bytes."""
        if self.spell_as_ids:
            return f"token_id:{token}"
        data = self.model.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _top(self, top: Sequence[TokenLogprob]) -> dict[str, float]:
        return {self._spell(t.token): finite(t.logprob) for t in top}

    def _prompt_logprobs(self, events: Sequence[Event]) -> PromptLogprobs:
        places: PromptLogprobs = []
        for own, top in zip(events[0].prompt_logprobs, events[0].prompt_top, strict=True):
            shown = [*top[: self.most_prompt_logprobs], *([] if own is None else [own])]
            tokens = {
                str(t.token): PromptToken(
                    logprob=finite(t.logprob), decoded_token=self._spell(t.token)
                )
                for t in shown
            }
            places.append(None if own is None else tokens)
        return places


class CompletionFormat(Format):
    """Answers of ``/v1/completions``."""

    prefix = "cmpl"

    def __init__(self, body: CompletionBody, plan: Plan, model: ServedModel) -> None:
        super().__init__(body, plan, model)
        self.echo = bool(body.echo)
        self.logprobs = body.logprobs
        self._offsets = [0] * len(plan.requests)  # characters sent of each choice
        self._begun = [False] * len(plan.requests)

    def opening(self, index: int) -> BaseModel | None:
        """Nothing: a completion has no role."""
        return None

    def piece(self, index: int, event: Event) -> BaseModel | None:
        """Text of one event, with the prompt before it where it is echoed."""
        if self._begun[index] and self._is_silent(event):
            return None
        choice = self._choice(index, [event])
        return Completion(
            **self._about, object="text_completion", choices=[choice], **self._piece_extras()
        )

    def closing(self) -> BaseModel:
        """Usage counts."""
        return Completion(**self._about, object="text_completion", choices=[], usage=self.usage())

    def whole(self, events: Sequence[Sequence[Event]]) -> BaseModel:
        """Every choice from all of its events."""
        choices = [self._choice(index, list(own)) for index, own in enumerate(events)]
        return Completion(
            **self._about, object="text_completion", choices=choices, usage=self.usage()
        )

    def _choice(self, index: int, events: list[Event]) -> CompletionChoice:
        first = not self._begun[index]
        self._begun[index] = True
        prompt = self.plan.prompt_of(index)
        extras = self._extras(events)
        if self.return_ids and first:
            extras["prompt_token_ids"] = list(prompt.tokens)
        if self.with_prompt_logprobs:
            extras["prompt_logprobs"] = self._prompt_logprobs(events)
        logprobs = None
        if self.logprobs is not None:
            logprobs = CompletionLogprobs(
                text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[]
            )
            if self.echo and first:
                self._echo_logprobs(logprobs, events[0], index)
        text = prompt.text if self.echo and first else ""
        self._offsets[index] += len(text)
        for event in events:
            if logprobs is not None and event.logprob is not None:
                self._add(logprobs, self._offsets[index], event.logprob, event.top)
            self._offsets[index] += len(event.text)
        text += "".join(event.text for event in events)
        finish = finish_of(events)
        return CompletionChoice(
            index=index, text=text, logprobs=logprobs, finish_reason=finish, **extras
        )

    def _echo_logprobs(self, logprobs: CompletionLogprobs, event: Event, index: int) -> None:
        """List the prompt's tokens; those that the server added take no room in the text."""
        prompt = self.plan.prompt_of(index)
        offset = 0
        pairs = zip(event.prompt_logprobs, event.prompt_top, strict=True)
        for place, (token, (own, top)) in enumerate(zip(prompt.tokens, pairs, strict=True)):
            self._add(logprobs, offset, own, top, token)
            if place >= prompt.num_added:
                offset += len(self.model.token_bytes(token).decode(errors="ignore"))

    def _add(
        self,
        logprobs: CompletionLogprobs,
        offset: int,
        own: TokenLogprob | None,
        top: Sequence[TokenLogprob],
        token: int = 0,
    ) -> None:
        logprobs.text_offset.append(offset)
        logprobs.tokens.append(self._spell(token if own is None else own.token))
        logprobs.token_logprobs.append(None if own is None else finite(own.logprob))
        listed = self._top([*top[: self.logprobs], *([] if own is None else [own])])
        logprobs.top_logprobs.append(listed if own is not None and self.logprobs else None)


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return max(logprob, LEAST_LOGPROB)


def _tokens(events: Sequence[Event]) -> list[int]:
    return [event.token for event in events if event.token is not None]


def finish_of(events: Sequence[Event]) -> Finish | None:
    """Why the last of some events ended a choice, if it did."""
    reason = events[-1].finish_reason if events else None
    if reason is None:
        return None
    return "length" if reason is FinishReason.LENGTH else "stop"
