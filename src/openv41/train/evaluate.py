"""Held-out bits per byte while a model trains, on a fixed part of the held-out text."""

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
        self._per_forward = max(1, forward_tokens // sequence_length)

    def score(self, model: CausalEncoderDecoder) -> float:
        """Bits per byte of the scored tokens."""
        nats = 0.0
        for first in range(0, len(self.windows), self._per_forward):
            nats += _summed_loss(model, self.windows[first : first + self._per_forward])
        return bits_per_byte(nats, self.num_bytes)


@torch.no_grad()
def _summed_loss(model: CausalEncoderDecoder, windows: list[EvaluationWindow]) -> float:
    device = model.norm.weight.device
    ids = torch.cat([window.ids for window in windows])
    targets, start = [], 0
    for window in windows:
        targets.append(torch.arange(start + window.first_scored, start + len(window.ids)))
        start += len(window.ids)
    places = torch.cat(targets)
    batch = Batch.packed(ids.to(device), [len(window.ids) for window in windows])
    hidden = model(batch).hidden
    return summed_loss(model, hidden, (places - 1).to(device), ids[places].to(device))
