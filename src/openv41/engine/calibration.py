"""Temperatures that make confidences honest: Sequential Temperature Scaling. Report §2.4.3.

A confidence c_k = sigmoid(z_k / T_k) is the chance that draft k is accepted if those before it
are; what a scheduler needs honest is the survival a_k, their product. So the temperatures are
fitted from the first draft on, each with those before it fixed, against what survived.
"""

import numpy as np
from jaxtyping import Float, Int

from openv41.engine.verification_scheduler import survival
from openv41.reliability import binned, calibration_error

GRID = np.logspace(-1, 1, 41)


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
            errors.append(calibration_error(binned(predicted, survived)))
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
    return np.array([calibration_error(binned(p, accepted > place)) for place, p in columns])
