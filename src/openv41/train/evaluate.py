"""Losses of evaluation windows; held-out scores of text and of images while a model trains."""

import math
from collections.abc import Iterable, Iterator, Sequence

import torch

from openv41.errors import DataError
from openv41.io.tokenizer import TextTokenizer
from openv41.layers.batch import Batch
from openv41.model.causal_encoder_decoder import CausalEncoderDecoder
from openv41.train.data import EvaluationWindow, bits_per_byte, evaluation_windows
from openv41.train.packed_batch import PackedBatch
from openv41.train.processes import ALONE, Processes
from openv41.train.sample_batches import pack_samples
from openv41.train.sample_shards import SampleShards
from openv41.train.step import next_tokens
from openv41.train.token_shards import TokenShards


class HeldOut:
    """Windows spread evenly over a held-out text; about ``num_tokens`` of its tokens count.

    Each scored token has at least half a window before it, but for the start of a document.
    """

    def __init__(
        self,
        shards: TokenShards,
        tokenizer: TextTokenizer,
        *,
        sequence_length: int,
        num_tokens: int,
        forward_tokens: int,
    ) -> None:
        stride = max(1, sequence_length // 2)
        every = list(evaluation_windows(shards, sequence_length=sequence_length, stride=stride))
        total = sum(len(window.ids) - window.first_scored for window in every)
        wanted = max(1, min(len(every), len(every) * num_tokens // max(1, total)))
        self.windows = [every[index * len(every) // wanted] for index in range(wanted)]
        scored = [i for w in self.windows for i in w.ids[w.first_scored :].tolist()]
        self.num_bytes = sum(len(tokenizer.token_bytes(token_id)) for token_id in scored)
        self._forward_tokens = forward_tokens

    def score(self, model: CausalEncoderDecoder, processes: Processes = ALONE) -> float:
        """Bits per byte of the scored tokens; each process runs as many forwards as any other."""
        forwards = list(pack(self.windows, self._forward_tokens))
        total = torch.zeros((), dtype=torch.float64, device=processes.device)
        for place in _places(len(forwards), processes):
            losses = _forward(model, forwards[min(place, len(forwards) - 1)])
            total += math.fsum(losses) if place < len(forwards) else 0.0
        processes.sum_(total)
        return bits_per_byte(float(total), self.num_bytes)


class HeldOutImages:
    """Image-text samples spread evenly over held-out shards, of about ``num_tokens`` tokens."""

    def __init__(self, shards: SampleShards, *, num_tokens: int, forward_tokens: int) -> None:
        total = sum(shards.lengths)
        wanted = max(1, min(len(shards), len(shards) * num_tokens // total))
        learned = [n for n in range(len(shards)) if (shards.read(n).weights[1:] > 0).any()]
        if not learned:
            raise DataError(f"{shards.folder}: no held-out sample has a token to learn")
        wanted = min(wanted, len(learned))
        self.chosen = [learned[index * len(learned) // wanted] for index in range(wanted)]
        self._shards, self._forward_tokens = shards, forward_tokens

    @torch.no_grad()
    def score(self, model: CausalEncoderDecoder, processes: Processes = ALONE) -> float:
        """Nats per target: the tokens that training would learn, without those of images."""
        parts = self._parts()
        figures = torch.zeros(2, dtype=torch.float64, device=processes.device)
        for place in _places(len(parts), processes):
            part = parts[min(place, len(parts) - 1)]
            ids = part.ids.to(model.norm.weight.device)
            weights = part.target_weights(None)
            learned = None if weights is None else weights > 0
            rows, targets = next_tokens(ids, part.lengths, learned)
            losses = model.head.loss(model(part.for_model(model)).hidden[rows], targets).each
            if place < len(parts):
                figures += figures.new_tensor([float(losses.double().sum()), len(targets)])
        processes.sum_(figures)
        nats, count = figures.tolist()
        return float(nats / count)

    def _parts(self) -> list[PackedBatch]:
        """The samples in forwards of about ``forward_tokens``, or of one sample."""
        samples = [self._shards.read(number) for number in self.chosen]
        return list(pack_samples(samples).split(self._forward_tokens))


def window_losses(
    model: CausalEncoderDecoder, windows: Iterable[EvaluationWindow], *, forward_tokens: int
) -> Iterator[tuple[EvaluationWindow, float]]:
    """Each window with the summed loss in nats of its scored tokens."""
    for packed in pack(windows, forward_tokens):
        yield from zip(packed, _forward(model, packed), strict=True)


def pack(
    windows: Iterable[EvaluationWindow], forward_tokens: int
) -> Iterator[list[EvaluationWindow]]:
    """Group windows into forwards of at most ``forward_tokens``, or of one window."""
    packed: list[EvaluationWindow] = []
    size = 0
    for window in windows:
        if packed and size + len(window.ids) > forward_tokens:
            yield packed
            packed, size = [], 0
        packed.append(window)
        size += len(window.ids)
    if packed:
        yield packed


@torch.no_grad()
def _forward(model: CausalEncoderDecoder, packed: Sequence[EvaluationWindow]) -> list[float]:
    """Loss of each window, from one forward."""
    lengths = [len(window.ids) for window in packed]
    ids = torch.cat([window.ids for window in packed]).to(model.norm.weight.device)
    hidden = model(Batch.packed(ids, lengths)).hidden
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    rows = [
        torch.arange(start + window.first_scored - 1, start + length - 1)
        for window, start, length in zip(packed, starts, lengths, strict=False)
    ]
    scored = torch.cat(rows).to(ids.device)
    losses = model.head.loss(hidden[scored], ids[scored + 1]).each.double()  # one call for all
    return [float(part.sum()) for part in losses.split([len(of) for of in rows])]


def _places(count: int, processes: Processes) -> range:
    """Forwards of this process, as many as any other has; those from ``count`` on do not count."""
    return range(processes.rank, -(-count // processes.size) * processes.size, processes.size)
