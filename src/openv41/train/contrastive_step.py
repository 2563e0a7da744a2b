"""One optimizer step of stage ``vision``. Report §2.1.1."""

import math

from openv41.train.config import TrainConfig
from openv41.train.contrastive import (
    ContrastiveModel,
    Pairs,
    retrieval_accuracy,
    sigmoid_contrastive_loss,
)
from openv41.train.optimizer import Optimizers
from openv41.train.packed_batch import PackedBatch
from openv41.train.step import StepResult, update


def contrastive_step(
    model: ContrastiveModel,
    optimizer: Optimizers,
    packed: PackedBatch,
    config: TrainConfig,
    step: int,
    *,
    most: float = math.inf,
) -> StepResult:
    """Train on the pairs of one batch; raises DivergedError before anything has changed."""
    pairs = Pairs.of(packed)
    images, texts = model(pairs)
    loss = sigmoid_contrastive_loss(images, texts, model.log_temperature, model.bias)
    loss.backward()
    done = update(optimizer, loss.item(), config, step, most=most)
    return StepResult(
        loss=loss.item(),
        losses={},
        indexer_loss=None,
        balance_loss=None,
        grad_norm=done.grad_norm,
        update_rms=done.update_rms,
        lr=done.lr,
        loads={},
        num_targets=len(pairs.lengths),
        retrieval=retrieval_accuracy(images.detach(), texts.detach(), pairs),
    )
