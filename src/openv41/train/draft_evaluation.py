"""What a drafter is worth on held-out text: acceptance, calibration, separation. Report §2.4.3.

Drafts are teacher-forced on the text. The chance that draft k is accepted if those before it are,
c* = 1 - |p_d - p_t|_1 / 2, is known exactly, so nothing is drawn: a draft of confidence c counts as
c* accepted and 1 - c* rejected ones.
"""

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

import numpy as np
import torch
from torch import Tensor

from openv41.model.causal_encoder_decoder import CausalEncoderDecoder
from openv41.reliability import (
    FINE_BINS,
    area_under_roc,
    binned,
    calibration_error,
    merged,
    reliability,
)
from openv41.train.config import TrainConfig
from openv41.train.data import EvaluationWindow
from openv41.train.draft_loss import DraftSums, draw_anchors, mean_length
from openv41.train.packed_batch import PackedBatch

EVALUATION_STEP = 2**31  # whose anchors are drawn: no step of a run


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftScores:
    """Figures of a drafter; lists have an entry per draft position."""

    acceptance: list[float]
    tau: float  # mean accepted length, bonus token included, if acceptances were independent
    calibration_error: list[float]  # ECE of sigmoid(z) against c*
    auroc: list[float]  # chance that an accepted draft has the higher confidence; nan: unknown
    reliability: list[list[float]]  # of all positions, per bin: mean confidence, mean c*, share
    drafts: int


class HeldOutDrafts:
    """Blocks behind anchors that are spread over held-out windows, the same in every call."""

    def __init__(self, windows: Sequence[EvaluationWindow], train: TrainConfig) -> None:
        weight = train.draft.weight or 1.0
        self.train = replace(train, draft=replace(train.draft, weight=weight))
        self.packed = PackedBatch(
            torch.cat([window.ids for window in windows]), tuple(len(w.ids) for w in windows)
        )

    @torch.no_grad()
    def score(self, model: CausalEncoderDecoder) -> DraftScores:
        """Measure a model's drafter; of several processes each measures all."""
        packed = draw_anchors(self.packed, model.config, self.train, EVALUATION_STEP)
        sums = Measured(model, packed, self.train)
        for part in packed.split(self.train.batch_tokens):
            batch = part.for_model(model)
            sums.add(part, batch, model(batch))
        return sums.scores()


class Measured(DraftSums):
    """Sums that keep how often which confidence was right."""

    def __init__(
        self, model: CausalEncoderDecoder, packed: PackedBatch, config: TrainConfig
    ) -> None:
        super().__init__(model, packed, config)
        size = self.drafter.block_size
        self.fine = np.zeros((size, FINE_BINS, 3))  # of each position

    def scores(self) -> DraftScores:
        """Everything that was measured."""
        acceptance = list(self.figures().acceptance)
        coarse = [merged(bins) for bins in self.fine]
        areas = [area_under_roc(bins) for bins in self.fine]
        return DraftScores(
            acceptance=acceptance,
            tau=mean_length(acceptance),
            calibration_error=[calibration_error(bins) for bins in coarse],
            auroc=[math.nan if area is None else area for area in areas],
            reliability=[list(astuple(found)) for found in reliability(np.sum(coarse, axis=0))],
            drafts=self.num_drafts,
        )

    def _count(self, counts: Tensor, accept: Tensor, logits: Tensor) -> None:
        super()._count(counts, accept, logits)
        columns = logits.sigmoid(), accept, counts.double()
        for slot in range(len(self.fine)):
            own = (column[:, slot].numpy() for column in columns)
            self.fine[slot] += binned(*own, bins=FINE_BINS)
