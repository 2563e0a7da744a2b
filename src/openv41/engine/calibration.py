"""Temperatures that make confidences honest: Sequential Temperature Scaling. Report §2.4.3.

A confidence c_k = sigmoid(z_k / T_k) is the chance that draft k is accepted if those before it
are; what a scheduler needs honest is the survival a_k, their product. So the temperatures are
fitted from the first draft on, each with those before it fixed, against what survived.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from openv41.engine.verification_scheduler import survival

GRID = np.logspace(-1, 1, 41)
BINS = 15  # of equal width


@dataclass(frozen=True, kw_only=True)
class Bin:
    """Survivals of about the same size: what they were, and how many drafts survived."""

    predicted: float  # mean
    survived: float  # share
    count: int


def confidences(
    logits: Float[np.ndarray, "rounds X"], temperatures: Float[np.ndarray, " X"]
) -> Float[np.ndarray, "rounds X"]:
    """sigmoid(z_k / T_k), exact at both ends."""
    scaled = logits.astype(np.float64) / temperatures
    small = np.exp(-np.abs(scaled))
    found: Float[np.ndarray, "rounds X"] = np.where(scaled >= 0, 1.0, small) / (1.0 + small)
    return found


def fit_temperatures(
    logits: Float[np.ndarray, "rounds X"], accepted: Int[np.ndarray, " rounds"]
) -> Float[np.ndarray, " X"]:
    """Find a temperature for each draft from rounds that verified all drafts, drawn at T = 1.

    Each minimises the expected calibration error of its survival over a grid; of equals the one
    nearest to 1. Temperatures of 1 stay where all together they leave a smaller error.
    """
    fitted = np.ones(logits.shape[1])
    candidates = sorted(GRID.tolist(), key=lambda value: abs(np.log(value)))
    for place in range(len(fitted)):
        survived = accepted > place
        errors = []
        for value in candidates:
            fitted[place] = value
            predicted = survival(confidences(logits, fitted))[:, place]
            errors.append(expected_calibration_error(predicted, survived))
        fitted[place] = candidates[int(np.argmin(errors))]
    unscaled = np.ones_like(fitted)
    worse = errors_by_draft(logits, accepted, fitted) > errors_by_draft(logits, accepted, unscaled)
    if worse.all():
        return unscaled
    return fitted


def errors_by_draft(
    logits: Float[np.ndarray, "rounds X"],
    accepted: Int[np.ndarray, " rounds"],
    temperatures: Float[np.ndarray, " X"],
) -> Float[np.ndarray, " X"]:
    """Expected calibration error of each draft's survival."""
    predicted = survival(confidences(logits, temperatures))
    columns = enumerate(predicted.T)
    return np.array([expected_calibration_error(p, accepted > place) for place, p in columns])


def expected_calibration_error(
    predicted: Float[np.ndarray, " rounds"], happened: Bool[np.ndarray, " rounds"]
) -> float:
    """Mean distance of prediction and share over bins, by the rounds in them."""
    return sum(
        found.count / len(predicted) * abs(found.predicted - found.survived)
        for found in reliability(predicted, happened)
    )


def reliability(
    predicted: Float[np.ndarray, " rounds"], happened: Bool[np.ndarray, " rounds"]
) -> list[Bin]:
    """Bins that hold anything, by what they predict: the points of a reliability diagram."""
    places = np.minimum((predicted * BINS).astype(np.int64), BINS - 1)
    counts = np.bincount(places, minlength=BINS)
    sums = np.bincount(places, predicted, BINS)
    hits = np.bincount(places, happened.astype(np.float64), BINS)
    return [
        Bin(predicted=sums[i] / counts[i], survived=hits[i] / counts[i], count=int(counts[i]))
        for i in np.flatnonzero(counts)
    ]


def area_under_roc(
    predicted: Float[np.ndarray, " rounds"], happened: Bool[np.ndarray, " rounds"]
) -> float | None:
    """Chance that what happened was held for more likely than what did not; None without both."""
    good, bad = np.sort(predicted[happened]), np.sort(predicted[~happened])
    if not len(good) or not len(bad):
        return None
    below = np.searchsorted(bad, good, "left") + np.searchsorted(bad, good, "right")
    return float(below.sum()) / (2 * len(good) * len(bad))
