"""From a sample to token ids, their weights in the loss, and pixels. Report §2.1."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from openv41.config import VisionConfig
from openv41.errors import DataError, OpenV41Error
from openv41.image_grid import ImageGrid
from openv41.io.image_processor import ImageLimits, ProcessedImage, load_image, process_image
from openv41.io.prompt_ids import prompt_ids
from openv41.io.tokenizer import BOS_ID, EOS_ID, TextTokenizer
from openv41.prompt import Conversation, Piece, Prompt, encode
from openv41.prompt.tokens import IMAGE
from openv41.train.mapped_arrays import Array
from openv41.train.samples import ImagePart, Sample, TextPart

IMAGE_PIECE = Piece(IMAGE, True)


@dataclass(frozen=True)
class EncodedSample:
    """One sample: its ids with every image's span, their weights in the loss, its images."""

    tokens: Array  # [T]
    weights: Array  # [T], 0 where a token is not learned
    pixels: Array  # [P, 3, side, side], of all images
    grids: tuple[ImageGrid, ...]


class SampleEncoder:
    """Encodes samples for one tokenizer, and one image processor unless ``vision`` is None."""

    def __init__(self, tokenizer: TextTokenizer, vision: VisionConfig | None) -> None:
        self.tokenizer, self.vision, self.limits = tokenizer, vision, ImageLimits()
        self.image_token_id = -1 if vision is None else tokenizer.special_id(IMAGE)

    def encode(self, sample: Sample) -> EncodedSample:
        """Raises DataError, with the sample's place, for what cannot be encoded."""
        try:
            if sample.conversation is not None:
                return self._conversation(sample.conversation, sample.weights)
            return self._document(sample)
        except OpenV41Error as error:
            raise DataError(f"{sample.where}: {error}") from None

    def _document(self, sample: Sample) -> EncodedSample:
        """BOS, the parts in their order, EOS with the weight of the last of them."""
        ids, weights, images = [BOS_ID], [0.0], []
        weight = 0.0
        for part in sample.parts:
            if isinstance(part, TextPart):
                new, weight = self._text(part, sample.tokenizer), part.weight
            else:
                images.append(self._image(part))
                new, weight = [self.image_token_id] * images[-1].grid.span_length, 0.0
            ids += new
            weights += [weight] * len(new)
        return self._sample([*ids, EOS_ID], [*weights, weight], images)

    def _text(self, part: TextPart, tokenizer: str | None) -> list[int]:
        """Its tokens: those that it came with, or of its text."""
        if part.ids is None:
            return self.tokenizer.encode(part.text)
        own = self.tokenizer
        if tokenizer != own.sha256:
            raise DataError(
                f"its 'ids' are of the tokenizer of sha256 {tokenizer}, {own.where} has "
                f"{own.sha256}; take the other --tokenizer, or leave out 'ids'"
            )
        if wrong := [token for token in part.ids if token >= own.vocab_size]:
            raise DataError(f"'ids' hold {wrong[0]}, the vocabulary ends at {own.vocab_size - 1}")
        if self.image_token_id in part.ids:
            raise DataError(f"'ids' hold {self.image_token_id}, which only an image stands for")
        return list(part.ids)

    def _conversation(
        self, conversation: Conversation, message_weights: Sequence[float]
    ) -> EncodedSample:
        """The prompt format; of each answer that has a weight all that the model writes."""
        if conversation.messages[-1].role != "assistant":
            raise DataError("a conversation must end with an answer of the assistant")
        whole = encode(conversation)
        images = [self._image(image.source) for image in whole.images]
        piece_weights = [0.0] * len(whole.pieces)
        for place, weight in enumerate(message_weights):
            if weight:
                first, stop = _answer_pieces(conversation, place, whole)
                piece_weights[first:stop] = [weight] * (stop - first)
        ids: list[int] = []
        weights: list[float] = []
        rest = iter(images)
        for piece, weight in zip(whole.pieces, piece_weights, strict=True):
            is_image = piece == IMAGE_PIECE
            shown = [next(rest)] if is_image else []
            new = prompt_ids(
                Prompt((piece,), whole.images[: len(shown)], None),
                self.tokenizer,
                shown,
                image_token_id=self.image_token_id,
            )
            ids += new
            weights += [0.0 if is_image else weight] * len(new)
        return self._sample(ids, weights, images)

    def _image(self, part: object) -> ProcessedImage:
        assert isinstance(part, ImagePart), f"{part!r} is no image"
        if self.vision is None:
            raise DataError(
                f"{part.name}: these samples are for a model without images; prepare them with "
                "'openv41 data images' and a --preset that sees"
            )
        return process_image(load_image(part.data, self.limits, name=part.name), self.vision)

    def _sample(
        self, ids: Iterable[int], weights: Iterable[float], images: Sequence[ProcessedImage]
    ) -> EncodedSample:
        side = 1 if self.vision is None else self.vision.patch_size
        pixels = [np.empty((0, 3, side, side), np.uint8), *(i.pixels.numpy() for i in images)]
        return EncodedSample(
            np.fromiter(ids, np.int64),
            np.fromiter(weights, np.float32),
            np.concatenate(pixels),
            tuple(image.grid for image in images),
        )


def _answer_pieces(conversation: Conversation, place: int, whole: Prompt) -> tuple[int, int]:
    """Pieces that the model writes as the message at a place, after the prompt that asks for it.

    Raises DataError where the conversation does not begin with that prompt and answer: reasoning
    before a later question is left out of it, for one.
    """
    if place == 0:
        raise DataError("messages[0] cannot be learned: nothing asks for it")
    until = [
        encode(replace(conversation, messages=conversation.messages[:stop])).pieces
        for stop in (place, place + 1)
    ]
    for pieces in until:
        if whole.pieces[: len(pieces)] != pieces:
            raise DataError(
                f"messages[{place}] cannot be learned within the whole conversation, which shows "
                "it or what stands before it in another way, as reasoning before a later question "
                "is left out; give the conversation up to this answer as a sample of its own, or "
                "set drop_thinking to false"
            )
    return len(until[0]), len(until[1])
