"""Distillation: the reverse KL to one or several teachers, over the whole vocabulary.

KL(student || teacher) is summed with the teachers' weights at every position that has a target. A
teacher's hidden states are kept for one part of a batch; its logits are rebuilt through its head
for a few positions at a time, beside the student's (ops/reverse_kl.py).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from openv41 import ops
from openv41.config import ModelConfig
from openv41.errors import ConfigError
from openv41.io.checkpoint import load_model
from openv41.io.hf_config import read_config
from openv41.io.tokenizer import TextTokenizer, load_tokenizer
from openv41.model.causal_encoder_decoder import CausalEncoderDecoder, Head
from openv41.train.packed_batch import PackedBatch
from openv41.train.sample_shards import SampleShards, pixel_settings
from openv41.train.stages import Stage

MOST = 1e6  # of a teacher's weight


@dataclass(frozen=True, slots=True)
class TeacherSpec:
    """A checkpoint to learn from, and how much its KL counts."""

    checkpoint: Path
    weight: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class _Voice:
    """What one teacher says about a batch."""

    model: CausalEncoderDecoder
    weight: float
    hidden: Float[Tensor, "T D"]


class Lesson:
    """What the teachers say about a part of a batch, as hidden states."""

    def __init__(self, voices: Sequence[_Voice]) -> None:
        self._voices = voices

    def loss(
        self, head: Head, hidden: Float[Tensor, "targets D"], rows: Int[Tensor, " targets"]
    ) -> ops.LinearLoss:
        """Weighted sum over the teachers of the student's reverse KL, at these rows of the part."""
        losses = [
            head.reverse_kl(hidden, voice.model.head, voice.hidden[rows]) for voice in self._voices
        ]
        weights = [voice.weight for voice in self._voices]
        pairs = [(w * x.summed, w * x.each) for w, x in zip(weights, losses, strict=True)]
        summed, each = (torch.stack(own).sum(dim=0) for own in zip(*pairs, strict=True))
        return ops.LinearLoss(summed, each)


class Teachers:
    """Frozen models in float32, with exact caches."""

    def __init__(self, models: Sequence[tuple[CausalEncoderDecoder, float]]) -> None:
        self._models = models

    @torch.no_grad()
    def read(self, part: PackedBatch) -> Lesson:
        """Run every teacher on a part of a batch."""
        voices = [
            _Voice(model, own, model(part.for_model(model)).hidden) for model, own in self._models
        ]
        return Lesson(voices)


def parse_teachers(words: Iterable[str]) -> tuple[TeacherSpec, ...]:
    """Teachers from words such as ``DIR`` and ``DIR=0.5``."""
    specs, problems = [], []
    for word in words:
        path, separator, text = word.rpartition("=")
        try:
            weight = float(text) if separator else 1.0
        except ValueError:  # the = belongs to the folder's name
            path, weight = word, 1.0
        specs.append(TeacherSpec(Path(path if separator and path else word), weight))
        if not 0 < weight <= MOST:
            problems.append(f"the weight of {path} is {text}, must be above 0, at most {MOST:.0e}")
    if problems:
        raise ConfigError("--teacher", problems)
    return tuple(specs)


def open_teachers(
    specs: Sequence[TeacherSpec],
    student: ModelConfig,
    stages: Sequence[Stage],
    tokenizer: TextTokenizer,
    *,
    samples: Sequence[SampleShards],
    device: torch.device,
) -> Teachers | None:
    """Load the teachers of a run, None where it has none; ``samples`` are those it trains on.

    Raises ConfigError for those that cannot read what the student reads or have another vocabulary.
    """
    if not specs:
        idle = [s.name for s in stages if not s.train.lm_weight]
        if idle:
            problem = f"lm_weight is 0 in {', '.join(idle)} and there is no --teacher to learn from"
            raise ConfigError("train", [problem])
        return None
    lengths = [max(shards.lengths) for shards in samples]
    longest = max([*lengths, *(stage.train.sequence_length for stage in stages)])
    images = any(shards.index.vision is not None for shards in samples)
    folders = [spec.checkpoint.resolve() for spec in specs]
    problems = [f"{f} is named twice; name it once" for f in set(folders) if folders.count(f) > 1]
    for spec in specs:
        problems += [
            f"{spec.checkpoint}: {problem}"
            for problem in _problems(spec.checkpoint, student, longest, tokenizer, images=images)
        ]
    if problems:
        raise ConfigError("--teacher", problems)
    models = []
    for spec in specs:
        model = load_model(spec.checkpoint, dtype=torch.float32, device=device)
        models.append((model.requires_grad_(False), spec.weight))
    return Teachers(models)


def _problems(
    checkpoint: Path, student: ModelConfig, longest: int, tokenizer: TextTokenizer, *, images: bool
) -> list[str]:
    """Why a checkpoint cannot teach."""
    teacher, problems = read_config(checkpoint), []
    if teacher.vocab_size != student.vocab_size:
        problems.append(
            f"its vocabulary has {teacher.vocab_size} tokens, the student's {student.vocab_size}; "
            "they must be the same"
        )
    elif load_tokenizer(checkpoint).sha256 != tokenizer.sha256:
        problems.append("its tokenizer is another one than that of the data; they must be the same")
    if teacher.max_position < longest:
        problems.append(
            f"it reads {teacher.max_position} tokens, the longest document may have {longest}; "
            "lower sequence_length, or prepare samples with a smaller --max-tokens"
        )
    return problems + (_image_problems(teacher, student) if images else [])


def _image_problems(teacher: ModelConfig, student: ModelConfig) -> list[str]:
    if teacher.vision is None:
        return ["it has no vision encoder; leave out --images"]
    assert student.vision is not None, "images for a student without a vision encoder"
    if pixel_settings(teacher.vision) != pixel_settings(student.vision):
        return ["it takes images of other sizes than the student"]
    if teacher.image_token_id != student.image_token_id:
        ids = f"{teacher.image_token_id}, the student's {student.image_token_id}"
        return [f"its image token is {ids}"]
    return []
