"""Conversations to prompts.

A prompt is BOS, in thinking mode the effort line, and the turns. Messages of users and results of
tools that follow each other are one turn. The header of an assistant's turn belongs to the end of
the turn before it. Only what this module writes as special is a special token; the spelling of one
inside a message, an image's placeholder included, is plain text.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from openv41.errors import PromptError
from openv41.prompt.dsml import CALLS, render_calls
from openv41.prompt.messages import Conversation, Message, Part, effort_number, schema_of
from openv41.prompt.pieces import Prompt, PromptWriter, Section
from openv41.prompt.protocol_text import effort_line, response_format_block, tools_block
from openv41.prompt.tokens import (
    ASSISTANT,
    BOS,
    DSML,
    EOS,
    LATEST_REMINDER,
    SYSTEM,
    THINK,
    THINK_END,
    USER,
    task_token,
)

_BLANK_LINE = "\n\n"


@dataclass(frozen=True, slots=True)
class _Turn:
    """Messages that share one header: several of users and tools, else a single one."""

    role: str
    messages: tuple[Message, ...]

    @property
    def task(self) -> str | None:
        return next((message.task for message in self.messages if message.task), None)


def encode(conversation: Conversation) -> Prompt:
    """Encode a conversation, up to where the model's answer begins."""
    return _Encoder(conversation).encode()


class _Encoder:
    """The turns of one conversation and what they have in common."""

    def __init__(self, conversation: Conversation) -> None:
        self.settings = conversation
        self.thinking = conversation.thinking
        self.schema = schema_of(conversation.response_format)
        messages = _with_tools(conversation, self.schema is not None)
        self.turns = _sort_results(_group(messages))
        has_tools = any(message.tools for message in messages)
        self.keeps_all = has_tools or not conversation.drop_thinking
        asking = (place for place, turn in enumerate(self.turns) if self._asks(place, turn))
        self.last_question = max(asking, default=-1)
        self.section: Section | None = None  # what an answer at this place would start with
        self.out = PromptWriter()

    def encode(self) -> Prompt:
        self.out.special(BOS)
        if self.thinking:
            self.out.special(SYSTEM)
            self.out.text(effort_line(effort_number(self.settings.effort)))
        for place, turn in enumerate(self.turns):
            self._turn(place, turn)
            following = self.turns[place + 1 :]
            if not following or following[0].role in ("assistant", "latest_reminder"):
                is_final = all(later.role == "latest_reminder" for later in following)
                self._open(place, turn, is_final=is_final, is_last=not following)
        self._force_calls()
        return self.out.finish(self.section)

    def _asks(self, place: int, turn: _Turn) -> bool:
        """Whether the turn counts as a user's: later system messages do."""
        return turn.role == "user" or (turn.role == "system" and place > 0)

    def _turn(self, place: int, turn: _Turn) -> None:
        message = turn.messages[0]
        if turn.role == "latest_reminder":  # may stand between a header and its answer
            self.out.special(LATEST_REMINDER)
            self._content(message.content)
            return
        self.section = None
        if turn.role == "assistant":
            self._assistant(place, message)
        elif turn.role == "user":
            self._user(turn)
        else:
            self._system(place, message)

    def _system(self, place: int, message: Message) -> None:
        if place > 0 or not self.thinking:
            self.out.special(SYSTEM)
        self._content(message.content)
        if message.tools:
            self.out.text(_BLANK_LINE)
            self.out.extend(tools_block(message.tools))
        if place == 0 and self.schema is not None:
            self.out.text(_BLANK_LINE + response_format_block(self.schema))

    def _user(self, turn: _Turn) -> None:
        self.out.special(USER)
        for number, message in enumerate(turn.messages):
            self.out.text(_BLANK_LINE if number else "")
            is_result = message.role == "tool"
            self.out.text("<tool_result>" if is_result else "")
            self._content(message.content)
            self.out.text("</tool_result>" if is_result else "")

    def _assistant(self, place: int, message: Message) -> None:
        after_task = place > 0 and self.turns[place - 1].task is not None
        if self.thinking and not after_task and (self.keeps_all or place > self.last_question):
            self.out.text(message.reasoning)
            if message.prefix and not message.content:
                self.section = "reasoning"
                return
            self.out.special(THINK_END)
        self._content(message.content)
        if message.tool_calls:
            self.out.text(_BLANK_LINE)
            calls = [(call.full_name, call.parameters or ()) for call in message.tool_calls]
            self.out.extend(render_calls(calls))
        if message.wo_eos or message.prefix:
            self.section = "content"
        else:
            self.out.special(EOS)

    def _open(self, place: int, turn: _Turn, *, is_final: bool, is_last: bool) -> None:
        """Write what leads from a turn to an answer: a task's token or an assistant's header.

        As in the released encoder, only users' turns and later system messages have a header
        behind them: an assistant's message that follows another, or ends the conversation, has
        none unless ``generation_prompt`` asks for it.
        """
        if turn.task is not None:
            if turn.task == "action":
                self.out.special(ASSISTANT)
                self.out.special(THINK if self.thinking else THINK_END)
            self.out.special(task_token(turn.task))
            self.section = "content"
            return
        wanted = self._asks(place, turn)
        if is_final and self.settings.generation_prompt is not None:
            wanted |= is_last and self.section is None
            wanted &= self.settings.generation_prompt
        if wanted:
            thinks = self.thinking and (self.keeps_all or place >= self.last_question)
            self.out.special(ASSISTANT)
            self.out.special(THINK if thinks else THINK_END)
            self.section = "reasoning" if thinks else "content"

    def _force_calls(self) -> None:
        """Begin the calls that the tool choice asks for."""
        if self.settings.tool_choice in ("auto", "none"):
            return
        if self.out.pieces[-1] != (THINK_END, True):
            raise PromptError(
                f"tool_choice is {self.settings.tool_choice!a} and no answer starts after the last "
                "message; end with a user's message or a tool's result, without a task or a prefix"
            )
        self.out.text(_BLANK_LINE + "<")
        self.out.special(DSML)
        self.out.text(CALLS + "\n")
        self.section = "calls"

    def _content(self, content: str | Sequence[Part]) -> None:
        parts = [content] if isinstance(content, str) else content
        for number, part in enumerate(parts):
            self.out.text(_BLANK_LINE if number else "")
            if isinstance(part, str):
                self.out.text(part)
            else:
                self.out.image(part)


def _with_tools(conversation: Conversation, has_schema: bool) -> tuple[Message, ...]:
    """Messages with the tools on the first one, a system message, made if needed."""
    messages = tuple(conversation.messages)
    if conversation.tool_choice == "none":
        messages = tuple(dataclasses.replace(m, tools=()) if m.tools else m for m in messages)
    tools = conversation.offered_tools
    if not tools and not has_schema:
        return messages
    if messages[0].role != "system":
        messages = (Message("system"), *messages)
    first = dataclasses.replace(messages[0], tools=tools) if tools else messages[0]
    return (first, *messages[1:])


def _group(messages: Sequence[Message]) -> list[_Turn]:
    turns: list[tuple[str, list[Message]]] = []
    for message in messages:
        role = "user" if message.role == "tool" else message.role
        if role == "user" and turns and turns[-1][0] == "user":
            turns[-1][1].append(message)
        else:
            turns.append((role, [message]))
    return [_Turn(role, tuple(found)) for role, found in turns]


def _sort_results(turns: Sequence[_Turn]) -> list[_Turn]:
    """Put the results of each turn into the order of the last calls, texts keep their places.

    An id that no call has ranks as that of the first one, as in the released encoder.
    """
    order: dict[str, int] = {}
    out = []
    for turn in turns:
        if turn.messages[0].tool_calls:
            order = {call.id: rank for rank, call in enumerate(turn.messages[0].tool_calls)}
        found = [message for message in turn.messages if message.role == "tool"]
        found.sort(key=lambda message: order.get(message.tool_call_id, 0))
        results = iter(found)
        messages = [next(results) if m.role == "tool" else m for m in turn.messages]
        out.append(_Turn(turn.role, tuple(messages)))
    return out
