"""Configuration of a training run. Report §2.5.

A run counts tokens, never seconds: the same settings give the same run on any machine.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from openv41.config import NUMERICS, NumericsConfig, Rounding
from openv41.errors import ConfigError
from openv41.layers.objectives import Objectives, Teacher

Numerics = Literal["f32", "f32qat", "bf16", "bf16qat"]
NUMERICS_OF: dict[Numerics, NumericsConfig] = {
    "f32": NUMERICS["f32"],
    "f32qat": NUMERICS["f32qat"],
    "bf16": replace(NUMERICS["f32"], compute_dtype="bfloat16"),
    "bf16qat": NUMERICS["bf16qat"],
}


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """Update rules; the learning rate of a group is ``lr`` x the group's factor x the schedule."""

    lr: float = 1e-3
    momentum: float = 0.95  # of Muon and of the Sinkhorn-balanced update
    update_rms: float = 0.18  # of both
    matrix_update: Literal["muon", "adamw"] = "muon"
    head_wise: bool = True  # Muon sees each query and index head as a matrix of its own
    token_update: Literal["sinkhorn", "adamw"] = "sinkhorn"  # of embedding, head, n-gram tables
    ns_dtype: Literal["float32", "bfloat16"] = "float32"  # of large matrices of full rank
    sinkhorn_steps: int = 11
    sinkhorn_threshold: float = 1e-3  # rows below this share of the mean row are left alone
    beta1: float = 0.9  # the betas and eps are AdamW's
    beta2: float = 0.95
    eps: float = 1e-20  # as disclosed; with weights in float32 it never underflows
    weight_decay: float = 0.1  # decoupled, for matrices and norms
    clip_norm: float = 1.0  # of all gradients together; 0 turns clipping off
    token_lr_factor: float = 1.0  # of embedding and head
    engram_table_lr_factor: float = 5.0  # rows of the n-gram memory are hit rarely
    vision_lr_factor: float = 0.1  # the report says "smaller"
    drafter_lr_factor: float = 1.0

    def __post_init__(self) -> None:
        groups = ("token", "engram_table", "vision", "drafter")
        factors = [f"{group}_lr_factor" for group in groups]
        problems = [
            f"{name} is {getattr(self, name)}, must be above 0 and finite"
            for name in ("lr", "eps", "update_rms", *factors)
            if not 0 < getattr(self, name) < math.inf
        ]
        problems += [
            f"{name} is {getattr(self, name)}, must be at least 0"
            for name in ("weight_decay", "clip_norm")
            if not getattr(self, name) >= 0
        ]
        problems += [
            f"{name} is {getattr(self, name)}, must be at least 0 and below 1"
            for name in ("momentum", "beta1", "beta2", "sinkhorn_threshold")
            if not 0 <= getattr(self, name) < 1
        ]
        if self.sinkhorn_steps < 1 or self.sinkhorn_steps % 2 == 0:
            problems.append(f"sinkhorn_steps is {self.sinkhorn_steps}, must be odd: rows come last")
        problems += [
            f"{name} is {getattr(self, name)!r}, must be {' or '.join(allowed)}"
            for name, allowed in _CHOICES.items()
            if getattr(self, name) not in allowed
        ]
        if problems:
            raise ConfigError("optimizer", problems)


BoundedReplay = Literal["off", "first_layer_full_window", "all_bounded"]
_CHOICES = {
    "matrix_update": ("muon", "adamw"),
    "token_update": ("sinkhorn", "adamw"),
    "ns_dtype": ("float32", "bfloat16"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig:
    """A low-rank update of chosen linear layers, the only thing that is then trained."""

    rank: int = 0  # 0 trains the model itself
    alpha: float = 16.0  # the update counts alpha / rank times
    targets: tuple[str, ...] = ("attention.w*", "experts.*", "shared.*")  # see train/lora.py

    def __post_init__(self) -> None:
        problems = []
        if self.rank < 0:
            problems.append(f"rank is {self.rank}, must be at least 0")
        if not 0 < self.alpha < math.inf:
            problems.append(f"alpha is {self.alpha}, must be above 0 and finite")
        if self.rank and not self.targets:
            problems.append("targets names no layer; name some, such as wq_a,wq_b")
        if problems:
            raise ConfigError("lora", problems)


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftConfig:
    """What the drafter learns, where it learns at all. Report §2.4.3."""

    weight: float = 0.0  # of all its losses together; 0 leaves the drafter alone
    anchors: int = 64  # blocks per document; 512 of 4,096 tokens in public recipes
    ce_weight: float = 0.1  # of the next token's loss
    l1_weight: float = 0.9  # of the distance between the distributions of drafter and target
    confidence_weight: float = 1.0  # of the confidence head's loss
    decay: float = 4.0  # draft k counts exp(-(k - 1) / decay)
    detach_confidence: bool = False  # the confidence head's loss then reaches that head alone
    balance: bool = True  # routing biases of the drafter follow its load
    blocks_at_once: int = 64  # whose logits are held at one time

    def __post_init__(self) -> None:
        weights = ("weight", "ce_weight", "l1_weight", "confidence_weight")
        problems = [
            f"{name} is {getattr(self, name)}, must be at least 0 and finite"
            for name in weights
            if not 0 <= getattr(self, name) < math.inf
        ]
        problems += [
            f"{name} is {getattr(self, name)}, must be at least 1"
            for name in ("anchors", "blocks_at_once")
            if getattr(self, name) < 1
        ]
        if not self.decay > 0:
            problems.append(f"decay is {self.decay}, must be above 0; inf counts all drafts alike")
        if problems:
            raise ConfigError("draft", problems)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """How long, on what and how a model is trained."""

    tokens: int = 2_000_000  # rounded down to whole batches
    sequence_length: int = 512
    batch_tokens: int = 4096
    seed: int = 0
    warmup_tokens: int = 100_000
    hold_tokens: int = 0  # at the full learning rate between warm-up and decay
    tail_tokens: int = 0  # at the lowest learning rate, after the decay
    decay: Literal["linear", "cosine"] = "cosine"
    final_lr_factor: float = 0.0
    balance_speed: float = 0.001  # step of the routing biases; LoRA leaves them alone
    lm_weight: float = 1.0  # of the next token's loss
    distill_weight: float = 1.0  # of the reverse KL to the teachers, where the run has some
    balance_loss: float = 1e-4  # weight of each document's own balance; 0 turns it off
    indexer_loss: float = 0.01  # weight of what the indexer learns from attention; 0 turns it off
    indexer_teacher: Teacher = "own"  # or the "mean" of the layers that share a selection
    modality_biases: bool = True  # text and images have routing biases and loads of their own
    image_share: float = 0.25  # of each batch's tokens, where the run has image-text samples
    learn_image_tokens: bool = False  # also predict the tokens of image spans
    freeze_vision: bool | None = None  # until the decay; None: if a stage before trained it
    numerics: Numerics = "f32"  # qat rounds caches as serving does; weights stay float32
    expert_fp4: bool = False  # routed experts compute with their weights rounded to FP4
    restrict_candidates: bool = False  # Reindex layers choose among their candidate pool alone
    bounded_replay: BoundedReplay = "off"  # or how windows are cut, as behind a prompt in serving
    micro_batch_tokens: int = 0  # that run at a time, of a batch; 0 for all
    activation_checkpointing: bool = False  # keep only the streams between layers
    update_rms_steps: int = 50  # between measurements of the updates' size; 0 for none
    max_skipped_steps: int = 3  # in a row, whose loss is not finite; then the run stops
    spike_factor: float = 6.0  # deviations above the mean loss that make a spike; 0 for none
    spike_steps: int = 100  # whose losses that mean is of
    skip_spikes: bool = False  # leave such a batch out, as one that is not finite
    checkpoint_steps: int = 200
    heldout_steps: int = 200
    heldout_tokens: int = 32768  # evenly spread over the held-out text
    cpu_threads: int = 0  # 0 leaves it to torch; small models gain nothing from a second
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)

    def __post_init__(self) -> None:
        phases = ("warmup_tokens", "hold_tokens", "tail_tokens")
        counts_from_0 = ("micro_batch_tokens", "update_rms_steps", "max_skipped_steps")
        finite = ("lm_weight", "distill_weight", "balance_loss", "indexer_loss", "spike_factor")
        counts = ("tokens", "batch_tokens", "checkpoint_steps", "heldout_steps", "heldout_tokens")
        problems = [
            f"{name} is {getattr(self, name)}, must be at least 1"
            for name in counts
            if getattr(self, name) < 1
        ]
        problems += [
            f"{name} is {getattr(self, name)}, must be at least 0"
            for name in (*phases, "seed", "balance_speed", "cpu_threads", *counts_from_0)
            if not getattr(self, name) >= 0
        ]
        problems += [
            f"{name} is {getattr(self, name)}, must be at least 0 and finite"
            for name in finite
            if not 0 <= getattr(self, name) < math.inf
        ]
        problems += [
            f"{name} is {getattr(self, name)}, must be at most {most}"
            for name, most in (("seed", 2**63 - 1), ("cpu_threads", 1024), ("balance_speed", 1))
            if getattr(self, name) > most
        ]
        if self.spike_steps < 2:
            problems.append(f"spike_steps is {self.spike_steps}, must be at least 2")
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
        if sum(getattr(self, name) for name in phases) > self.tokens:
            listed = ", ".join(f"{name} ({getattr(self, name)})" for name in phases)
            problems.append(
                f"{listed} together exceed tokens ({self.tokens}); {self._shorter_phases()}"
            )
        if self.decay not in ("linear", "cosine"):
            problems.append(f"decay is {self.decay!r}, must be linear or cosine")
        if self.indexer_teacher not in ("own", "mean"):
            problems.append(f"indexer_teacher is {self.indexer_teacher!r}, must be own or mean")
        if self.bounded_replay not in get_args(BoundedReplay):
            listed = ", ".join(get_args(BoundedReplay))
            problems.append(f"bounded_replay is {self.bounded_replay!r}, must be one of {listed}")
        if not 0 < self.image_share < 1:
            problems.append(f"image_share is {self.image_share}, must be above 0 and below 1")
        if not 0 <= self.final_lr_factor <= 1:
            problems.append(f"final_lr_factor is {self.final_lr_factor}, must be from 0 to 1")
        if problems:
            raise ConfigError("train", problems)

    def _shorter_phases(self) -> str:
        """What to do where the phases of the schedule do not fit into the run."""
        rest = self.tokens - self.hold_tokens - self.tail_tokens
        if rest > 0:
            return f"warm up for less, as with --set warmup_tokens={rest // 20}"
        return "set smaller hold_tokens and tail_tokens"

    @property
    def rounding(self) -> NumericsConfig:
        """Where the forward rounds."""
        expert_weights: Rounding = "fake" if self.expert_fp4 else "off"
        return replace(NUMERICS_OF[self.numerics], expert_weights=expert_weights)

    @property
    def objectives(self) -> Objectives | None:
        """Losses of single layers that a step computes."""
        teacher = self.indexer_teacher if self.indexer_loss else None
        if teacher is None and not self.balance_loss:
            return None
        return Objectives(indexer=teacher, balance=self.balance_loss > 0)

    @property
    def image_tokens(self) -> int:
        """Room for image-text samples in a batch of a run that has some, in whole sequences."""
        rows = self.batch_tokens // self.sequence_length
        return min(max(1, round(self.image_share * rows)), rows - 1) * self.sequence_length

    @property
    def decay_start(self) -> int:
        """Tokens before the learning rate decays."""
        return self.warmup_tokens + self.hold_tokens

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.tokens // self.batch_tokens
