"""From an image-text sample to token ids, targets and pixels. Report §2.1."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from openv41.config import VisionConfig
from openv41.errors import DataError, OpenV41Error
from openv41.image_grid import ImageGrid
from openv41.io.image_processor import ImageLimits, ProcessedImage, load_image, process_image
from openv41.io.prompt_ids import prompt_ids
from openv41.io.tokenizer import BOS_ID, EOS_ID, TextTokenizer
from openv41.prompt import Conversation, Image, Message, Prompt, encode
from openv41.prompt.tokens import IMAGE
from openv41.train.image_samples import ImagePart, Sample, TextPart, Turn
from openv41.train.mapped_arrays import Array


@dataclass(frozen=True)
class EncodedSample:
    """One sample: its ids with every image's span, which of them are learned, its images."""

    tokens: Array  # [T]
    targets: Array  # [T], true where the token is learned
    pixels: Array  # [P, 3, side, side], of all images
    grids: tuple[ImageGrid, ...]


class SampleEncoder:
    """Encodes samples for one tokenizer and one image processor."""

    def __init__(self, tokenizer: TextTokenizer, vision: VisionConfig) -> None:
        self.tokenizer, self.vision, self.limits = tokenizer, vision, ImageLimits()
        self.image_token_id = tokenizer.special_id(IMAGE)

    def encode(self, sample: Sample) -> EncodedSample:
        """Raises DataError, with the sample's place, for what cannot be encoded."""
        try:
            if sample.turns:
                return self._conversation(sample.turns)
            return self._document(sample)
        except OpenV41Error as error:
            raise DataError(f"{sample.where}: {error}") from None

    def _document(self, sample: Sample) -> EncodedSample:
        """BOS, the parts in their order, EOS."""
        ids, learned, images = [BOS_ID], [False], []
        for part in sample.parts:
            if isinstance(part, TextPart):
                new = self.tokenizer.encode(part.text)
                learned += [part.trains] * len(new)
            else:
                images.append(self._image(part))
                new = [self.image_token_id] * images[-1].grid.span_length
                learned += [False] * len(new)
            ids += new
        last = sample.parts[-1]
        ends = isinstance(last, TextPart) and last.trains
        return self._sample([*ids, EOS_ID], [*learned, ends], images)

    def _conversation(self, turns: Sequence[Turn]) -> EncodedSample:
        """The prompt format in chat mode; the last answer is learned."""
        messages = [Message(turn.role, tuple(_content(turn))) for turn in turns]
        if messages[-1].role != "assistant" or len(messages) < 2:
            raise DataError("a conversation must end with an answer of the assistant")
        whole, asked = (encode(Conversation(m, thinking=False)) for m in (messages, messages[:-1]))
        images = [self._image(image.source) for image in whole.images]
        ids = self._ids(whole, images)
        start = self._ids(asked, images[: len(asked.images)])
        assert ids[: len(start)] == start, "an answer changed what stands before it"
        learned = [i >= len(start) and t != self.image_token_id for i, t in enumerate(ids)]
        return self._sample(ids, learned, images)

    def _ids(self, prompt: Prompt, images: Sequence[ProcessedImage]) -> tuple[int, ...]:
        return prompt_ids(prompt, self.tokenizer, images, image_token_id=self.image_token_id)

    def _image(self, part: object) -> ProcessedImage:
        assert isinstance(part, ImagePart), f"{part!r} is no image"
        return process_image(load_image(part.data, self.limits, name=part.name), self.vision)

    def _sample(
        self, ids: Iterable[int], learned: Iterable[bool], images: Sequence[ProcessedImage]
    ) -> EncodedSample:
        side = self.vision.patch_size
        pixels = [np.empty((0, 3, side, side), np.uint8), *(i.pixels.numpy() for i in images)]
        return EncodedSample(
            np.fromiter(ids, np.int64),
            np.fromiter(learned, np.bool_),
            np.concatenate(pixels),
            tuple(image.grid for image in images),
        )


def _content(turn: Turn) -> Iterable[str | Image]:
    for part in turn.parts:
        yield part.text if isinstance(part, TextPart) else Image(part)
