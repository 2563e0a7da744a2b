"""Losses of evaluation windows; held-out bits per byte while a model trains."""

import math
from collections.abc import Iterable, Iterator, Sequence

import torch

from openv41.io.tokenizer import TextTokenizer
from openv41.layers.batch import Batch
from openv41.model.causal_encoder_decoder import CausalEncoderDecoder
from openv41.train.data import EvaluationWindow, bits_per_byte, evaluation_windows
from openv41.train.processes import Processes
from openv41.train.token_shards import TokenShards

ALONE = Processes()


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
        for place in range(
            processes.rank, _rounded_up(len(forwards), processes.size), processes.size
        ):
            losses = _forward(model, forwards[min(place, len(forwards) - 1)])
            total += math.fsum(losses) if place < len(forwards) else 0.0
        processes.sum_(total)
        return bits_per_byte(float(total), self.num_bytes)


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


def _rounded_up(count: int, to: int) -> int:
    return -(-count // to) * to
