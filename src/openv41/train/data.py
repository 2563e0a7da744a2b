"""Batches for training and windows for evaluation, out of token shards."""

import bisect
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Int, UInt8
from torch import Tensor

from openv41.errors import InputError
from openv41.image_grid import ImageGrid
from openv41.train.token_shards import TokenIds, TokenShards

_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Documents, or pieces of them, one after the other; none sees another one.

    ``targets`` says which tokens are learned, None all of them. ``pixels`` holds the patches of
    all images, in the order of their spans.
    """

    ids: Int[Tensor, " T"]
    lengths: tuple[int, ...]
    targets: Bool[Tensor, " T"] | None = None
    pixels: UInt8[Tensor, "P 3 side side"] | None = None
    grids: tuple[ImageGrid, ...] = ()

    def documents(self) -> list[list[int]]:
        """Token ids per document."""
        return [piece.tolist() for piece in self.ids.split(list(self.lengths))]

    def learned(self, also: int | None) -> Bool[Tensor, " T"] | None:
        """Which tokens are learned, with those of the id ``also``; None for all."""
        if self.targets is None or also is None:
            return self.targets
        return self.targets | (self.ids == also)

    def beside(self, other: "PackedBatch") -> "PackedBatch":
        """Both batches as one."""
        targets = [
            torch.ones(len(b.ids), dtype=torch.bool) if b.targets is None else b.targets
            for b in (self, other)
        ]
        pixels = [b.pixels for b in (self, other) if b.pixels is not None]
        return PackedBatch(
            torch.cat([self.ids, other.ids]),
            self.lengths + other.lengths,
            torch.cat(targets),
            torch.cat(pixels) if pixels else None,
            self.grids + other.grids,
        )


class TrainingBatches:
    """Batches of equal token counts; batch ``step`` depends on the seed and ``step`` alone.

    Each epoch cuts the stream (seen as a ring) into rows of ``sequence_length`` tokens from another
    starting point, and takes the rows in another order. Neighbouring rows share one token, so that
    an epoch trains on every pair of neighbours in a document; a row ends documents where it ends.
    """

    def __init__(
        self, shards: TokenShards, *, sequence_length: int, batch_tokens: int, seed: int
    ) -> None:
        if sequence_length < 2:
            raise InputError(f"sequence_length is {sequence_length}, must be at least 2")
        if batch_tokens < 1 or batch_tokens % sequence_length:
            raise InputError(
                f"batch_tokens is {batch_tokens}, must be a multiple of sequence_length "
                f"({sequence_length})"
            )
        if shards.num_tokens < sequence_length:
            raise InputError(
                f"{shards.folder} holds {shards.num_tokens} tokens, fewer than one sequence of "
                f"{sequence_length}; give more text or set a smaller sequence_length"
            )
        self.shards = shards
        self.sequence_length = sequence_length
        self.rows_per_batch = batch_tokens // sequence_length
        self.rows_per_epoch = shards.num_tokens // (sequence_length - 1)
        self.seed = seed

    def batch(self, step: int) -> PackedBatch:
        """The batch of one step; any step costs the same, so training resumes anywhere."""
        if step < 0:
            raise InputError(f"step is {step}, must be at least 0")
        first = step * self.rows_per_batch
        ids: list[TokenIds] = []
        lengths: list[int] = []
        for number in range(first, first + self.rows_per_batch):
            for start, stop in self._pieces(number):
                ids.append(self.shards.read(start, stop))
                lengths.append(stop - start)
        return PackedBatch(torch.from_numpy(np.concatenate(ids)), tuple(lengths))

    def epoch(self, step: int) -> float:
        """Passes over the text before ``step``."""
        return step * self.rows_per_batch / self.rows_per_epoch

    def _pieces(self, number: int) -> Iterator[tuple[int, int]]:
        """Places in the stream of the pieces that fill row ``number`` of the whole run."""
        epoch, index = divmod(number, self.rows_per_epoch)
        key = mix(mix(self.seed) + epoch)
        row = shuffled(index, self.rows_per_epoch, key)
        total = self.shards.num_tokens
        start = (key + row * (self.sequence_length - 1)) % total
        left = self.sequence_length
        while left:
            document = bisect.bisect_right(self.shards.bounds, start) - 1
            stop = min(start + left, self.shards.bounds[document + 1])
            yield start, stop
            left -= stop - start
            start = stop % total


@dataclass(frozen=True, slots=True)
class EvaluationWindow:
    """Tokens of one document: ``ids[first_scored:]`` are scored, each given all before it."""

    document: int
    ids: Int[Tensor, " T"]
    first_scored: int


def evaluation_windows(
    shards: TokenShards, *, sequence_length: int, stride: int
) -> Iterator[EvaluationWindow]:
    """Windows that score every byte of every document exactly once.

    The first window of a document scores all it holds after BOS, later ones ``stride`` tokens with
    the text before them as context. EOS is not scored: it stands for no byte.
    """
    if not 1 <= stride < sequence_length:
        raise InputError(
            f"stride is {stride}, must be at least 1 and below sequence_length ({sequence_length})"
        )
    for document in range(len(shards.documents)):
        begin, end = shards.bounds[document], shards.bounds[document + 1] - 1  # without EOS
        scored = begin + 1
        stop = min(begin + sequence_length, end)
        while scored < end:
            start = max(begin, stop - sequence_length)
            ids = torch.from_numpy(shards.read(start, stop))
            yield EvaluationWindow(document, ids, scored - start)
            scored, stop = stop, min(stop + stride, end)


def bits_per_byte(nats: float, num_bytes: int) -> float:
    """Summed negative log-likelihood of a text as bits per byte of it."""
    return nats / math.log(2) / num_bytes


def mix(value: int) -> int:
    """Scramble 64 bits (the finaliser of splitmix64)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _MASK
    return value ^ value >> 31


def shuffled(index: int, size: int, key: int) -> int:
    """Image of ``index`` under a pseudo-random permutation of range(size), in constant memory.

    A Feistel network permutes the next power of four; values outside are sent through again.
    """
    half = max(1, (size.bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for turn in range(6):
            left, right = right, left ^ (mix(key ^ turn << 56 ^ right) & mask)
        index = left << half | right
        if index < size:
            return index
