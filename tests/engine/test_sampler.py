"""Sampling against counts and hand-made cases."""

import math

import pytest
import torch

from openv41.engine.sampler import Sampler, SamplingConfig, keep
from openv41.errors import ConfigError

SHARES = torch.tensor([0.1, 0.4, 0.05, 0.25, 0.2], dtype=torch.float64)


def draws(count, logits=None, **settings):
    sampler = Sampler(SamplingConfig(**settings))
    logits = SHARES.log().float() if logits is None else logits
    return [sampler.draw(logits) for _ in range(count)]


def test_temperature_zero_takes_the_lowest_id_among_equals():
    logits = torch.tensor([0.0, 2.0, -1.0, 2.0])
    assert draws(3, logits, temperature=0.0) == [1, 1, 1]


def test_frequencies_are_the_probabilities():
    count = 4000
    found = torch.bincount(torch.tensor(draws(count, seed=1)), minlength=5) / count
    assert (found - SHARES).abs().max() < 4 * math.sqrt(0.25 / count)


def test_temperature_sharpens():
    count = 2000
    want = SHARES**2 / (SHARES**2).sum()
    found = torch.bincount(torch.tensor(draws(count, temperature=0.5)), minlength=5) / count
    assert (found - want).abs().max() < 4 * math.sqrt(0.25 / count)


def test_top_k_and_top_p_cut_the_tail():
    assert set(draws(300, top_k=2)) == {1, 3}
    assert set(draws(300, top_p=0.65)) == {1, 3}
    assert set(draws(300, top_p=0.66)) == {1, 3, 4}
    assert set(draws(300, top_p=1e-9)) == {1}
    assert set(draws(300, top_k=3, top_p=0.4)) == {1}


def test_top_k_takes_the_lowest_ids_among_equals():
    assert set(draws(100, torch.zeros(6), top_k=2)) == {0, 1}


def test_top_p_counts_the_share_within_top_k():
    shares = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    assert keep(shares, None, 0.7).tolist() == [0.4, 0.3]
    assert keep(shares, 2, 0.5).tolist() == [0.4]  # 0.4 of 0.7 is more than half
    assert keep(shares, None, 1.0).tolist() == shares.tolist()


def test_impossible_tokens_are_never_drawn():
    logits = torch.tensor([-math.inf, 0.0, -math.inf, 0.0])
    assert set(draws(200, logits)) == {1, 3}


def test_seeds():
    assert draws(50, seed=3) == draws(50, seed=3)
    assert draws(50, seed=3) != draws(50, seed=4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1, must be at least 0"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"top_k": 0}, "top_k is 0, must be at least 1"),
        ({"top_p": 0.0}, "top_p is 0.0, must be above 0 and at most 1"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ConfigError, match=message):
        SamplingConfig(**settings)


def test_a_denormal_temperature_takes_the_most_likely_token():
    assert draws(3, temperature=1e-320) == [1, 1, 1]
