"""What a drafter is worth on held-out text: acceptance, calibration, separation. Report §2.4.3.

Drafts are teacher-forced on the text. The chance that draft k is accepted if those before it are,
c* = 1 - |p_d - p_t|_1 / 2, is known exactly, so nothing is drawn: a draft of confidence c counts as
c* accepted and 1 - c* rejected ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from openv41.model.causal_encoder_decoder import CausalEncoderDecoder
from openv41.train.config import TrainConfig
from openv41.train.data import EvaluationWindow
from openv41.train.draft_loss import DraftSums, draw_anchors, mean_length
from openv41.train.packed_batch import PackedBatch

BINS = 15  # of the reliability diagram and the calibration error
FINE_BINS = 1000  # of the AUROC
EVALUATION_STEP = 2**31  # whose anchors are drawn: no step of a run


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftScores:
    """Figures of a drafter; lists have an entry per draft position."""

    acceptance: list[float]
    tau: float  # mean accepted length, bonus token included, if acceptances were independent
    calibration_error: list[float]  # ECE of sigmoid(z) against c*
    auroc: list[float]  # chance that an accepted draft has the higher confidence
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
        self.fine = torch.zeros(size, FINE_BINS, 3, dtype=torch.float64)  # count, sum c, sum c*

    def scores(self) -> DraftScores:
        """Everything that was measured."""
        acceptance = list(self.figures().acceptance)
        coarse = coarse_bins(self.fine)
        return DraftScores(
            acceptance=acceptance,
            tau=mean_length(acceptance),
            calibration_error=[calibration_error(bins) for bins in coarse],
            auroc=[auroc(bins) for bins in self.fine],
            reliability=reliability(coarse.sum(dim=0)),
            drafts=self.num_drafts,
        )

    def _count(self, counts: Tensor, accept: Tensor, logits: Tensor) -> None:
        super()._count(counts, accept, logits)
        confidence = logits.sigmoid()
        bins = (confidence * FINE_BINS).long().clamp(max=FINE_BINS - 1)
        figures = torch.stack([torch.ones_like(confidence), confidence, accept], dim=-1)
        figures *= counts[..., None]
        for slot in range(bins.shape[1]):
            self.fine[slot].index_add_(0, bins[:, slot], figures[:, slot])


def coarse_bins(fine: Float[Tensor, "X fine 3"]) -> Float[Tensor, "X bins 3"]:
    """The same counts in fewer bins of equal width."""
    of = torch.arange(fine.shape[1]) * BINS // fine.shape[1]
    return fine.new_zeros(len(fine), BINS, 3).index_add_(1, of, fine)


def calibration_error(bins: Float[Tensor, "bins 3"]) -> float:
    """Expected calibration error: |mean confidence - mean acceptance| over the bins' shares."""
    counts, confidence, accepted = bins.T
    return float((confidence - accepted).abs().sum() / counts.sum().clamp(min=1))


def reliability(bins: Float[Tensor, "bins 3"]) -> list[list[float]]:
    """Mean confidence, mean acceptance and share of the bins that hold something."""
    total = float(bins[:, 0].sum())
    return [[c / n, a / n, n / total] for n, c, a in bins.tolist() if n]


def auroc(bins: Float[Tensor, "bins 3"]) -> float:
    """Area under the ROC curve; ties within a bin count half; nan without both outcomes."""
    accepted = bins[:, 2]
    rejected = bins[:, 0] - accepted
    below = rejected.cumsum(0) - rejected
    pairs = accepted.sum() * rejected.sum()
    return float((accepted * (below + rejected / 2)).sum() / pairs)
