"""From chat messages to a prompt, for checkpoints that bring no format of their own.

A plain transcript: BOS, then for each message its role, a colon and the text; a system message
stands alone; EOS ends an answer; the prompt ends with ``Assistant:``. Roles are ordinary text and
so is whatever a message holds: no message can write BOS or EOS.
"""

from collections.abc import Sequence

from openv41.io.tokenizer import TextTokenizer

ROLES = {"user": "User", "assistant": "Assistant"}


def render_transcript(
    messages: Sequence[tuple[str, str]], tokenizer: TextTokenizer, *, bos_id: int, eos_id: int
) -> tuple[int, ...]:
    """Token ids of (role, text) pairs, up to where the assistant's next words begin."""
    ids = [bos_id]
    text = ""
    for role, content in messages:
        text += f"{ROLES[role]}: {content}" if role in ROLES else content
        if role == "assistant":
            ids += [*tokenizer.encode(text), eos_id]
            text = ""
        else:
            text += "\n\n"
    return (*ids, *tokenizer.encode(text + "Assistant:"))
