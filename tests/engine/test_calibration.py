"""Temperatures are found, and they make survivals honest. Test T15."""

import numpy as np

from openv41.engine.calibration import GRID, confidences, errors_by_draft, fit_temperatures
from openv41.engine.verification_scheduler import survival

TEMPERATURES = np.array([2.0, 0.5, 1.5, 1.0])


def rounds_of(count, seed, temperatures=TEMPERATURES):
    """Logits that are ``temperatures`` too large, and how many drafts were accepted."""
    generator = np.random.default_rng(seed)
    honest = generator.normal(1.0, 1.5, (count, len(temperatures)))
    hits = generator.random(honest.shape) < 1 / (1 + np.exp(-honest))
    return honest * temperatures, np.cumprod(hits, axis=1).sum(axis=1)


def correlated_rounds(count, seed):
    """The chance of every draft of a round depends on one hidden ease that no logit tells.

    Returns the logits too, and whether each draft alone would be accepted.
    """
    generator = np.random.default_rng(seed)
    logits = generator.normal(2.0, 0.5, (count, 4))
    ease = generator.normal(0.0, 1.5, (count, 1))
    hits = generator.random(logits.shape) < 1 / (1 + np.exp(-(logits + ease)))
    return logits, hits


def test_known_temperatures_are_found():
    logits, accepted = rounds_of(40_000, seed=0)
    steps = np.log(fit_temperatures(logits, accepted) / TEMPERATURES) / np.log(GRID[1] / GRID[0])
    assert np.abs(steps).max() < 1.5, steps


def test_errors_fall():
    logits, accepted = rounds_of(5_000, seed=1)
    before = errors_by_draft(logits, accepted, np.ones(4))
    after = errors_by_draft(logits, accepted, fit_temperatures(logits, accepted))
    assert (after <= before).all()
    assert before[0] > 0.05
    assert after.max() < 0.02


def test_temperatures_of_one_stay_where_nothing_is_better():
    rounds = 64
    logits, accepted = np.full((rounds, 3), 40.0), np.full(rounds, 3)
    np.testing.assert_array_equal(fit_temperatures(logits, accepted), np.ones(3))


def test_order_is_kept():
    logits, accepted = rounds_of(2_000, seed=2)
    fitted = confidences(logits, fit_temperatures(logits, accepted))
    for place in range(4):
        assert (np.diff(fitted[np.argsort(logits[:, place]), place]) >= 0).all()


def test_sequential_beats_each_draft_on_its_own():
    logits, hits = correlated_rounds(20_000, seed=3)
    accepted = np.cumprod(hits, axis=1).sum(axis=1)
    alone = np.array(
        [
            fit_temperatures(logits[:, k : k + 1], hits[:, k].astype(np.int64))[0]
            for k in range(logits.shape[1])
        ]
    )
    sequential = errors_by_draft(logits, accepted, fit_temperatures(logits, accepted))
    assert sequential[1:].mean() < 0.5 * errors_by_draft(logits, accepted, alone)[1:].mean()


def test_confidences_are_exact_at_both_ends():
    found = confidences(np.array([[-1e4, 0.0, 1e4]]), np.ones(3))
    np.testing.assert_array_equal(found, [[0.0, 0.5, 1.0]])


def test_survival_of_calibrated_confidences_never_rises():
    logits, accepted = rounds_of(500, seed=5)
    fitted = survival(confidences(logits, fit_temperatures(logits, accepted)))
    assert (np.diff(fitted, axis=1) <= 0).all()
