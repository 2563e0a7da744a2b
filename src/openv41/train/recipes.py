"""From a preset or a checkpoint, and settings, to the model and the run. Report §2.5."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from jaxtyping import Int
from torch import Tensor

from openv41.config import ModelConfig
from openv41.errors import ConfigError, DataError
from openv41.io.engram_map import token_map_for
from openv41.io.hf_config import read_config
from openv41.io.token_classes import compress_vocabulary
from openv41.io.tokenizer import TextTokenizer, load_tokenizer
from openv41.ngram_hash_constants import table_rows
from openv41.presets import preset, with_drafter, with_vocabulary
from openv41.prompt.tokens import IMAGE
from openv41.train.config import TrainConfig
from openv41.train.overrides import apply_settings, field_paths, parse_settings, unknown_path
from openv41.train.stages import DRAFT_STAGE, ENCODER_STAGES, RECIPES, Stage, check_names
from openv41.train.token_shards import require_index

FROM_TOKENIZER = ("vocab_size", "engram.compressed_vocab_size")
NO_TOKEN = 129264  # the released image token, outside any small vocabulary
TABLE_ROWS = "engram.num_embeddings"  # follows from the other Engram settings


def configure(
    source: str | Path,
    data: Path,
    settings: Iterable[str],
    *,
    stages: Sequence[str] = ("pretrain",),
    images: bool = False,
) -> tuple[ModelConfig, tuple[Stage, ...], Int[Tensor, " V"] | None]:
    """Model and run of a preset's name, or of a checkpoint's folder to start from.

    ``settings`` are ``key=value`` words; those of the model start with ``model.``, those of one
    stage with its name, and all others are the base of every stage. The drafter is left out unless
    a stage trains it, and so is a preset's vision encoder unless there are ``images`` to train on.
    A checkpoint decides the model, but for a drafter that it lacks, and the data must have been
    made with its tokenizer.
    """
    check_names(stages, has_base=isinstance(source, Path))
    require_index(data)
    tokenizer, changes = load_tokenizer(data), parse_settings(settings)
    if isinstance(source, Path):
        model = _of_checkpoint(source, data, tokenizer, images=images)
        has_own = model.dspark is not None
        model = _drafting(model, stages, changes)
        _refuse_model_settings(changes, lacks_drafter=not has_own and model.dspark is not None)
    else:
        model = _drafting(_of_preset(source, tokenizer, images=images), stages, changes)
    model, base = _apply(_common(changes), model, TrainConfig())
    made = make_stages(stages, base, changes)
    problems = _problems(made, model, images=images)
    if made[0].train.lora.rank and not isinstance(source, Path):
        problems.append("lora.rank is set; name the checkpoint that the adapter is for with --from")
    if problems:
        raise ConfigError("train", problems)
    return model, made, token_map_for(data, model) if model.engram else None


def make_stages(
    names: Sequence[str], base: TrainConfig, changes: Mapping[str, str]
) -> tuple[Stage, ...]:
    """Each stage's recipe over the base, then the settings that start with its name."""
    idle = {key: key.partition(".")[0] for key in changes}
    problems = [
        f"{key} is a setting of stage {stage}, which is not among the stages of the run "
        f"({', '.join(names)}); name it in --stages"
        for key, stage in idle.items()
        if stage in RECIPES and stage not in names
    ]
    if problems:
        raise ConfigError("--set", problems)
    return tuple(_stage(name, base, changes, names[:n]) for n, name in enumerate(names))


def _problems(stages: Sequence[Stage], model: ModelConfig, *, images: bool) -> list[str]:
    """What the stages cannot do with this model and data."""
    problems, first = [], stages[0].train
    for name, train in ((stage.name, stage.train) for stage in stages):
        if train.sequence_length > model.max_position:
            problems.append(
                f"{name}.sequence_length is {train.sequence_length}, the model allows "
                f"{model.max_position} (model.max_position)"
            )
        if name in ENCODER_STAGES and not images:
            problems.append(f"stage {name} learns from images; give image-text shards, --images")
        if name in ENCODER_STAGES and train.draft.weight:
            problems.append(
                f"{name}.draft.weight is {train.draft.weight}, must be 0: the model of {name} has "
                "no drafter"
            )
        if name == "vision" and train.micro_batch_tokens:
            problems.append(
                f"vision.micro_batch_tokens is {train.micro_batch_tokens}, must be 0: the loss "
                "compares all pairs of a batch"
            )
        if train.lora.rank and train.draft.weight:
            problems.append(
                f"{name}.draft.weight is {train.draft.weight}, and lora.rank is set: beside an "
                "adapter the drafter rests too; set draft.weight=0"
            )
        if train.lora != first.lora:
            problems.append(
                f"{name}.lora differs from that of {stages[0].name}; all stages train one adapter"
            )
        if train.lora.rank and train.freeze_vision:
            problems.append(
                f"{name}.freeze_vision is true, and lora.rank is set: beside an adapter the whole "
                "model rests; leave out freeze_vision"
            )
    return problems


def _of_preset(name: str, tokenizer: TextTokenizer, *, images: bool) -> ModelConfig:
    """A preset's model for a tokenizer, which decides its vocabulary."""
    num_classes = len(set(compress_vocabulary(tokenizer.backend)))
    model = _with_images(preset(name), name, tokenizer) if images else _text_only(preset(name))
    return with_vocabulary(
        model, vocab_size=tokenizer.vocab_size, compressed_vocab_size=num_classes
    )


def _of_checkpoint(
    folder: Path, data: Path, tokenizer: TextTokenizer, *, images: bool
) -> ModelConfig:
    """A checkpoint's model."""
    model, own = read_config(folder), load_tokenizer(folder)
    if own.sha256 != tokenizer.sha256:
        raise DataError(
            f"{data} was prepared with the tokenizer of sha256 {tokenizer.sha256}, {folder} has "
            f"{own.sha256}; prepare the text with --tokenizer {folder}"
        )
    if images and model.vision is None:
        raise ConfigError("train", [f"{folder} has no vision encoder; leave out --images"])
    return model


def _drafting(model: ModelConfig, stages: Sequence[str], changes: Mapping[str, str]) -> ModelConfig:
    """A model with its drafter where a stage trains one, else without."""
    return with_drafter(model) if _drafts(stages, changes) else replace(model, dspark=None)


def _drafts(stages: Sequence[str], changes: Mapping[str, str]) -> bool:
    """Whether a stage trains a drafter; a weight that is no number is refused where it is set."""
    weights = [text for path, text in changes.items() if path.endswith("draft.weight")]
    return DRAFT_STAGE in stages or any(map(_is_weight, weights))


def _is_weight(text: str) -> bool:
    try:
        return float(text) != 0
    except ValueError:
        return False


def _refuse_model_settings(changes: Iterable[str], *, lacks_drafter: bool) -> None:
    """A checkpoint's model is what it is; only a drafter that it lacks can still be chosen."""
    problems = [
        f"{path} follows from the checkpoint"
        for path in changes
        if _is_model(path) and not (lacks_drafter and path.startswith("model.dspark."))
    ]
    if problems:
        raise ConfigError("train", problems)


def _common(changes: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in changes.items() if k.partition(".")[0] not in RECIPES}


def _stage(
    name: str, base: TrainConfig, changes: Mapping[str, str], before: Sequence[str]
) -> Stage:
    prefix = f"{name}."
    own = {k.removeprefix(prefix): v for k, v in changes.items() if k.startswith(prefix)}
    train = apply_settings(RECIPES[name](base), own, prefix=prefix)
    if train.freeze_vision is None:
        train = replace(train, freeze_vision=any(other in ENCODER_STAGES for other in before))
    return Stage(name=name, train=train)


def without_data(
    name: str, settings: Iterable[str], *, stages: Sequence[str] = ("pretrain",)
) -> tuple[ModelConfig, tuple[Stage, ...]]:
    """Model and stages of a preset with its stand-in vocabulary."""
    check_names(stages)
    changes = parse_settings(settings)
    model = preset(name)
    if _drafts(stages, changes):
        model = with_drafter(model)
    model, base = _apply(_common(changes), model, TrainConfig())
    return model, make_stages(stages, base, changes)


def _apply(
    changes: Mapping[str, str], model: ModelConfig, train: TrainConfig
) -> tuple[ModelConfig, TrainConfig]:
    """Both with the settings; those of the model start with ``model.``."""
    _check_paths(changes, model, train)
    model_changes = {k.removeprefix("model."): v for k, v in changes.items() if _is_model(k)}
    train_changes = {k: v for k, v in changes.items() if not _is_model(k)}
    model = _fit_table(apply_settings(model, model_changes, prefix="model."))
    return model, apply_settings(train, train_changes)


def _text_only(model: ModelConfig) -> ModelConfig:
    """Without image parts, and with no token that stands for an image."""
    return replace(model, vision=None, image_token_id=NO_TOKEN)


def _with_images(model: ModelConfig, name: str, tokenizer: TextTokenizer) -> ModelConfig:
    if model.vision is None:
        raise ConfigError("train", [f"preset {name} has no vision encoder; leave out --images"])
    vocab_size = max(model.vocab_size, tokenizer.vocab_size)
    token = tokenizer.special_id(IMAGE)
    return replace(model, vocab_size=vocab_size, image_token_id=token)


def _is_model(path: str) -> bool:
    return path.startswith("model.")


def _check_paths(changes: Iterable[str], model: ModelConfig, train: TrainConfig) -> None:
    fixed = {f"model.{path}" for path in (*FROM_TOKENIZER, TABLE_ROWS)}
    known = [*field_paths(train), *(f"model.{path}" for path in field_paths(model))]
    known = [path for path in known if path not in fixed]
    problems = [f"{path} follows from other settings" for path in changes if path in fixed]
    problems += [unknown_path(path, known) for path in changes if path not in {*known, *fixed}]
    if problems:
        raise ConfigError("--set", problems)


def _fit_table(model: ModelConfig) -> ModelConfig:
    """Give the n-gram tables the rows that their hash needs."""
    if model.engram is None:
        return model
    return replace(model, engram=replace(model.engram, num_embeddings=table_rows(model.engram)))
