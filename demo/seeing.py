"""What the exported model answers about images that it was not trained on."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from demo import settings
from demo.pictures import DIGIT_QUESTION, DIGITS, WORDS, Picture
from openv41.engine.engine import Engine, EngineConfig
from openv41.engine.paged_store import CacheConfig
from openv41.engine.request import Request
from openv41.engine.sampler import SamplingConfig
from openv41.io.image_processor import load_image, process_image
from openv41.io.prompt_ids import prompt_ids
from openv41.prompt import Conversation, Image, Message, encode

SHOWN = 3
ANSWER_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Seen:
    """Shares of right answers, and the first held-out images with what the model said."""

    digits_right: float
    words_right: float
    digits_chance: float
    words_chance: float
    shown: list[tuple[Path, str, str]]  # file, answer, the model's answer


def measure_seeing(export: Path, pictures: Sequence[Picture]) -> Seen:
    """Ask about every picture, greedily, through the engine."""
    cache = CacheConfig(num_pages=256, max_requests=64)
    config = EngineConfig(cache=cache)
    engine = Engine.load(export, config=config, numerics=settings.EVALUATION_NUMERICS)
    requests = [_request(engine, picture) for picture in pictures]
    answers = [answer.text.strip() for answer in engine.generate(requests)]
    engine.close()
    right: dict[bool, list[bool]] = {True: [], False: []}
    for picture, answer in zip(pictures, answers, strict=True):
        right[picture.question == DIGIT_QUESTION].append(answer == picture.answer)
    shown = [
        (picture.file, picture.answer, answer)
        for picture, answer in zip(pictures[:SHOWN], answers, strict=False)
    ]
    return Seen(
        digits_right=_share(right[True]),
        words_right=_share(right[False]),
        digits_chance=1 / len(DIGITS),
        words_chance=1 / len(WORDS),
        shown=shown,
    )


def _request(engine: Engine, picture: Picture) -> Request:
    config = engine.model.config
    assert config.vision is not None, "the exported model sees no images"
    image = process_image(load_image(picture.file), config.vision)
    question = Message("user", (Image(picture.file), picture.question))
    prompt = encode(Conversation([question], thinking=False))
    return Request(
        prompt=prompt_ids(prompt, engine.tokenizer, [image], image_token_id=config.image_token_id),
        images=(image,),
        max_tokens=ANSWER_TOKENS,
        sampling=SamplingConfig(temperature=0.0),
    )


def _share(right: Sequence[bool]) -> float:
    return sum(right) / len(right)
