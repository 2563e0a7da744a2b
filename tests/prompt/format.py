"""Spellings and answers that the tests share; written out, not taken from the package."""

from openv41.prompt import Conversation, Message, encode

BOS = "<\uff5cbegin\u2581of\u2581sentence\uff5c>"
EOS = "<\uff5cend\u2581of\u2581sentence\uff5c>"
SYSTEM = "<\uff5cSystem\uff5c>"
USER = "<\uff5cUser\uff5c>"
ASSISTANT = "<\uff5cAssistant\uff5c>"
REMINDER = "<\uff5clatest_reminder\uff5c>"
IMAGE = "<\uff5cdeepseek_image\uff5c>"
D = "\uff5cDSML\uff5c"
EFFORT = (
    SYSTEM + "Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the "
    "reasoning)\n\n"
)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def parameter(name, value, is_text):
    kind = "true" if is_text else "false"
    return f'<{D} parameter name="{name}" string="{kind}">{value}</{D} parameter>'


def call(name, *parameters):
    return f'<{D} invoke name="{name}">\n' + "\n".join(parameters) + f"\n</{D} invoke>"


def block(*calls):
    return f"<{D} calls>\n" + "\n".join(calls) + f"\n</{D} calls>"


def text_after_header(conversation_text):
    """What a prompt says after its last user's turn and header."""
    return conversation_text.rpartition(ASSISTANT)[2]


def answer_pieces(message, *, thinking=True):
    """Pieces of an answer, as the encoder writes them after the header."""
    question = Message("user", "U")
    before = encode(Conversation([question], thinking=thinking)).pieces
    after = encode(Conversation([question, message], thinking=thinking)).pieces
    assert after[: len(before)] == before
    return after[len(before) :]


def answer_text(message, *, thinking=True):
    return "".join(text for text, _ in answer_pieces(message, thinking=thinking))
