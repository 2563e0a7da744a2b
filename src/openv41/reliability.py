"""How honest predicted chances are: calibration error, reliability. Report §2.4.3.

Predictions are counted in bins of equal width; everything else is a figure of the bins. What
happened is a share: 0 or 1 where it was drawn, anything between where its chance is known.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Real

BINS = 15  # of a diagram and of the calibration error
FINE_BINS = 1000  # of the area under the ROC curve

Bins = Float[np.ndarray, "bins 3"]  # of each bin: weight, and the weighted sums of both


@dataclass(frozen=True, kw_only=True, slots=True)
class Bin:
    """Predictions of about the same size: what they were, and what happened."""

    predicted: float  # mean
    happened: float  # share
    share: float  # of all predictions


def binned(
    predicted: Float[np.ndarray, " rounds"],
    happened: Bool[np.ndarray, " rounds"] | Float[np.ndarray, " rounds"],
    weights: Real[np.ndarray, " rounds"] | None = None,
    *,
    bins: int = BINS,
) -> Bins:
    """Count predictions from 0 to 1; each counts once unless ``weights`` say otherwise."""
    places = np.minimum((predicted * bins).astype(np.int64), bins - 1)
    weight = np.ones(len(predicted)) if weights is None else weights.astype(np.float64)
    columns = weight, weight * predicted, weight * happened
    return np.stack([np.bincount(places, column, bins) for column in columns], axis=1)


def merged(fine: Float[np.ndarray, "fine 3"], bins: int = BINS) -> Bins:
    """The same counts in fewer bins of equal width."""
    found = np.zeros((bins, 3))
    np.add.at(found, np.arange(len(fine)) * bins // len(fine), fine)
    return found


def calibration_error(bins: Bins) -> float:
    """Expected calibration error: mean distance of prediction and share over the bins."""
    weight, predicted, happened = bins.T
    return float(np.abs(predicted - happened).sum() / max(1.0, weight.sum()))


def reliability(bins: Bins) -> list[Bin]:
    """Bins that hold anything, by what they predict: the points of a reliability diagram."""
    total = bins[:, 0].sum()
    return [
        Bin(predicted=p / weight, happened=h / weight, share=weight / total)
        for weight, p, h in bins.tolist()
        if weight
    ]


def area_under_roc(bins: Bins) -> float | None:
    """Chance that what happened was held for more likely than what did not.

    Those of one bin count half. None where everything happened, or nothing.
    """
    weight, _, good = bins.T
    bad = weight - good
    pairs = good.sum() * bad.sum()
    if not pairs > 0:
        return None
    return float((good * (np.cumsum(bad) - bad / 2)).sum() / pairs)
