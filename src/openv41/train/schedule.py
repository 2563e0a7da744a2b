"""Learning rate over a run: warm-up, hold, decay, flat tail, counted in tokens. Report §2.5."""

import math

from openv41.train.config import TrainConfig


def lr_factor(config: TrainConfig, step: int) -> float:
    """Share of the full learning rate in a step, taken at the middle of its tokens.

    Linear from 0 to 1 over ``warmup_tokens``, 1 for ``hold_tokens``, then linear or cosine down to
    ``final_lr_factor``, where it stays for ``tail_tokens``.
    """
    position = _middle(config, step)
    if position < config.warmup_tokens:
        return position / config.warmup_tokens
    if not decays(config, step):
        return 1.0
    start = config.decay_start
    end = config.num_steps * config.batch_tokens - config.tail_tokens
    done = min(1.0, (position - start) / (end - start)) if end > start else 1.0
    left = 1 - done if config.decay == "linear" else (1 + math.cos(math.pi * done)) / 2
    return config.final_lr_factor + (1 - config.final_lr_factor) * left


def decays(config: TrainConfig, step: int) -> bool:
    """Whether the decay of the learning rate has begun by the middle of a step's tokens."""
    return _middle(config, step) > config.decay_start


def _middle(config: TrainConfig, step: int) -> float:
    assert 0 <= step < config.num_steps, f"step {step} of {config.num_steps}"
    return (step + 0.5) * config.batch_tokens
