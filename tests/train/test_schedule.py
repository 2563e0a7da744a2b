"""The learning rate by hand, in tokens."""

import math

import pytest

from openv41.train.config import TrainConfig
from openv41.train.schedule import lr_factor


def factors(**settings):
    base = {"sequence_length": 10, "batch_tokens": 10, "tokens": 109, "warmup_tokens": 0}
    base["decay"] = "linear"
    config = TrainConfig(**{**base, **settings})
    return [lr_factor(config, step) for step in range(config.num_steps)]


def test_warm_up_hold_and_linear_decay():
    got = factors(warmup_tokens=20, hold_tokens=30, final_lr_factor=0.2)
    # Middles of the steps: 5, 15, ..., 95; the decay runs from 50 to 100 tokens.
    want = [0.25, 0.75, 1, 1, 1, *(0.2 + 0.8 * (1 - d) for d in (0.1, 0.3, 0.5, 0.7, 0.9))]
    assert got == pytest.approx(want, rel=1e-12)


def test_cosine_falls_slowly_at_both_ends():
    got = factors(decay="cosine")
    want = [(1 + math.cos(math.pi * (step + 0.5) / 10)) / 2 for step in range(10)]
    assert got == pytest.approx(want, rel=1e-12)


def test_a_flat_tail_follows_the_decay():
    got = factors(tail_tokens=30, hold_tokens=20, final_lr_factor=0.1)
    want = [1, 1, *(0.1 + 0.9 * (1 - d) for d in (0.1, 0.3, 0.5, 0.7, 0.9)), 0.1, 0.1, 0.1]
    assert got == pytest.approx(want, rel=1e-12)
    assert factors(tail_tokens=50, hold_tokens=50, final_lr_factor=0.1)[5:] == [0.1] * 5


def test_linear_to_zero_averages_one_half():
    assert sum(factors()) / 10 == pytest.approx(0.5)


def test_the_run_ends_with_the_last_whole_batch():
    assert len(factors(tokens=119)) == 11
    assert factors(tokens=119) == factors(tokens=110)


def test_batch_size_does_not_change_the_schedule():
    small, large = (
        factors(tokens=120, warmup_tokens=40),
        factors(tokens=120, warmup_tokens=40, batch_tokens=40),
    )
    assert large == pytest.approx([sum(small[i : i + 4]) / 4 for i in (0, 4, 8)])
