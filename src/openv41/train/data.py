"""Batches for training and windows for evaluation, out of token shards."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from openv41.errors import InputError
from openv41.train.packed_batch import PackedBatch
from openv41.train.packing import best_fit, mix, shuffled, split_document
from openv41.train.token_shards import TokenShards


@dataclass(frozen=True, slots=True)
class Epoch:
    """Bins of one pass over the text, and the pieces that its last bin left to the next pass."""

    number: int
    first_step: int
    bins: list[list[tuple[int, int]]]
    left: list[tuple[int, int]]

    @property
    def end(self) -> int:
        """Step that belongs to the next epoch."""
        return self.first_step + len(self.bins)


class TrainingBatches:
    """Best-fit batches of whole documents; batch ``step`` depends on the seed and ``step`` alone.

    A document of more than ``sequence_length`` tokens is cut into pieces, in each epoch elsewhere.
    Neighbouring pieces share one token, so that an epoch trains on every pair of neighbours. Pieces
    of a bin that is not full go into the next epoch.
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
        if shards.num_tokens < batch_tokens:
            raise InputError(
                f"{shards.folder} holds {shards.num_tokens} tokens, fewer than one batch of "
                f"{batch_tokens}; give more text or set a smaller batch_tokens"
            )
        self.shards = shards
        self.sequence_length = sequence_length
        self.batch_tokens = batch_tokens
        self.seed = seed
        self._epoch = self._pack(0, 0, [])

    def batch(self, step: int) -> PackedBatch:
        """The batch of one step."""
        if step < 0:
            raise InputError(f"step is {step}, must be at least 0")
        epoch = self._find(step)
        key = mix(mix(self.seed) ^ epoch.number)
        index = shuffled(step - epoch.first_step, len(epoch.bins), key)
        ids = [self.shards.read(start, stop) for start, stop in epoch.bins[index]]
        return PackedBatch(torch.from_numpy(np.concatenate(ids)), tuple(map(len, ids)))

    @property
    def padding(self) -> float:
        """Share of the batches of the epoch at hand that stays empty."""
        bins = self._epoch.bins
        used = sum(stop - start for pieces in bins for start, stop in pieces)
        return 1 - used / (len(bins) * self.batch_tokens)

    def _find(self, step: int) -> Epoch:
        epoch = self._epoch
        if step < epoch.first_step:
            epoch = self._pack(0, 0, [])
        while step >= epoch.end:
            epoch = self._pack(epoch.number + 1, epoch.end, epoch.left)
        self._epoch = epoch
        return epoch

    def _pack(self, number: int, first_step: int, left: list[tuple[int, int]]) -> Epoch:
        """Cut and pack the text for one epoch, with what the one before it left."""
        pieces = left + list(self._pieces(mix(mix(self.seed) + number)))
        order = [
            pieces[shuffled(i, len(pieces), mix(self.seed ^ number))] for i in range(len(pieces))
        ]
        lengths = [stop - start for start, stop in order]
        bins = best_fit(lengths, self.batch_tokens)
        emptiest = min(bins, key=lambda bin_: sum(lengths[n] for n in bin_))
        rest: list[int] = []
        if len(bins) > 1 and sum(lengths[n] for n in emptiest) < self.batch_tokens:
            bins.remove(emptiest)
            rest = emptiest
        packed = [[order[n] for n in bin_] for bin_ in bins]
        return Epoch(number, first_step, packed, [order[n] for n in rest])

    def _pieces(self, key: int) -> Iterator[tuple[int, int]]:
        for number, (start, stop) in enumerate(pairwise(self.shards.bounds)):
            yield from split_document(start, stop, self.sequence_length, mix(key + number))


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
