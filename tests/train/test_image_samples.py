"""Image-text samples: every form, from JSONL and parquet, and what is refused."""

import base64
import io
import json
import re

import pytest
from PIL import Image

from openv41.errors import DataError
from openv41.train.image_samples import ImagePart, Sample, TextPart, Turn, read_samples


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
    assert document.parts == (TextPart("A ", False), grey, TextPart(" b"))
    assert conversation.turns == (
        Turn("user", (black, TextPart("What?"))),
        Turn("assistant", (TextPart("Black."),)),
    )


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ([1], "a sample holds one of 'image'"),
        ({"text": "x"}, "found ['text']"),
        ({"image": "a.png", "parts": []}, "a sample holds one of"),
        ({"parts": []}, "at least one text or image"),
        ({"parts": [{"text": 3}]}, "found ['text']"),
        ({"parts": [{"text": "a", "loss": 1}]}, "'loss' is 1, must be true or false"),
        ({"parts": [{"text": "a", "weight": 1}]}, "a part has no field 'weight'"),
        ({"image": "none.png", "text": "x"}, "none.png: No such file"),
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
    with pytest.raises(DataError, match=r"samples.csv: image-text samples come as .jsonl or"):
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
