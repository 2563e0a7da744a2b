"""Answers of the engine are read as the format has them, however their text arrives."""

import pytest

from openv41.engine.prompt_format import AnswerReader, missing_tokens
from openv41.engine.request import Event, FinishReason
from openv41.engine.stops import TextStream
from openv41.errors import InputError
from openv41.io.prompt_ids import prompt_ids
from openv41.io.tokenizer import train_tokenizer
from openv41.prompt import Conversation, Image, Message, ToolCall, collect, encode
from openv41.prompt.tokens import DSML, IMAGE, THINK_END
from tests.engine.mini_engine import picture
from tests.io.tiny_checkpoint import make_tokenizer

CALL = ToolCall("f", '{"a": "x</y", "b": [1, 2]}')
ANSWERS = [
    Message("assistant", "caf\u00e9 \U0001f600"),
    Message("assistant", "", reasoning="think </think"),
    Message("assistant", f"spelled {THINK_END} and {DSML}", reasoning=f"spelled {THINK_END} too"),
    Message("assistant", "text", reasoning="so", tool_calls=[CALL, CALL]),
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def drawn(tokenizer, message):
    """Tokens that a model draws for a message, EOS left out."""
    question = Message("user", "U")
    before = encode(Conversation([question])).pieces
    *after, _ = encode(Conversation([question, message])).pieces[len(before) :]
    ids = []
    for text, is_special in after:
        ids += [tokenizer.special_id(text)] if is_special else tokenizer.encode(text)
    return ids


def events_of(tokenizer, ids, stop=()):
    """What the engine tells of tokens."""
    text = TextStream(tokenizer, stop)
    for token in ids:
        part = text.push(token)
        ends = text.matched is not None
        yield Event(token=token, text=part, finish_reason=FinishReason.STOP if ends else None)
        if ends:
            return
    yield Event(text=text.finish(), finish_reason=FinishReason.STOP)


def read(tokenizer, ids, stop=(), section="reasoning"):
    reader = AnswerReader(tokenizer, section)
    message = collect(s for event in events_of(tokenizer, ids, stop) for s in reader.read(event))
    calls = [ToolCall(c.name, c.arguments) for c in message.tool_calls]
    return message.reasoning, message.content, calls


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("stop", [(), ("</think>never",), ("\uff5cD never", "<never", "\n\nnever")])
def test_an_answer_is_what_was_meant(tokenizer, answer, stop):
    """Also where text is held back, for it may begin a stop string."""
    ids = drawn(tokenizer, answer)
    assert read(tokenizer, ids, stop) == (answer.reasoning, answer.content, [*answer.tool_calls])


def test_a_stop_string_inside_a_marker(tokenizer):
    ids = drawn(tokenizer, Message("assistant", "text", reasoning="so"))
    assert read(tokenizer, ids, ("nk>",)) == ("so", "", [])
    assert read(tokenizer, ids, ("ex",)) == ("so", "t", [])


def test_an_answer_that_breaks_off(tokenizer):
    ids = drawn(tokenizer, ANSWERS[3])
    before = ("", "", 0)
    for count in range(len(ids) + 1):
        reasoning, content, calls = read(tokenizer, ids[:count])
        assert "so".startswith(reasoning)
        assert "text\n\n<".startswith(content)
        # What may lead to calls is text where the answer ends with it.
        said = (reasoning, content.rstrip("\n<"), len(calls))
        assert all(now >= old for now, old in zip(said, before, strict=True))
        before = said
    assert (reasoning, content, calls) == ("so", "text", [*ANSWERS[3].tool_calls])


def test_half_a_character_before_a_marker(tokenizer):
    """Bytes that become no character end at the marker, and do not swallow it."""
    half = [tokenizer.encode("\u00e9")[0]]
    assert len(tokenizer.encode("\u00e9")) == 2
    ids = [*half, tokenizer.special_id(THINK_END), *tokenizer.encode("yes")]
    assert read(tokenizer, ids) == ("\ufffd", "yes", [])


def test_plain_text_has_no_markers(tokenizer):
    ids = [*tokenizer.encode("a"), tokenizer.special_id(THINK_END), *tokenizer.encode("b")]
    assert read(tokenizer, ids, section=None) == ("", f"a{THINK_END}b", [])


def test_spans_stand_where_their_images_do(tokenizer):
    images = [picture(1), picture(2, rows=6, cols=3)]
    parts = ["a", Image(images[0]), "b", Image(images[1])]
    prompt = encode(Conversation([Message("user", parts)]))
    token = tokenizer.special_id(IMAGE)
    ids = prompt_ids(prompt, tokenizer, images, image_token_id=token)
    short = prompt.token_ids(tokenizer)
    first, second = (place for place, found in enumerate(short) if found == token)
    lengths = [image.grid.span_length for image in images]
    assert lengths == [5, 6]
    assert list(ids) == [
        *short[:first], *[token] * 5, *short[first + 1 : second], *[token] * 6, *short[second + 1 :]
    ]  # fmt: skip
    with pytest.raises(InputError, match="do not belong together"):
        prompt_ids(prompt, tokenizer, images, image_token_id=token + 1)


def test_tokenizers_without_the_format_say_what_they_lack(tokenizer, tmp_path):
    assert missing_tokens(tokenizer) == ()
    (tmp_path / "text").write_text("abc")
    plain = train_tokenizer([tmp_path / "text"], vocab_size=259)
    assert len(missing_tokens(plain)) == 6
    assert DSML in missing_tokens(plain)
