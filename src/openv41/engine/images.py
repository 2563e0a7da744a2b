"""Images of requests: where they stand in a prompt, and what they are to the model. Report §2.1.1.

All span positions hold one token id, so that ids do not tell images apart: the prefix cache's keys
of span positions are made of the image's content.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from openv41.config import ModelConfig
from openv41.errors import ConfigError
from openv41.io.image_processor import ProcessedImage
from openv41.model.image_tower import ImageTower

_OFFSET_BYTES = 4


@dataclass(frozen=True, eq=False)
class ImageSpan:
    """An image and the prompt positions that it fills, delimiters included."""

    image: ProcessedImage
    start: int
    stop: int

    @cached_property
    def keys(self) -> list[bytes]:
        """Name each position by the image's content and the offset in it."""
        content = self.image.content_hash
        return [content + i.to_bytes(_OFFSET_BYTES, "big") for i in range(self.stop - self.start)]


def find_spans(
    prompt: Sequence[int], images: Sequence[ProcessedImage], config: ModelConfig
) -> tuple[ImageSpan, ...]:
    """Find the span of each image, in the order of the prompt.

    Raises ConfigError where image tokens and images do not belong together.
    """
    if config.vision is None:
        if images:
            raise ConfigError("request", [f"{len(images)} images, but the model sees none"])
        return ()
    places = [i for i, token in enumerate(prompt) if token == config.image_token_id]
    sizes = [image.grid.span_length for image in images]
    if len(places) != sum(sizes):
        counts = " + ".join(map(str, sizes)) or "0"
        raise ConfigError(
            "request",
            [
                f"the prompt holds {len(places)} image tokens ({config.image_token_id}), its "
                f"{len(images)} images fill {counts}: write each image's token as often as its "
                "span is long"
            ],
        )
    spans, first = [], 0
    for number, (image, size) in enumerate(zip(images, sizes, strict=True)):
        start, stop = places[first], places[first] + size
        if places[first + size - 1] != stop - 1:
            raise ConfigError(
                "request", [f"the {size} tokens of image {number} do not stand side by side"]
            )
        spans.append(ImageSpan(image, start, stop))
        first += size
    return tuple(spans)


class ImageCache:
    """Span embeddings by content, least recently used first out.

    Images are encoded one at a time, so that what one becomes depends on no neighbour.
    """

    def __init__(self, tower: ImageTower | None, max_bytes: int) -> None:
        self._tower, self._max_bytes = tower, max_bytes
        self._held: OrderedDict[bytes, Float[Tensor, "span D"]] = OrderedDict()
        self.num_bytes = self.encoded = self.hits = 0

    def embeds(self, image: ProcessedImage) -> Float[Tensor, "span D"]:
        """Look a span's embeddings up, or compute and remember them."""
        key = image.content_hash
        if (found := self._held.get(key)) is not None:
            self._held.move_to_end(key)
            self.hits += 1
            return found
        assert self._tower is not None, "an image reached a model without a vision encoder"
        made: Float[Tensor, "span D"] = self._tower(
            image.patches().to(self._tower.start.device), [image.grid]
        )
        self.encoded += 1
        if _size(made) <= self._max_bytes:
            self._held[key] = made
            self.num_bytes += _size(made)
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= _size(self._held.popitem(last=False)[1])
        return made


def _size(rows: Tensor) -> int:
    return rows.numel() * rows.element_size()


class JobImages:
    """The images of one request.

    What a span became is held while its prompt is computed, so that chunks of one span and a
    crowded cache never compute it twice.
    """

    def __init__(self, spans: tuple[ImageSpan, ...]) -> None:
        self.spans = spans
        self._held: dict[int, Float[Tensor, "span D"]] = {}

    def embeds(self, start: int, stop: int, cache: ImageCache) -> list[Float[Tensor, "_ D"]]:
        """Embeddings of the span positions in a range."""
        parts = []
        for number, span in enumerate(self.spans):
            first, last = max(start, span.start), min(stop, span.stop)
            if first >= last:
                continue
            if number not in self._held:
                self._held[number] = cache.embeds(span.image)
            parts.append(self._held[number][first - span.start : last - span.start])
            if last == span.stop:
                del self._held[number]
        return parts

    def masked(self, tokens: Sequence[int], mark: int) -> list[int]:
        """Put ``mark`` at the span positions."""
        masked = list(tokens)
        for span in self.spans:
            count = len(masked[span.start : span.stop])
            masked[span.start : span.start + count] = [mark] * count
        return masked

    def keys(self, tokens: Sequence[int], start: int) -> list[int | bytes]:
        """What the prefix cache knows the positions of ``tokens``, from ``start`` on, by."""
        keys: list[int | bytes] = list(tokens)
        for span in self.spans:
            first, last = max(start, span.start), min(start + len(tokens), span.stop)
            if first < last:
                own = span.keys[first - span.start : last - span.start]
                keys[first - start : last - start] = own
        return keys

    def covers(self, position: int) -> bool:
        """Whether a position belongs to an image."""
        return any(span.start <= position < span.stop for span in self.spans)


def join(parts: list[Float[Tensor, "_ D"]]) -> Float[Tensor, "image_tokens D"] | None:
    """All image rows of a batch, or None where it has none."""
    return torch.cat(parts) if parts else None
