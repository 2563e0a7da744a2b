"""Mixes of stages, starting points, teachers and processes that a run cannot be made of."""

from collections.abc import Sequence

from openv41.errors import ConfigError
from openv41.train.processes import Processes
from openv41.train.stages import Stage

SUPPORTED = (
    "supported: in one process all of it, but LoRA, teachers and a checkpoint to start from only "
    "without the stages vision and vision-lm; in several processes all stages but vision, from "
    "random weights or a checkpoint"
)


def check_mixes(
    stages: Sequence[Stage], processes: Processes, *, has_base: bool, has_teachers: bool
) -> None:
    """Raise ConfigError, with what is supported, for a mix that is not."""
    count, problems = processes.size, []
    if count > 1 and any(stage.is_contrastive for stage in stages):
        problems.append(
            f"vision compares each image with all texts of its batch, in one process, not in "
            f"{count}; leave the stage out, or start the run without torchrun"
        )
    if count > 1 and any(stage.train.lora.rank for stage in stages):
        problems.append(
            f"lora.rank is set: an adapter is trained in one process, not in {count}; start the "
            "run without torchrun"
        )
    if count > 1 and has_teachers:
        problems.append(
            f"there are teachers, which stand beside the student in one process, not in {count}; "
            "start the run without torchrun"
        )
    making = " and ".join(stage.name for stage in stages if stage.makes_encoder)
    if making and has_base:
        problems.append(
            f"{making} would make another encoder than the checkpoint's; leave out {making}, or "
            "--from"
        )
    if making and has_teachers:
        problems.append(
            f"the model of {making} is dropped and nobody's student; leave out {making}, or "
            "--teacher"
        )
    if has_teachers and all(stage.trains_drafter for stage in stages):
        problems.append(
            "a drafter learns from the model that it drafts for, not from a teacher; leave out "
            "--teacher"
        )
    if problems:
        problems[-1] += f"; {SUPPORTED}"
        raise ConfigError("stages", problems)
