"""The demo's pictures: real digits in their order, words that differ, samples that can be read."""

import json

import pytest
from PIL import Image

from demo import settings
from demo.pictures import DIGIT_QUESTION, DIGITS, WORDS, draw_words, make_pictures
from openv41.train.samples import read_samples


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("pictures") / "pictures"
    make_pictures(path)
    return path


def test_the_last_digits_are_held_out(folder):
    train = sorted(file.name for file in (folder / "train").glob("digit-*.png"))
    heldout = sorted(file.name for file in (folder / "heldout").glob("digit-*.png"))
    assert len(train) + len(heldout) == 1797
    assert len(heldout) == settings.HELDOUT_DIGITS
    assert train[-1] < heldout[0]


def test_no_word_picture_is_drawn_twice():
    seen = [(word, image.tobytes()) for image, word in draw_words(settings.WORD_PICTURES)]
    assert len(set(seen)) > 0.99 * len(seen)
    assert {word for word, _ in seen} == set(WORDS)


def test_samples_ask_and_answer(folder):
    samples = list(read_samples(folder / "heldout" / "samples.jsonl"))
    assert len(samples) == settings.HELDOUT_DIGITS + settings.HELDOUT_WORDS
    asked, answered = samples[0].conversation.messages
    image, question = asked.content
    assert image.source.data == (folder / "heldout" / "digit-1437.png").read_bytes()
    assert question == DIGIT_QUESTION
    assert answered.content in DIGITS
    line = (folder / "heldout" / "samples.jsonl").read_text().splitlines()[-1]
    assert json.loads(line)["messages"][1]["content"] in WORDS
    with Image.open(folder / "heldout" / "digit-1437.png") as opened:
        assert opened.size == (8, 8)
