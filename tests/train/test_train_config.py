"""What a run's settings refuse."""

import pytest

from openv41.errors import ConfigError
from openv41.train.config import OptimizerConfig, TrainConfig


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokens": 0}, "tokens is 0, must be at least 1"),
        ({"tokens": 100}, r"tokens is 100, must be at least batch_tokens \(4096\)"),
        ({"batch_tokens": 1000}, r"must be a multiple of sequence_length \(512\)"),
        ({"sequence_length": 1}, "sequence_length is 1, must be at least 2"),
        ({"warmup_tokens": 3_000_000}, r"tokens \(2000000\); .*=100000"),
        ({"tail_tokens": 1_950_000}, r"tail_tokens \(1950000\) together.*tokens=2500$"),
        ({"hold_tokens": 2_000_000}, "together exceed.*set smaller hold_tokens and tail_tokens"),
        ({"final_lr_factor": 1.5}, "final_lr_factor is 1.5, must be from 0 to 1"),
        ({"balance_speed": -1.0}, "balance_speed is -1.0, must be at least 0"),
        ({"balance_speed": float("inf")}, "balance_speed is inf, must be at most 1"),
        ({"balance_loss": -1.0}, "balance_loss is -1.0, must be at least 0 and finite"),
        ({"indexer_loss": float("inf")}, "indexer_loss is inf, must be at least 0 and finite"),
        ({"seed": 10**23}, f"seed is {10**23}, must be at most {2**63 - 1}"),
        ({"spike_factor": -1.0}, "spike_factor is -1.0, must be at least 0 and finite"),
        ({"spike_steps": 1}, "spike_steps is 1, must be at least 2"),
        ({"cpu_threads": 2000}, "cpu_threads is 2000, must be at most 1024"),
    ],
)
def test_run_settings(settings, message):
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": 0.0}, "lr is 0.0, must be above 0"),
        ({"eps": float("nan")}, "eps is nan, must be above 0"),
        ({"lr": float("inf")}, "lr is inf, must be above 0 and finite"),
        ({"beta1": 1.0}, "beta1 is 1.0, must be at least 0 and below 1"),
        ({"sinkhorn_steps": 10}, "sinkhorn_steps is 10, must be odd"),
        ({"momentum": 1.0}, "momentum is 1.0, must be at least 0 and below 1"),
        ({"vision_lr_factor": 0.0}, "vision_lr_factor is 0.0, must be above 0"),
        ({"clip_norm": -1.0}, "clip_norm is -1.0, must be at least 0"),
    ],
)
def test_optimizer_settings(settings, message):
    with pytest.raises(ConfigError, match=message):
        OptimizerConfig(**settings)


def test_objectives_are_those_with_a_weight():
    none = TrainConfig(indexer_loss=0.0, balance_loss=0.0)
    assert none.objectives is None
    balance = TrainConfig(indexer_loss=0.0, indexer_teacher="mean").objectives
    assert (balance.indexer, balance.balance) == (None, True)
    indexer = TrainConfig(balance_loss=0.0, indexer_teacher="mean").objectives
    assert (indexer.indexer, indexer.balance) == ("mean", False)
