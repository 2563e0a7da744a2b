"""Real images that install with pip: handwritten digits, and words in Pillow's own font."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont
from sklearn.datasets import load_digits

from demo import settings
from openv41.io.atomic import write_atomic

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
WORDS = ("king", "queen", "sword", "crown", "love", "night", "blood", "heaven", "fool", "ghost")
DIGIT_QUESTION, WORD_QUESTION = "What digit is this?", "What word is this?"
GREY_STEP = 255 / 16  # the set's greys are 0 to 16
WORD_SIZE, FONT_SIZE = (84, 42), 20


@dataclass(frozen=True, slots=True)
class Picture:
    """An image, the question about it and its answer."""

    file: Path
    question: str
    answer: str

    def record(self) -> str:
        """One line of a JSONL file of samples; the image's path is relative to it."""
        content = [{"image": self.file.name}, {"text": self.question}]
        turns = [
            {"role": "user", "content": content},
            {"role": "assistant", "content": self.answer},
        ]
        return json.dumps({"messages": turns})


def make_pictures(folder: Path) -> dict[str, list[Picture]]:
    """Write both kinds as PNG files with a JSONL file per part: "train" and "heldout".

    The data set of digits keeps its order: its last images, which other people wrote, are held out.
    """
    parts: dict[str, list[Picture]] = {"train": [], "heldout": []}
    for part in parts:
        (folder / part).mkdir(parents=True)
    digits = load_digits()
    last = len(digits.images) - settings.HELDOUT_DIGITS
    for number, (pixels, digit) in enumerate(zip(digits.images, digits.target, strict=True)):
        part = "train" if number < last else "heldout"
        file = folder / part / f"digit-{number:04}.png"
        Image.fromarray((pixels * GREY_STEP).astype("uint8")).save(file)
        parts[part].append(Picture(file, DIGIT_QUESTION, DIGITS[digit]))
    for number, (image, word) in enumerate(draw_words(settings.WORD_PICTURES)):
        part = "train" if number < settings.WORD_PICTURES - settings.HELDOUT_WORDS else "heldout"
        file = folder / part / f"word-{number:04}.png"
        image.save(file)
        parts[part].append(Picture(file, WORD_QUESTION, word))
    for part, pictures in parts.items():
        lines = "".join(f"{picture.record()}\n" for picture in pictures)
        write_atomic(folder / part / "samples.jsonl", lines.encode())
    return parts


def draw_words(count: int) -> Iterator[tuple[Image.Image, str]]:
    """Words at slightly changing places, in changing greys."""
    maker, font = random.Random(settings.SEED), ImageFont.load_default(FONT_SIZE)
    for number in range(count):
        word = WORDS[number % len(WORDS)]
        image = Image.new("L", WORD_SIZE, maker.randint(0, 40))
        place = maker.randint(3, 5), maker.randint(9, 11)
        ImageDraw.Draw(image).text(place, word, fill=maker.randint(200, 255), font=font)
        yield image, word
