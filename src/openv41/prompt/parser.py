"""Whole answers to messages, as strict as the released parser: a broken format is an error."""

from collections.abc import Iterable

from openv41.errors import PromptError
from openv41.prompt.dsml import CALLS, parse_calls, to_arguments
from openv41.prompt.messages import Message, ToolCall
from openv41.prompt.pieces import Section
from openv41.prompt.tokens import (
    EOS,
    SEALED,
    SEALED_DSML,
    SEALED_EOS,
    SEALED_THINK_END,
    THINK_END,
    Piece,
    seal,
    split_markers,
    unseal,
)

CALLS_LEAD = f"\n\n<{SEALED_DSML}{CALLS}\n"


def parse(answer: str | Iterable[Piece], section: Section = "reasoning") -> Message:
    """Parse what follows a prompt, the token that ends the answer included.

    Args:
        answer: Pieces as the tokenizer knows them; in plain text every spelled marker counts.
        section: Where the answer starts, as ``Prompt.section`` tells.
    """
    text = seal(split_markers(answer) if isinstance(answer, str) else answer)
    body, end, rest = text.partition(SEALED_EOS)
    if not end:
        raise PromptError(f"the answer does not end with {EOS!a}")
    if rest:
        raise PromptError(f"text after {EOS!a}: {unseal(rest)[:40]!a}")
    reasoning = content = ""
    if section == "reasoning":
        reasoning, end, body = body.partition(SEALED_THINK_END)
        if not end:
            raise PromptError(f"the reasoning does not end with {THINK_END!a}")
        _refuse_markers(reasoning, "reasoning")
    calls: list[ToolCall] = []
    if section != "calls":
        content, lead, body = body.partition(CALLS_LEAD)
        _refuse_markers(content, "content")
        if not lead:
            return Message("assistant", content, reasoning=reasoning)
    for name, parameters in parse_calls(body):
        calls.append(ToolCall(name, to_arguments(parameters), parameters=parameters))
    return Message("assistant", content, reasoning=reasoning, tool_calls=calls)


def _refuse_markers(text: str, where: str) -> None:
    found = SEALED.search(text)
    if found:
        raise PromptError(f"{unseal(found[0])!a} in the {where}, at character {found.start()}")
