"""Samples: every form, from JSONL and parquet, and what is refused."""

import base64
import io
import json
import re

import pytest
from PIL import Image

from openv41.errors import DataError
from openv41.prompt import Conversation, Message, ToolCall
from openv41.prompt import Image as Shown
from openv41.train.samples import ImagePart, Sample, TextPart, read_samples


def png(shade=0, size=(5, 4)):
    data = io.BytesIO()
    Image.new("L", size, shade).save(data, "PNG")
    return data.getvalue()


def write(folder, *records):
    file = folder / "samples.jsonl"
    file.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return file


def test_every_form(tmp_path):
    (tmp_path / "a.png").write_bytes(png())
    inside = {"bytes": base64.b64encode(png(9)).decode()}
    talk = [
        {"role": "user", "content": [{"image": "a.png"}, {"text": "What?"}]},
        {"role": "assistant", "content": "Black."},
    ]
    file = write(
        tmp_path,
        {"image": "a.png", "text": "black"},
        {"parts": [{"text": "A ", "loss": False}, {"image": inside}, {"text": " b"}]},
        {"messages": talk},
    )
    pair, document, conversation = read_samples(file)
    black = ImagePart(png(), str(tmp_path / "a.png"))
    assert pair == Sample(f"{file}:1", parts=(black, TextPart("black")))
    grey = ImagePart(png(9), f"the image of {file}:2")
    assert document.parts == (TextPart("A ", 0.0), grey, TextPart(" b"))
    messages = (Message("user", (Shown(black), "What?")), Message("assistant", "Black."))
    assert conversation.conversation == Conversation(messages, thinking=False)
    assert conversation.weights == (0.0, 1.0)


def test_answers_and_their_weights(tmp_path):
    call = {"id": "1", "function": {"name": "add", "arguments": '{"a": 1}'}}
    talk = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "reasoning_content": "Sum.", "tool_calls": [call], "loss": True},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
        {"role": "assistant", "content": "2", "weight": 0.5},
    ]
    tools = [{"type": "function", "function": {"name": "add"}}]
    file = write(
        tmp_path,
        {"messages": talk, "tools": tools, "weight": 2, "id": "a"},
        {"messages": [*talk[:2], {"role": "assistant", "content": "2", "loss": False}]},
        {"messages": [*talk[:2], talk[4], *talk[1:2], {"role": "assistant", "content": "x"}]},
        {"messages": talk[:2], "reasoning_effort": "low"},
        {"parts": [{"text": "a", "weight": 3}, {"text": "b"}], "weight": 0.5},
    )
    first, silent, both, effort, document = read_samples(file)
    assert first.weights == (0.0, 0.0, 2.0, 0.0, 1.0)
    assert first.conversation.thinking, "there is reasoning to learn"
    assert first.conversation.tools == tuple(tools)
    messages = first.conversation.messages
    assert messages[2] == Message(
        "assistant", reasoning="Sum.", tool_calls=(ToolCall("add", '{"a": 1}', id="1"),)
    )
    assert messages[3] == Message("tool", "2", tool_call_id="1")
    assert silent.weights == (0.0, 0.0, 0.0)
    assert not silent.conversation.thinking
    assert both.weights == (0.0, 0.0, 0.5, 0.0, 1.0)
    assert (effort.conversation.thinking, effort.conversation.effort) == (True, 50)
    assert document.parts == (TextPart("a", 1.5), TextPart("b", 0.5))


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ([1], "a sample holds one of 'image'"),
        ({"text": "x"}, "found ['text']"),
        ({"image": "a.png", "parts": []}, "a sample holds one of"),
        ({"parts": []}, "at least one text or image"),
        ({"parts": [{"text": 3}]}, "found ['text']"),
        ({"parts": [{"text": "a", "loss": 1}]}, "'loss' is 1, must be true or false"),
        ({"parts": [{"text": "a", "los": 1}]}, "a part has no field 'los'"),
        ({"parts": [{"text": "a", "weight": -1}]}, "'weight' is -1, must be a number from 0"),
        ({"parts": [{"text": "a"}], "weight": True}, "'weight' is True, must be a number"),
        ({"parts": [{"text": "a", "ids": [1, "2"]}], "tokenizer": "x"}, "'ids' must be a list of"),
        ({"parts": [{"text": "a", "ids": [True]}], "tokenizer": "x"}, "'ids' must be a list of"),
        ({"parts": [{"text": "a", "ids": [1]}]}, "'ids' need their 'tokenizer' in the record"),
        ({"parts": [{"ids": [1]}]}, "found ['ids']"),
        (
            {"messages": [{"role": "user", "content": [{"text": "x", "ids": [1]}]}]},
            "'ids' stand in documents, not in messages",
        ),
        ({"messages": [{"role": "user", "los": 1}]}, "a message has no field 'los'"),
        ({"messages": [{"role": "user", "loss": True}]}, "only messages of the assistant"),
        ({"messages": [{"role": "king", "content": "x"}]}, "role is 'king', must be"),
        ({"messages": ["x"]}, "a message is an object, found str"),
        (
            {"messages": [{"role": "user", "content": [{"text": "x", "loss": False}]}]},
            "'loss' and 'weight' belong to the message",
        ),
        ({"image": "none.png", "text": "x"}, "'none.png': [Errno 2] No such file"),
        ({"image": {"bytes": "%"}, "text": "x"}, "the image is no base64"),
        ({"image": 3, "text": "x"}, "an image is a path or {'bytes': ...}, found 3"),
        ({"messages": [{"content": "x"}]}, "a message needs a 'role'"),
    ],
)
def test_refusals_name_the_record(tmp_path, record, message):
    file = write(tmp_path, record)
    with pytest.raises(DataError, match=f"{re.escape(str(file))}:1: .*{re.escape(message)}"):
        list(read_samples(file))


def test_a_broken_line_and_an_unknown_kind_of_file(tmp_path):
    file = tmp_path / "samples.jsonl"
    file.write_text('{"image": \n')
    with pytest.raises(DataError, match=r"samples\.jsonl:1: no valid JSON"):
        list(read_samples(file))
    with pytest.raises(DataError, match=r"samples.csv: samples come as .jsonl or"):
        list(read_samples(tmp_path / "samples.csv"))


@pytest.mark.slow
def test_parquet(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = {
        "image": [{"bytes": png(7), "path": None}, {"bytes": png(8), "path": None}],
        "text": ["seven", "eight"],
    }
    datasets.Dataset.from_dict(rows).to_parquet(str(tmp_path / "samples.parquet"))
    found = list(read_samples(tmp_path / "samples.parquet"))
    assert [s.parts[0].data for s in found] == [png(7), png(8)]
    assert [s.parts[1].text for s in found] == ["seven", "eight"]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"weight": 1e39}, "'weight' is 1e+39, must be a number"),
        ({"weight": 10**400}, "must be a number"),
        ({"weight": 1e20, "messages": [{"role": "user", "content": "a"},
          {"role": "assistant", "content": "b", "weight": 1e30}]}, "weight of 1e+50"),
        ({"weights": 3}, "a sample has no field 'weights'"),
        ({"loss": False}, "a sample has no field 'loss'"),
    ],
)  # fmt: skip
def test_weights_that_no_float_holds_and_misspelt_fields(tmp_path, record, message):
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    file = write(tmp_path, {"messages": talk} | record)
    with pytest.raises(DataError, match=re.escape(message)):
        list(read_samples(file))


@pytest.mark.parametrize("image", ["a\0b", {"path": "a\0b"}, {"bytes": "\u00e9"}])
def test_images_that_cannot_be_named_or_decoded(tmp_path, image):
    file = write(tmp_path, {"image": image, "text": "a"})
    with pytest.raises(DataError, match=r"samples\.jsonl:1: "):
        list(read_samples(file))


def test_nested_lines_and_a_byte_order_mark(tmp_path):
    file = tmp_path / "samples.jsonl"
    file.write_text("[" * 200_000)
    with pytest.raises(DataError, match=r"samples\.jsonl:1: no valid JSON"):
        list(read_samples(file))
    record = {"parts": [{"text": "a"}]}
    file.write_bytes(b"\xef\xbb\xbf" + json.dumps(record).encode())
    assert [sample.parts for sample in read_samples(file)] == [(TextPart("a"),)]
