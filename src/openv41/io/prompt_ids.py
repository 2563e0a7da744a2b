"""From a prompt and its images to the tokens that a model reads. Report §2.1.1."""

from collections.abc import Sequence

from openv41.errors import InputError
from openv41.io.image_processor import ProcessedImage
from openv41.io.tokenizer import TextTokenizer
from openv41.prompt import Prompt
from openv41.prompt.tokens import IMAGE


def prompt_ids(
    prompt: Prompt,
    tokenizer: TextTokenizer,
    images: Sequence[ProcessedImage] = (),
    *,
    image_token_id: int,
) -> tuple[int, ...]:
    """Token ids of a prompt, each image's placeholder as often as its span is long."""
    assert len(images) == len(prompt.images), f"{len(images)} of {len(prompt.images)} images"
    ids = prompt.token_ids(tokenizer)
    if not images:
        return tuple(ids)
    placeholder, rest = tokenizer.special_id(IMAGE), iter(images)
    if placeholder != image_token_id:
        raise InputError(
            f"the tokenizer's image token is {placeholder}, the model's is {image_token_id}: "
            "the checkpoint's tokenizer.json and config.json do not belong together"
        )
    spans = (
        [token] * next(rest).grid.span_length if token == placeholder else [token] for token in ids
    )
    return tuple(token for span in spans for token in span)
