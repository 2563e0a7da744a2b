"""Losses of evaluation windows; held-out bits per byte while a model trains."""

import math
from collections.abc import Iterable, Iterator, Sequence

import torch

from openv41.io.tokenizer import TextTokenizer
from openv41.layers.batch import Batch
from openv41.model.causal_encoder_decoder import CausalEncoderDecoder
from openv41.train.data import EvaluationWindow, bits_per_byte, evaluation_windows
from openv41.train.step import summed_loss
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

    def score(self, model: CausalEncoderDecoder) -> float:
        """Bits per byte of the scored tokens."""
        scored = window_losses(model, self.windows, forward_tokens=self._forward_tokens)
        return bits_per_byte(math.fsum(loss for _, loss in scored), self.num_bytes)


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
    losses = []
    for window, own, seen in zip(packed, ids.split(lengths), hidden.split(lengths), strict=True):
        rows = torch.arange(window.first_scored - 1, len(own) - 1, device=own.device)
        losses.append(summed_loss(model, seen, rows, own[rows + 1]))
    return losses
