"""A larger set of pictures: colour emoji with their English and Chinese names.

    apt-get install -y fonts-noto-color-emoji && pip install emoji==2.16.0
    python -m demo.emoji_set --out data/emoji

writes PNG files, and ``train.jsonl`` and ``heldout.jsonl`` for ``openv41 data images``.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from PIL import Image, ImageDraw, ImageFont

from openv41.errors import DataError
from openv41.io.atomic import write_atomic

FONT = Path("/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf")
FONT_SIZE = 109  # the font is bitmaps of this one size
SIZE = (136, 128)  # of each bitmap
WIDEST = 140  # a sequence that the font has no bitmap for is drawn as several, side by side
HELDOUT_EVERY = 20
QUESTIONS = {"en": "What is this?", "zh": "\u8fd9\u662f\u4ec0\u4e48\uff1f"}


def emoji_names() -> Iterator[tuple[str, dict[str, str]]]:
    """Fully qualified emoji with their names by language."""
    try:
        import emoji  # type: ignore[import-not-found]  # noqa: PLC0415 -- for this set alone
    except ImportError:
        raise DataError("the emoji's names are missing; pip install emoji==2.16.0") from None
    emoji.config.load_language(list(QUESTIONS))
    for character, about in emoji.EMOJI_DATA.items():
        if about["status"] == emoji.STATUS["fully_qualified"] and QUESTIONS.keys() <= about.keys():
            names = {language: about[language].strip(":") for language in QUESTIONS}
            yield character, {language: name.replace("_", " ") for language, name in names.items()}


def draw(character: str, font: ImageFont.FreeTypeFont) -> Image.Image | None:
    """An emoji on white; None where the font has no one glyph for it."""
    left, _, right, _ = font.getbbox(character)
    if right - left > WIDEST:
        return None
    image = Image.new("RGB", SIZE, "white")
    ImageDraw.Draw(image).text((0, 0), character, font=font, embedded_color=True)
    return image


def write_set(font_file: Path, out: Path) -> dict[str, int]:
    """Write pictures and samples; pictures that another emoji has already are left out."""
    try:
        font = ImageFont.truetype(str(font_file), FONT_SIZE)
    except OSError as error:
        raise DataError(
            f"{font_file}: cannot read the font: {error}; apt-get install fonts-noto-color-emoji, "
            "or name the font with --font"
        ) from None
    (out / "pictures").mkdir(parents=True, exist_ok=True)
    seen: set[bytes] = set()
    lines: dict[str, list[str]] = {"train": [], "heldout": []}
    for character, names in emoji_names():
        image = draw(character, font)
        if image is None or image.tobytes() in seen:
            continue
        file = f"pictures/{len(seen):04}.png"
        image.save(out / file)
        part = "heldout" if len(seen) % HELDOUT_EVERY == 0 else "train"
        seen.add(image.tobytes())
        lines[part] += [_record(file, QUESTIONS[language], names[language]) for language in names]
    for part, records in lines.items():
        write_atomic(out / f"{part}.jsonl", "".join(records).encode())
    return {part: len(records) for part, records in lines.items()}


def _record(file: str, question: str, name: str) -> str:
    user = {"role": "user", "content": [{"image": file}, {"text": question}]}
    turns = [user, {"role": "assistant", "content": name}]
    return json.dumps({"messages": turns}, ensure_ascii=False) + "\n"


def main(
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    font: Annotated[Path, typer.Option(help="The font's file.")] = FONT,
) -> None:
    """Draw the set."""
    for part, count in write_set(font, out).items():
        typer.echo(f"{out / part}.jsonl: {count} samples")


if __name__ == "__main__":
    typer.run(main)
