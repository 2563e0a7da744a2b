"""Stages of a run, each a recipe over its settings. Report §2.1.1, §2.3.2, §2.4.3, §2.4.4.

A vision encoder is made first, if at all: from pairs of images and texts, then attached to a small
language model, which is dropped. Pre-training rounds no cache and restricts no indexer. Context
extension goes on with longer sequences. Post-training does as serving does: it rounds caches, index
keys and experts' weights, restricts the deeper indexers to their candidates and cuts windows behind
a prompt. Stage "dspark" trains the drafter alone; in post-training it may learn beside the model.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from openv41.config import EngramConfig, ModelConfig
from openv41.errors import ConfigError
from openv41.train.config import TrainConfig

ENCODER_STAGES = ("vision", "vision-lm")  # of these models the vision encoder alone goes on
DRAFT_STAGE = "dspark"
# Those that take answers to learn instead of text, where there are any.
SFT_STAGES = ("posttrain", DRAFT_STAGE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A part of a run with settings of its own."""

    name: str
    train: TrainConfig

    @property
    def is_contrastive(self) -> bool:
        """Whether it compares images with texts, where others predict tokens."""
        return self.name == "vision"

    @property
    def makes_encoder(self) -> bool:
        """Whether its model is dropped but for the vision encoder."""
        return self.name in ENCODER_STAGES

    @property
    def trains_drafter(self) -> bool:
        """Whether the drafter alone learns, from a model that rests."""
        return self.name == DRAFT_STAGE

    @property
    def image_tokens(self) -> int:
        """Room for image-text samples in a batch of a run that has some."""
        return self.train.batch_tokens if self.is_contrastive else self.train.image_tokens

    def own_model(self, model: ModelConfig) -> ModelConfig:
        """What the stage trains of a run for ``model``."""
        if self.name == "vision-lm":
            model = small_language_model(model)
        return model if self.train.restrict_candidates else without_restriction(model)


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


def vision(base: TrainConfig) -> TrainConfig:
    """A quarter of the tokens, all of them pairs; the encoder learns as fast as the rest."""
    return replace(_encoder_stage(base), micro_batch_tokens=0)


def vision_lm(base: TrainConfig) -> TrainConfig:
    """A quarter of the tokens, half of them with images; the encoder learns as fast as the rest."""
    return replace(_encoder_stage(base), image_share=0.5)


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
    """A tenth of the tokens at a tenth of the learning rate; caches and windows of serving."""
    return replace(
        base,
        tokens=max(base.tokens // 10, base.batch_tokens),
        warmup_tokens=0,
        hold_tokens=0,
        tail_tokens=0,
        numerics="bf16qat" if base.numerics.startswith("bf16") else "f32qat",
        expert_fp4=True,
        restrict_candidates=True,
        bounded_replay="first_layer_full_window",
        optimizer=replace(base.optimizer, lr=base.optimizer.lr / 10),
    )


def dspark(base: TrainConfig) -> TrainConfig:
    """A quarter of the tokens, for the drafter alone; the model rests and computes as served."""
    tokens = max(base.tokens // 4, base.batch_tokens)
    return replace(
        base,
        tokens=tokens,
        warmup_tokens=tokens // 25,
        hold_tokens=0,
        tail_tokens=0,
        numerics="bf16qat" if base.numerics.startswith("bf16") else "f32qat",
        expert_fp4=True,
        restrict_candidates=True,
        optimizer=replace(base.optimizer, weight_decay=0.0),
        draft=replace(base.draft, weight=base.draft.weight or 1.0),
    )


RECIPES: Mapping[str, Callable[[TrainConfig], TrainConfig]] = {
    "vision": vision,
    "vision-lm": vision_lm,
    "pretrain": pretrain,
    "extend": extend,
    "posttrain": posttrain,
    DRAFT_STAGE: dspark,
}


def _encoder_stage(base: TrainConfig) -> TrainConfig:
    tokens = max(base.tokens // 4, base.batch_tokens)
    return replace(
        base,
        tokens=tokens,
        warmup_tokens=tokens // 20,
        hold_tokens=0,
        tail_tokens=0,
        freeze_vision=False,
        optimizer=replace(base.optimizer, vision_lr_factor=1.0),
        draft=replace(base.draft, weight=0.0),  # these models have no drafter
    )


def without_restriction(model: ModelConfig) -> ModelConfig:
    """The same model with a candidate pool that holds every entry."""
    blocks = -(-model.max_position // model.indexer.block_size)
    return replace(model, indexer=replace(model.indexer, candidate_blocks=blocks))


def small_language_model(model: ModelConfig) -> ModelConfig:
    """The lower half of the layers, under a head of its own."""
    num = -(-model.num_layers // 2)
    sources = tuple(layer for layer in model.kv_sources if layer < num)
    candidate = sources[-1] if sources else model.indexer.candidate_source
    return replace(
        model,
        num_layers=num,
        compress_ratios=model.compress_ratios[:num],
        kv_sources=sources,
        index_sources=tuple(layer for layer in model.index_sources if layer < num),
        indexer=replace(model.indexer, candidate_source=candidate),
        engram=_lower_engrams(model.engram, num),
        dspark=None,
    )


def _lower_engrams(engram: EngramConfig | None, num_layers: int) -> EngramConfig | None:
    """Those of the layers below ``num_layers``, if any."""
    layers = tuple(layer for layer in engram.layer_ids if layer < num_layers) if engram else ()
    if engram is None or not layers:
        return None
    return replace(engram, layer_ids=layers, num_embeddings=engram.num_embeddings[: len(layers)])


def check_names(names: Sequence[str], *, has_base: bool = False) -> None:
    """Raise ConfigError unless these are stages, each once, in an order that works."""
    problems = [
        f"there is no stage {name!r}; choose from {', '.join(RECIPES)}"
        for name in names
        if name not in RECIPES
    ]
    problems += [f"stage {name!r} occurs twice" for name in set(names) if names.count(name) > 1]
    if not names:
        problems.append(f"no stage is named; choose from {', '.join(RECIPES)}")
    making = [name for name in ENCODER_STAGES if name in names]
    if making and list(names[: len(making)]) != making:
        problems.append(
            f"{', '.join(names)}: {' and '.join(making)} must come first, in this order"
        )
    if names and names[0] == DRAFT_STAGE and not has_base:
        problems.append(
            f"the run begins with {DRAFT_STAGE}, which drafts for a model that is trained already; "
            "name its checkpoint with --from, or put pretrain before it"
        )
    if making and names[-1] in making:
        problems.append(
            f"the run ends with {names[-1]}, which makes an encoder for the stages behind it; add "
            "pretrain"
        )
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
    return sum(stage.train.num_steps * stage.image_tokens for stage in stages)


def place_of(stages: Sequence[Stage], step: int) -> Place:
    """Stage of a step, counted from the start of the run."""
    tokens = 0
    for number, stage in enumerate(stages):
        if step < stage.train.num_steps:
            return Place(number, stage, step, tokens + step * stage.train.batch_tokens)
        step -= stage.train.num_steps
        tokens += stage.train.num_steps * stage.train.batch_tokens
    raise AssertionError(f"step {step} behind the end of the run")
