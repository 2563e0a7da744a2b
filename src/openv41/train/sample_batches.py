"""Which samples stand in each step.

Samples are packed whole: each is a document of its own, which sees no other.
"""

from collections.abc import Sequence

import numpy as np
import torch

from openv41.errors import InputError
from openv41.train.packed_batch import PackedBatch
from openv41.train.packing import best_fit, mix, shuffled
from openv41.train.sample_encoder import EncodedSample
from openv41.train.sample_shards import SampleShards


class SampleBatches:
    """Bins of samples of at most ``bin_tokens`` tokens; every epoch takes them in another order.

    The bins, and the bin of each step, depend on the seed and the step alone.
    """

    def __init__(self, shards: SampleShards, *, bin_tokens: int, seed: int) -> None:
        longest = max(shards.lengths)
        if longest > bin_tokens:
            raise InputError(
                f"{shards.folder} holds a sample of {longest} tokens, a step has room for "
                f"{bin_tokens}; raise batch_tokens (for --images, or image_share), or prepare the "
                "samples with a smaller --max-tokens"
            )
        self.shards, self.bin_tokens, self.seed = shards, bin_tokens, seed
        order = [shuffled(i, len(shards), mix(seed)) for i in range(len(shards))]
        bins = best_fit([shards.lengths[i] for i in order], bin_tokens)
        self.bins = [[order[place] for place in bin_] for bin_ in bins]

    def batch(self, step: int) -> PackedBatch:
        """The samples of one step."""
        epoch, index = divmod(step, len(self.bins))
        chosen = self.bins[shuffled(index, len(self.bins), mix(mix(self.seed) + epoch))]
        return pack_samples([self.shards.read(number) for number in chosen])

    @property
    def padding(self) -> float:
        """Share of the batches that stays empty."""
        return 1 - sum(self.shards.lengths) / (len(self.bins) * self.bin_tokens)


class PairBatches:
    """Pairs of an image and a text to compare, as many in every batch; each epoch mixes them anew.

    What does not fill a batch at the end of an epoch waits for the next. The batch of a step
    depends on the seed and the step alone.
    """

    def __init__(self, shards: SampleShards, *, batch_tokens: int, seed: int) -> None:
        self.shards, self.seed, self.pairs = shards, seed, shards.pairs()
        longest = max(shards.lengths[number] for number in self.pairs)
        if 2 * longest > batch_tokens:
            raise InputError(
                f"{shards.folder} holds a pair of {longest} tokens, a batch of {batch_tokens} must "
                "have room for two; raise batch_tokens, or prepare the images with a smaller "
                "--max-tokens"
            )
        self.size = min(batch_tokens // longest, len(self.pairs))

    def batch(self, step: int) -> PackedBatch:
        """The pairs of one step."""
        count = len(self.pairs)
        epoch, index = divmod(step, count // self.size)
        key = mix(mix(self.seed) + epoch)
        places = range(index * self.size, (index + 1) * self.size)
        chosen = [self.pairs[shuffled(place, count, key)] for place in places]
        return pack_samples([self.shards.read(number) for number in chosen])


def pack_samples(samples: Sequence[EncodedSample]) -> PackedBatch:
    """Samples one after the other."""
    pixels = np.concatenate([s.pixels for s in samples])
    return PackedBatch(
        ids=torch.from_numpy(np.concatenate([s.tokens for s in samples])),
        lengths=tuple(len(s.tokens) for s in samples),
        weights=torch.from_numpy(np.concatenate([s.weights for s in samples])),
        pixels=torch.from_numpy(pixels) if len(pixels) else None,
        grids=tuple(sample.grids for sample in samples),
    )
