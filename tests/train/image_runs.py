"""Runs on images that take moments."""

import io
from dataclasses import replace

from PIL import Image

from openv41.config import VisionConfig
from openv41.io.tokenizer import load_tokenizer
from openv41.prompt import Conversation, Message
from openv41.prompt import Image as Shown
from openv41.prompt.tokens import IMAGE
from openv41.train.samples import ImagePart, Sample, TextPart
from tests.train.runs import changed, mini_run

VISION = VisionConfig(
    num_layers=1,
    hidden_size=8,
    num_heads=2,
    intermediate_size=8,
    patch_size=2,
    min_pixels=36,
    max_image_tokens=32,
)


def picture(shade, size=(6, 6)):
    data = io.BytesIO()
    Image.new("RGB", size, (shade, 255 - shade, 7)).save(data, "PNG")
    return ImagePart(data.getvalue(), f"picture {shade}")


def samples(count=12):
    """Pairs, documents with two images, conversations."""
    for i in range(count):
        if i % 3 == 0:
            yield Sample(f"{i}", parts=(picture(i), TextPart("thou art grey")))
        elif i % 3 == 1:
            between = TextPart(" and ", 0.0)
            parts = (TextPart("lo "), picture(i, (18, 6)), between, picture(i + 1), TextPart(" so"))
            yield Sample(f"{i}", parts=parts)
        else:
            yield talk(f"{i}", Message("user", (Shown(picture(i)), "What?")), answer("A sea"))


def answer(text="", **fields):
    return Message("assistant", text, **fields)


def talk(where, *messages, weights=None, **settings):
    """A conversation; unless told otherwise the last answer is learned."""
    settings = {"thinking": False} | settings
    weights = weights or (*[0.0] * (len(messages) - 1), 1.0)
    return Sample(where, conversation=Conversation(messages, **settings), weights=weights)


def seeing_run(text, images, out, **changes):
    """Six steps of a mini model on text and images."""
    base = mini_run(text, out, batch_tokens=96, sequence_length=16, image_share=0.67)
    token = load_tokenizer(text.folder).special_id(IMAGE)
    model = replace(base.model, vision=VISION, image_token_id=token)
    return changed(replace(base, model=model, images=images.folder), **{"tokens": 576, **changes})
