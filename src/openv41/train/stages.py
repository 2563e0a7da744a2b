"""Stages of a run, each a recipe: what it changes in the run's settings. Report §2.3.2, §2.4.4.

Pre-training rounds no cache and restricts no indexer. Context extension goes on with longer
sequences. Post-training rounds caches and index keys and restricts the deeper indexers to their
candidates, as serving does.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from openv41.config import ModelConfig
from openv41.errors import ConfigError
from openv41.train.config import TrainConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A part of a run with settings of its own."""

    name: str
    train: TrainConfig


@dataclass(frozen=True, slots=True)
class Place:
    """Where a step of the run stands: its stage, the step within it, and the tokens before it."""

    number: int
    stage: Stage
    step: int
    tokens: int

    @property
    def is_last(self) -> bool:
        """Whether the stage ends with this step."""
        return self.step == self.stage.train.num_steps - 1


def pretrain(base: TrainConfig) -> TrainConfig:
    """From random weights, with exact caches; every indexer chooses among all entries."""
    return base


def extend(base: TrainConfig) -> TrainConfig:
    """Four times the context, at the lowest learning rate of the stage before."""
    factor = base.final_lr_factor or 0.1
    longer = 4 * base.sequence_length
    batch_tokens = -(-base.batch_tokens // longer) * longer
    return replace(
        base,
        tokens=max(base.tokens // 10, batch_tokens),
        sequence_length=longer,
        batch_tokens=batch_tokens,
        warmup_tokens=0,
        hold_tokens=0,
        tail_tokens=0,
        final_lr_factor=1.0,
        optimizer=replace(base.optimizer, lr=base.optimizer.lr * factor),
    )


def posttrain(base: TrainConfig) -> TrainConfig:
    """A tenth of the tokens at a tenth of the learning rate, with the caches of serving."""
    return replace(
        base,
        tokens=max(base.tokens // 10, base.batch_tokens),
        warmup_tokens=0,
        hold_tokens=0,
        tail_tokens=0,
        numerics="bf16qat" if base.numerics.startswith("bf16") else "f32qat",
        restrict_candidates=True,
        optimizer=replace(base.optimizer, lr=base.optimizer.lr / 10),
    )


RECIPES: Mapping[str, Callable[[TrainConfig], TrainConfig]] = {
    "pretrain": pretrain,
    "extend": extend,
    "posttrain": posttrain,
}


def without_restriction(model: ModelConfig) -> ModelConfig:
    """The same model with a candidate pool that holds every entry."""
    blocks = -(-model.max_position // model.indexer.block_size)
    return replace(model, indexer=replace(model.indexer, candidate_blocks=blocks))


def check_names(names: Sequence[str]) -> None:
    """Raise ConfigError unless these are stages, each once."""
    problems = [
        f"there is no stage {name!r}; choose from {', '.join(RECIPES)}"
        for name in names
        if name not in RECIPES
    ]
    problems += [f"stage {name!r} occurs twice" for name in set(names) if names.count(name) > 1]
    if not names:
        problems.append(f"no stage is named; choose from {', '.join(RECIPES)}")
    if problems:
        raise ConfigError("stages", problems)


def num_steps(stages: Sequence[Stage]) -> int:
    """Steps of the whole run."""
    return sum(stage.train.num_steps for stage in stages)


def num_tokens(stages: Sequence[Stage]) -> int:
    """Tokens of the whole run, in whole batches."""
    return sum(stage.train.num_steps * stage.train.batch_tokens for stage in stages)


def num_image_tokens(stages: Sequence[Stage]) -> int:
    """Those of ``num_tokens`` that are kept for image-text samples, in a run that has some."""
    return sum(stage.train.num_steps * stage.train.image_tokens for stage in stages)


def place_of(stages: Sequence[Stage], step: int) -> Place:
    """Stage of a step, counted from the start of the run."""
    tokens = 0
    for number, stage in enumerate(stages):
        if step < stage.train.num_steps:
            return Place(number, stage, step, tokens + step * stage.train.batch_tokens)
        step -= stage.train.num_steps
        tokens += stage.train.num_steps * stage.train.batch_tokens
    raise AssertionError(f"step {step} behind the end of the run")
