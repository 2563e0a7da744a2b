"""Documents packed into one batch, and its parts. Report §2.5."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from openv41.image_grid import ImageGrid
from openv41.io.image_processor import scale_pixels
from openv41.layers.batch import Batch
from openv41.layers.geometry import ReplayBounds
from openv41.model.causal_encoder_decoder import CausalEncoderDecoder


@dataclass(frozen=True, slots=True, eq=False)
class PackedBatch:
    """Documents, or pieces of them, one after the other; none sees another one.

    ``weights`` says how much each token counts as a target, 0 for one that is not learned; None is
    1 for all. ``grids`` holds the images of each document, and is empty where none has any;
    ``pixels`` holds the patches of all images. ``replay`` is the prefill that the documents stand
    behind, None where there is none. ``anchors`` marks the tokens that the drafter learns behind.
    """

    ids: Int[Tensor, " T"]
    lengths: tuple[int, ...]
    weights: Float[Tensor, " T"] | None = None
    pixels: UInt8[Tensor, "patches 3 side side"] | None = None
    grids: tuple[tuple[ImageGrid, ...], ...] = ()
    replay: ReplayBounds | None = None
    anchors: Bool[Tensor, " T"] | None = None

    @property
    def images(self) -> tuple[ImageGrid, ...]:
        """Grids of all images, in the order of their spans."""
        return tuple(grid for document in self.grids for grid in document)

    def documents(self) -> list[list[int]]:
        """Token ids per document."""
        return [piece.tolist() for piece in self.ids.split(list(self.lengths))]

    def for_model(self, model: CausalEncoderDecoder) -> Batch:
        """What a model runs on, with its own embeddings of the images."""
        device, embeds = model.norm.weight.device, None
        if self.pixels is not None:
            assert model.vision is not None, "images for a model without a vision encoder"
            embeds = model.vision(scale_pixels(self.pixels.to(device)), self.images)
        return Batch.packed(self.ids.to(device), self.lengths, embeds)

    def target_weights(self, also: int | None) -> Float[Tensor, " T"] | None:
        """Weight of each token as a target, 1 for those of the id ``also``; None: 1 for all.

        0 where a row predicts it that the simulated prefill does not compute.
        """
        weights = self.weights
        if weights is not None and also is not None:
            weights = weights.masked_fill(self.ids == also, 1.0)
        if self.replay is None:
            return weights
        given = torch.ones(len(self.ids)) if weights is None else weights
        return given.masked_fill(self._before(self.replay.floors), 0.0)

    def has_images(self) -> Bool[Tensor, " T"]:
        """Whether the document of each token holds an image."""
        found = torch.tensor([bool(images) for images in self._grids()], dtype=torch.bool)
        return found.repeat_interleave(torch.tensor(self.lengths))

    def beside(self, other: "PackedBatch") -> "PackedBatch":
        """Both batches as one; both stand behind a prefill, or none does."""
        assert (self.replay is None) == (other.replay is None), "one of two stands behind a prefill"
        replay = None
        if self.replay is not None and other.replay is not None:
            replay = self.replay.beside(other.replay)
        weights = [
            torch.ones(len(b.ids)) if b.weights is None else b.weights for b in (self, other)
        ]
        pixels = [b.pixels for b in (self, other) if b.pixels is not None]
        return PackedBatch(
            torch.cat([self.ids, other.ids]),
            self.lengths + other.lengths,
            torch.cat(weights),
            torch.cat(pixels) if pixels else None,
            self._grids() + other._grids(),
            replay,
            None
            if self.anchors is None or other.anchors is None
            else torch.cat([self.anchors, other.anchors]),
        )

    def split(self, most: int) -> Iterator["PackedBatch"]:
        """Consecutive documents in parts of at most ``most`` tokens, or of one document."""
        return (self._part(first, last) for first, last in part_bounds(self.lengths, most))

    def dealt(self, count: int) -> list[list[int]]:
        """Numbers of the documents in ``count`` shares of about as many tokens.

        The longest are dealt first. A share without a document is left out.
        """
        load = [0] * count
        shares: list[list[int]] = [[] for _ in range(count)]
        for number in sorted(range(len(self.lengths)), key=lambda n: (-self.lengths[n], n)):
            share = load.index(min(load))
            load[share] += self.lengths[number]
            shares[share].append(number)
        return [sorted(share) for share in shares if share]

    def only(self, numbers: Sequence[int]) -> "PackedBatch":
        """Some of the documents, in this order."""
        if len(numbers) == len(self.lengths):
            return self
        first, *others = (self._part(number, number + 1) for number in numbers)
        for other in others:
            first = first.beside(other)
        return first

    def _before(self, floors: tuple[int, ...]) -> Bool[Tensor, " T"]:
        """Whether a row before the floor of its document predicts a token."""
        pairs = zip(self.lengths, floors, strict=True)
        return torch.cat([torch.arange(n) <= floor for n, floor in pairs]).to(self.ids.device)

    def _grids(self) -> tuple[tuple[ImageGrid, ...], ...]:
        return self.grids or ((),) * len(self.lengths)

    def _part(self, first: int, last: int) -> "PackedBatch":
        grids = self._grids()
        tokens = slice(sum(self.lengths[:first]), sum(self.lengths[:last]))
        patches = slice(_patches(grids[:first]), _patches(grids[:last]))
        has_pixels = self.pixels is not None and patches.start < patches.stop
        return PackedBatch(
            self.ids[tokens],
            self.lengths[first:last],
            None if self.weights is None else self.weights[tokens],
            self.pixels[patches] if self.pixels is not None and has_pixels else None,
            grids[first:last],
            None if self.replay is None else self.replay.part(first, last),
            None if self.anchors is None else self.anchors[tokens],
        )


def part_bounds(lengths: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """First and last + 1 of consecutive documents of at most ``most`` tokens, or of one."""
    first = 0
    while first < len(lengths):
        last = first + 1
        while last < len(lengths) and sum(lengths[first : last + 1]) <= most:
            last += 1
        yield first, last
        first = last


def _patches(documents: tuple[tuple[ImageGrid, ...], ...]) -> int:
    return sum(grid.num_patches for document in documents for grid in document)
