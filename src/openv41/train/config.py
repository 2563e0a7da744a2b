"""Configuration of a training run. Report §2.5.

A run counts tokens, never seconds: the same settings give the same run on any machine.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

from openv41.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW; the learning rate of a group is ``lr`` x the group's factor x the schedule."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-20  # as disclosed; with weights in float32 it never underflows
    weight_decay: float = 0.1  # decoupled, for matrices only
    clip_norm: float = 1.0  # of all gradients together; 0 turns clipping off
    embedding_lr_factor: float = 1.0
    engram_table_lr_factor: float = 5.0  # rows of the n-gram memory are hit rarely

    def __post_init__(self) -> None:
        problems = [
            f"{name} is {getattr(self, name)}, must be above 0 and finite"
            for name in ("lr", "eps", "embedding_lr_factor", "engram_table_lr_factor")
            if not 0 < getattr(self, name) < math.inf
        ]
        problems += [
            f"{name} is {getattr(self, name)}, must be at least 0"
            for name in ("weight_decay", "clip_norm")
            if not getattr(self, name) >= 0
        ]
        problems += [
            f"{name} is {getattr(self, name)}, must be at least 0 and below 1"
            for name in ("beta1", "beta2")
            if not 0 <= getattr(self, name) < 1
        ]
        if problems:
            raise ConfigError("optimizer", problems)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """How long, on what and how a model is trained."""

    tokens: int = 2_000_000  # rounded down to whole batches
    sequence_length: int = 512
    batch_tokens: int = 4096
    seed: int = 0
    warmup_tokens: int = 100_000
    hold_tokens: int = 0  # at the full learning rate between warm-up and decay
    decay: Literal["linear", "cosine"] = "linear"
    final_lr_factor: float = 0.0
    balance_speed: float = 0.001  # step of the routing biases
    modality_biases: bool = True  # text and images have routing biases and loads of their own
    image_share: float = 0.25  # of each batch's tokens, where the run has image-text samples
    learn_image_tokens: bool = False  # also predict the tokens of image spans
    checkpoint_steps: int = 200
    heldout_steps: int = 200
    heldout_tokens: int = 32768  # evenly spread over the held-out text
    cpu_threads: int = 0  # 0 leaves it to torch; small models gain nothing from a second
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    def __post_init__(self) -> None:
        counts = ("tokens", "batch_tokens", "checkpoint_steps", "heldout_steps", "heldout_tokens")
        problems = [
            f"{name} is {getattr(self, name)}, must be at least 1"
            for name in counts
            if getattr(self, name) < 1
        ]
        problems += [
            f"{name} is {getattr(self, name)}, must be at least 0"
            for name in ("warmup_tokens", "hold_tokens", "seed", "balance_speed", "cpu_threads")
            if not getattr(self, name) >= 0
        ]
        problems += [
            f"{name} is {getattr(self, name)}, must be at most {most}"
            for name, most in (("seed", 2**63 - 1), ("cpu_threads", 1024), ("balance_speed", 1))
            if getattr(self, name) > most
        ]
        if self.sequence_length < 2:
            problems.append(f"sequence_length is {self.sequence_length}, must be at least 2")
        elif self.batch_tokens % self.sequence_length:
            problems.append(
                f"batch_tokens is {self.batch_tokens}, must be a multiple of sequence_length "
                f"({self.sequence_length})"
            )
        if 1 <= self.tokens < self.batch_tokens:
            problems.append(
                f"tokens is {self.tokens}, must be at least batch_tokens ({self.batch_tokens})"
            )
        if self.warmup_tokens + self.hold_tokens > self.tokens:
            problems.append(
                f"warmup_tokens ({self.warmup_tokens}) and hold_tokens ({self.hold_tokens}) "
                f"together exceed tokens ({self.tokens})"
            )
        if self.decay not in ("linear", "cosine"):
            problems.append(f"decay is {self.decay!r}, must be linear or cosine")
        if not 0 < self.image_share < 1:
            problems.append(f"image_share is {self.image_share}, must be above 0 and below 1")
        if not 0 <= self.final_lr_factor <= 1:
            problems.append(f"final_lr_factor is {self.final_lr_factor}, must be from 0 to 1")
        if problems:
            raise ConfigError("train", problems)

    @property
    def image_tokens(self) -> int:
        """Room for image-text samples in a batch of a run that has some, in whole sequences."""
        rows = self.batch_tokens // self.sequence_length
        return min(max(1, round(self.image_share * rows)), rows - 1) * self.sequence_length

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.tokens // self.batch_tokens
