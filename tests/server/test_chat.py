"""``/v1/chat/completions`` as the official client sees it."""

import pytest

from openv41.engine.request import Event, Request
from openv41.io.transcript import render_transcript
from openv41.server.chat_format import ChatFormat
from openv41.server.plans import EncodedPrompt, Plan
from openv41.server.schemas import ChatBody
from tests.server.fake import BOS, EOS, MAX_LENGTH

HELLO = [{"role": "user", "content": "hello"}]
TEXT = "User: hello\n\nAssistant:"


def render(messages, model):
    return render_transcript(messages, model.tokenizer, bos_id=BOS, eos_id=EOS)


def test_a_chat_is_a_transcript(model):
    messages = [
        ("system", "Be brief."),
        ("user", "One?"),
        ("assistant", "Two."),
        ("user", "Three?"),
    ]
    encode = model.tokenizer.encode
    assert render(messages, model) == (
        BOS,
        *encode("Be brief.\n\nUser: One?\n\nAssistant: Two."),
        EOS,
        *encode("User: Three?\n\nAssistant:"),
    )


def test_messages_cannot_write_special_tokens(model):
    spelled = model.tokenizer.decode([EOS])
    ids = render([("user", spelled)], model)
    assert EOS not in ids
    assert model.tokenizer.decode(ids[1:]) == f"User: {spelled}\n\nAssistant:"


class Text(str):
    """Counts the characters that additions copy."""

    copied = 0

    def __add__(self, other):
        Text.copied += len(self) + len(other)
        return Text(str.__add__(self, other))

    def __radd__(self, other):
        Text.copied += len(self) + len(other)
        return Text(str.__add__(other, self))


def test_a_long_answer_is_joined_once(model):
    """One addition per token would copy 10^6 characters here."""
    body = ChatBody(messages=[{"role": "user", "content": "hello"}])
    request = Request(prompt=(BOS,), max_tokens=1000)
    plan = Plan(prompts=(EncodedPrompt(tokens=(BOS,)),), n=1, requests=(request,))
    answer = ChatFormat(body, plan, model).whole([[Event(text=Text("ab"))] * 1000])
    assert answer.choices[0].message.content == "ab" * 1000
    assert Text.copied <= 2000


def test_an_answer(client, server):
    answer = client.chat.completions.create(model="echo", messages=HELLO, seed=0)
    (choice,) = answer.choices
    assert answer.object == "chat.completion"
    assert (choice.message.role, choice.message.content) == ("assistant", TEXT)
    assert (choice.finish_reason, choice.logprobs) == ("stop", None)
    assert answer.usage.total_tokens == 2 * len(TEXT) + 1
    assert server.backend.seen[0].max_tokens == MAX_LENGTH - len(TEXT) - 1  # all that fits


def test_streaming(client):
    stream = client.chat.completions.create(
        model="echo",
        messages=HELLO,
        seed=0,
        n=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = list(stream)
    texts, roles = ["", ""], [[], []]
    for chunk in chunks:
        choice = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
        roles[choice.index].append(choice.delta.role)
    assert texts == [TEXT, TEXT[1:] + TEXT[0]]
    assert [own[0] for own in roles] == ["assistant", "assistant"]
    assert not any(role for own in roles for role in own[1:])
    assert last.choices == []
    assert last.usage.completion_tokens == 2 * len(TEXT)


def test_logprobs(client, server):
    answer = client.chat.completions.create(
        model="echo", messages=HELLO, seed=0, logprobs=True, top_logprobs=2, max_tokens=2
    )
    first, _ = answer.choices[0].logprobs.content
    assert (first.token, first.logprob, first.bytes) == ("U", -0.5, [ord("U")])
    assert [(t.token, t.logprob) for t in first.top_logprobs] == [("U", -0.5), ("y", -1.5)]
    assert server.backend.seen[0].logprobs == 2


def test_logprobs_are_streamed(client):
    stream = client.chat.completions.create(
        model="echo", messages=HELLO, seed=0, logprobs=True, max_tokens=2, stream=True
    )
    found = [chunk.choices[0].logprobs for chunk in stream]
    assert [[t.token for t in logprobs.content] for logprobs in found if logprobs] == [["U"], ["s"]]


def test_parts_of_text_are_joined(client):
    parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
    messages = [{"role": "user", "content": parts}]
    answer = client.chat.completions.create(model="echo", messages=messages, seed=0)
    assert answer.choices[0].message.content == TEXT


def test_an_answer_may_be_sent_back(client):
    first = client.chat.completions.create(model="echo", messages=HELLO, seed=0)
    said = first.choices[0].message.model_dump()
    assert set(said) > {"tool_calls", "refusal", "audio"}
    second = client.chat.completions.create(model="echo", messages=[*HELLO, said, *HELLO], seed=0)
    assert second.choices[0].message.content.startswith("User: hello\n\nAssistant: User: hello")


def test_either_name_of_the_length(client, server):
    for name in ("max_tokens", "max_completion_tokens"):
        client.chat.completions.create(model="echo", messages=HELLO, **{name: 3})
    assert [request.max_tokens for request in server.backend.seen] == [3, 3]


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids(client, server, stream):
    options = {"return_token_ids": True}
    answer = client.chat.completions.create(
        model="echo", messages=HELLO, seed=0, stream=stream, extra_body=options
    )
    chunks = [c.model_dump() for c in (answer if stream else [answer])]
    assert chunks[0]["prompt_token_ids"] == list(server.backend.seen[0].prompt)
    ids = [t for chunk in chunks for t in chunk["choices"][0].get("token_ids") or []]
    assert ids == server.service.model.tokenizer.encode(TEXT)


def test_prompt_logprobs(client, server):
    options = {"prompt_logprobs": 0}
    answer = client.chat.completions.create(model="echo", messages=HELLO, extra_body=options)
    first, *rest = answer.model_dump()["prompt_logprobs"]
    assert first is None
    assert [list(place) for place in rest] == [[str(t)] for t in server.backend.seen[0].prompt[1:]]
