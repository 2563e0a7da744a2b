"""A step of stage "dspark": the drafter learns from a model that rests. Report §2.4.3."""

import math

import torch

from openv41.model.causal_encoder_decoder import CausalEncoderDecoder
from openv41.train.balance import update_biases
from openv41.train.config import TrainConfig
from openv41.train.draft_loss import DraftSums, draw_anchors
from openv41.train.freezing import freeze_all_but_drafter
from openv41.train.optimizer import Optimizers
from openv41.train.packed_batch import PackedBatch
from openv41.train.step import StepResult, own_parts, update


def draft_step(
    model: CausalEncoderDecoder,
    optimizer: Optimizers,
    packed: PackedBatch,
    config: TrainConfig,
    step: int,
    *,
    most: float = math.inf,
) -> StepResult:
    """Train the drafter on one batch; raises DivergedError before anything has changed.

    The model's features are computed anew for every batch and never stored.
    """
    freeze_all_but_drafter(optimizer.placement)
    packed = draw_anchors(packed, model.config, config, step)
    sums = DraftSums(model, packed, config)
    own, idle = own_parts(packed, config.micro_batch_tokens, optimizer.processes)
    for share, parts in ((1.0, own), (0.0, idle)):
        for part in parts:
            with torch.no_grad():
                batch = part.for_model(model)
                out = model(batch)
            loss = sums.add(part, batch, out, share=share)
            if loss.requires_grad:  # a part may hold no anchor
                loss.backward()
    sums.collect(optimizer.processes)
    done = update(optimizer, sums.loss, config, step, most=most)
    if config.draft.balance:
        update_biases(model, sums.loads, config.balance_speed, by_modality=config.modality_biases)
    return StepResult(
        loss=sums.loss,
        losses={},
        indexer_loss=None,
        balance_loss=None,
        grad_norm=done.grad_norm,
        update_rms=done.update_rms,
        lr=done.lr,
        loads=sums.loads,
        num_targets=sums.num_drafts,
        draft=sums.figures(),
    )
