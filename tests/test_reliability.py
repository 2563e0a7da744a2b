"""Figures of predicted chances, by hand and by counting pairs."""

import itertools

import numpy as np
import pytest

from openv41.reliability import (
    FINE_BINS,
    area_under_roc,
    binned,
    calibration_error,
    merged,
    reliability,
)


def test_calibration_error_by_hand():
    predicted = np.array([0.10, 0.12, 0.90, 0.92, 1.0])
    happened = np.array([True, False, True, True, False])
    by_hand = 2 / 5 * abs(0.11 - 1 / 2) + 2 / 5 * abs(0.91 - 1) + 1 / 5 * abs(1.0 - 0)
    bins = binned(predicted, happened)
    assert calibration_error(bins) == pytest.approx(by_hand)
    assert [found.share for found in reliability(bins)] == pytest.approx([0.4, 0.4, 0.2])
    assert [found.happened for found in reliability(bins)] == pytest.approx([0.5, 1.0, 0.0])
    assert [found.predicted for found in reliability(bins)] == pytest.approx([0.11, 0.91, 1.0])


def test_area_under_roc_counts_pairs():
    generator = np.random.default_rng(4)
    predicted = generator.integers(0, 20, 500) / 20  # with ties
    happened = generator.random(500) < predicted
    pairs = itertools.product(predicted[happened], predicted[~happened])
    by_hand = np.mean([1.0 if good > bad else 0.5 if good == bad else 0.0 for good, bad in pairs])
    found = area_under_roc(binned(predicted, happened, bins=FINE_BINS))
    assert found == pytest.approx(by_hand, abs=1e-12)
    assert area_under_roc(binned(predicted, np.ones(500, bool))) is None


def test_shares_and_weights_count_as_so_many_drafts():
    """Three drafts of chance 1/3 are one that is accepted and two that are not."""
    predicted = np.array([0.2, 0.7, 0.7])
    shares = binned(predicted, np.array([1 / 3, 0.5, 0.9]), np.array([3, 2, 0]))
    drawn = binned(np.array([0.2, 0.2, 0.2, 0.7, 0.7]), np.array([1, 0, 0, 1, 0]) > 0)
    np.testing.assert_allclose(shares, drawn, atol=1e-12)


def test_fine_bins_become_coarse_ones():
    generator = np.random.default_rng(5)
    predicted, happened = generator.random(300), generator.random(300)
    np.testing.assert_allclose(
        merged(binned(predicted, happened, bins=60)), binned(predicted, happened), atol=1e-12
    )
