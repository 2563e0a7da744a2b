"""Mixes that no run can be made of are refused, all at once and with what is supported."""

from dataclasses import replace

import pytest

from openv41.errors import ConfigError
from openv41.train.config import LoraConfig, TrainConfig
from openv41.train.mixes import check_mixes
from openv41.train.processes import Processes
from openv41.train.stages import Stage

TRAIN = TrainConfig()
ADAPTED = replace(TRAIN, lora=LoraConfig(rank=1))


def problems(*names, train=TRAIN, size=1, base=False, teachers=False):
    stages = [Stage(name=name, train=train) for name in names]
    try:
        check_mixes(stages, Processes(0, size), has_base=base, has_teachers=teachers)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("size", [1, 2])
def test_what_works(size):
    assert not problems("vision-lm", "pretrain", size=size)
    assert not problems("pretrain", "extend", "posttrain", size=size, base=True)
    assert not problems("vision", "vision-lm", "pretrain")
    assert not problems("pretrain", "posttrain", train=ADAPTED, base=True, teachers=True)


def test_what_takes_one_process():
    found = problems("vision", "pretrain", train=ADAPTED, size=3, teachers=True)
    assert "vision compares each image with all texts of its batch, in one process, not in 3" in (
        found
    )
    assert "an adapter is trained in one process, not in 3" in found
    assert "there are teachers, which stand beside the student in one process, not in 3" in found
    assert "supported: in one process all of it" in found


def test_encoders_are_made_for_random_weights():
    found = problems("vision", "vision-lm", "pretrain", base=True, teachers=True)
    assert "vision and vision-lm would make another encoder than the checkpoint's" in found
    assert "the model of vision and vision-lm is dropped and nobody's student" in found
    assert "in one process, not in" not in found


def test_a_teacher_has_nobody_to_teach_where_only_the_drafter_learns():
    assert "a drafter learns from the model that it drafts for" in problems(
        "dspark", base=True, teachers=True
    )
    assert not problems("posttrain", "dspark", base=True, teachers=True)
