"""Bits per byte of a model over every byte of every document of a shard folder."""

import math
from collections.abc import Callable, Iterator, Sequence

import torch

from openv41.layers.batch import Batch
from openv41.model.causal_encoder_decoder import CausalEncoderDecoder
from openv41.train.data import EvaluationWindow, bits_per_byte, evaluation_windows
from openv41.train.token_shards import TokenShards

FORWARD_TOKENS = 8192  # windows are packed up to this many tokens


@torch.inference_mode()
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
    for packed in pack(windows):
        for window, loss in zip(packed, score_windows(model, packed), strict=True):
            nats[window.document].append(loss)
            progress(len(window.ids) - window.first_scored)
    rows = zip(shards.documents, nats, strict=True)
    return {d.source: bits_per_byte(math.fsum(losses), d.bytes) for d, losses in rows}


def pack(windows: Iterator[EvaluationWindow]) -> Iterator[list[EvaluationWindow]]:
    """Group windows into forwards."""
    packed: list[EvaluationWindow] = []
    size = 0
    for window in windows:
        if packed and size + len(window.ids) > FORWARD_TOKENS:
            yield packed
            packed, size = [], 0
        packed.append(window)
        size += len(window.ids)
    if packed:
        yield packed


def score_windows(model: CausalEncoderDecoder, packed: Sequence[EvaluationWindow]) -> list[float]:
    """Run one forward; return the summed loss in nats of each window's scored tokens."""
    lengths = [len(window.ids) for window in packed]
    ids = torch.cat([window.ids for window in packed]).to(model.norm.weight.device)
    logits = model.logits(model(Batch.packed(ids, lengths)).hidden)  # [T, V]
    losses = []
    for window, own in zip(packed, logits.split(lengths), strict=True):
        first = window.first_scored
        target = window.ids[first:].to(own.device)
        loss = torch.nn.functional.cross_entropy(own[first - 1 : -1], target, reduction="none")
        losses.append(float(loss.double().sum()))
    return losses
