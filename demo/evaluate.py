"""Bits per byte of a model over every byte of every document of a shard folder."""

import math
from collections.abc import Callable

from openv41.model.causal_encoder_decoder import CausalEncoderDecoder
from openv41.train.data import bits_per_byte, evaluation_windows
from openv41.train.evaluate import window_losses
from openv41.train.token_shards import TokenShards

FORWARD_TOKENS = 8192  # windows are packed up to this many tokens


def score_documents(
    model: CausalEncoderDecoder,
    shards: TokenShards,
    *,
    context: int,
    stride: int,
    progress: Callable[[int], None] = lambda _: None,
) -> dict[str, float]:
    """Measure bits per byte of each document; ``progress`` gets the tokens scored.

    After a document's first window, each scored token has ``context - stride`` before it at least.
    """
    nats: list[list[float]] = [[] for _ in shards.documents]
    windows = evaluation_windows(shards, sequence_length=context, stride=stride)
    for window, loss in window_losses(model, windows, forward_tokens=FORWARD_TOKENS):
        nats[window.document].append(loss)
        progress(len(window.ids) - window.first_scored)
    rows = zip(shards.documents, nats, strict=True)
    return {d.source: bits_per_byte(math.fsum(losses), d.bytes) for d, losses in rows}
