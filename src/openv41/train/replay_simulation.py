"""Post-training sees what serving sees after Decoder SWA Bounded Replay. Report §2.2, §3.2.2.

A bounded prefill of P tokens computes, from the last kv source on, the last W of them, rows P - W
to P - 1, and in the layers above it they see no window KV from before; the last of them predicts
the first token of the answer. Here every document has such a cut: P is the first token that is
learned, or drawn where all are. The rows before P - W carry no loss.
"""

import logging
from collections.abc import Iterator
from dataclasses import replace

from jaxtyping import Float
from torch import Tensor

from openv41.config import ModelConfig
from openv41.model.prefill import ReplayVariant, find_cut, replay_bounds
from openv41.train.config import TrainConfig
from openv41.train.packed_batch import PackedBatch
from openv41.train.packing import mix

logger = logging.getLogger(__name__)


def simulate_replay(
    packed: PackedBatch, model: ModelConfig, train: TrainConfig, step: int
) -> PackedBatch:
    """The batch with a cut in each document, where the setting asks for it and the model has one.

    Drawn cuts depend on the seed, the step and the place of the document alone.
    """
    cut = None if train.bounded_replay == "off" else find_cut(model)[0]
    if cut is None:
        return packed
    prompts = list(prompt_lengths(packed, mix(mix(train.seed) ^ step)))
    variant = ReplayVariant(train.bounded_replay)
    return replace(packed, replay=replay_bounds(model, prompts, cut=cut, variant=variant))


def warn_without_cut(model: ModelConfig, train: TrainConfig) -> None:
    """Say why a run that asks for the simulation goes on without it."""
    cut, reason = find_cut(model)
    if train.bounded_replay != "off" and cut is None:
        logger.warning("bounded replay is not simulated: %s", reason)


def prompt_lengths(packed: PackedBatch, key: int) -> Iterator[int]:
    """P of each document: 1 or more, and below its length where that is above 1."""
    weights = packed.weights
    parts = [None] * len(packed.lengths) if weights is None else weights.split(list(packed.lengths))
    for number, (length, own) in enumerate(zip(packed.lengths, parts, strict=True)):
        yield _first_learned(own) or 1 + mix(key + number) % max(1, length - 1)


def _first_learned(weights: Float[Tensor, " T"] | None) -> int | None:
    """First token of a document that is predicted and learned; None where all are, or none is."""
    if weights is None:
        return None
    learned = weights[1:] > 0
    return None if learned.all() or not learned.any() else 1 + int(learned.int().argmax())
