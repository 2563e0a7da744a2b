"""A vision encoder that was made before rests until the learning rate decays."""

from dataclasses import replace

import pytest
import torch

from openv41.train.config import OptimizerConfig, TrainConfig
from openv41.train.freezing import is_frozen
from openv41.train.loop import Trainer
from openv41.train.recipes import make_stages
from tests.train.image_runs import seeing_run
from tests.train.runs import read_log

# Middles of the six steps: 48, 144, 240, 336, ...; the decay begins at 288 tokens.
PHASES = {"warmup_tokens": 96, "hold_tokens": 192, "freeze_vision": True}
RESTING = 3  # steps


@pytest.fixture(scope="module")
def run(image_text, image_shards, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "out"
    own = {"optimizer": OptimizerConfig(lr=1e-2), "update_rms_steps": 1, **PHASES}
    return seeing_run(image_text, image_shards, out, **own)


def is_inside(name):
    """Whether a parameter belongs to the encoder, its final norm aside."""
    return name.startswith("vision.encoder.") and name != "vision.encoder.norm.weight"


def test_the_encoder_rests_until_the_decay(run):
    trainer = Trainer(run, resume=False)
    model, state = trainer.model, trainer.optimizer.state
    inside = {n: p for n, p in model.named_parameters() if is_inside(n)}
    outside = {
        n: p for n, p in model.named_parameters() if n.startswith("vision.") and n not in inside
    }
    assert len(inside) == 10
    wants, norm = [], model.vision.encoder.norm
    norm.register_forward_pre_hook(lambda _, given: wants.append(given[0].requires_grad))
    assert {"vision.encoder.norm.weight", "vision.projector.w1.weight"} <= set(outside)
    for step in range(6):
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        record = trainer._advance()
        rests = step < RESTING
        for name, parameter in inside.items():
            assert torch.equal(parameter, before[name]) == rests, (step, name)
            assert bool(state(parameter)) != rests, (step, name)  # no momentum of a weight at rest
        assert not [n for n, p in outside.items() if torch.equal(p, before[n])], step
        groups = [name for name in record.update_rms if name.startswith("vision encoder")]
        assert bool(groups) != rests
    # At rest autograd keeps nothing of what comes before the final norm.
    assert wants == [False] * RESTING + [True] * 3


def test_without_the_setting_it_learns_at_once(run):
    trainer = Trainer(run, resume=False)
    for free in (False, None):
        config = TrainConfig(**{**PHASES, "tokens": 8192, "freeze_vision": free})
        assert not is_frozen(config, 0)
    assert is_frozen(trainer.train, RESTING - 1)
    assert not is_frozen(trainer.train, RESTING)


@pytest.fixture(scope="module")
def whole(run, tmp_path_factory):
    trainer = Trainer(replace(run, out=tmp_path_factory.mktemp("whole") / "out"), resume=False)
    trainer.fit()
    return trainer


@pytest.mark.parametrize("stop", [2, 3])
def test_a_run_resumed_around_the_boundary_goes_on_alike(run, whole, tmp_path, stop):
    part = Trainer(replace(run, out=tmp_path / "part"), resume=False)
    part.run.out.mkdir()
    for _ in range(stop):
        part._advance()
    part.save()
    resumed = Trainer(part.run, resume=True)
    resumed.fit()
    assert read_log(tmp_path / "part") == read_log(whole.run.out)[stop:]
    after = resumed.model.state_dict()
    assert all(torch.equal(v, after[n]) for n, v in whole.model.state_dict().items())


@pytest.mark.parametrize(
    ("names", "settings", "want"),
    [
        (("pretrain", "extend"), {}, [False, False]),
        (("vision", "vision-lm", "pretrain", "posttrain"), {}, [False, False, True, True]),
        (("vision-lm", "pretrain"), {}, [False, True]),
        (("vision", "pretrain"), {"pretrain.freeze_vision": "false"}, [False, False]),
        (("pretrain",), {"pretrain.freeze_vision": "true"}, [True]),
    ],
)
def test_it_rests_where_a_stage_before_made_it(names, settings, want):
    stages = make_stages(names, TrainConfig(), settings)
    assert [stage.train.freeze_vision for stage in stages] == want
    chosen = make_stages(names, TrainConfig(freeze_vision=False), {})
    assert not any(stage.train.freeze_vision for stage in chosen)


def test_it_never_rests_in_the_stages_behind_pre_training():
    """Their learning rate decays, or has decayed, from their first step on."""
    for stage in make_stages(("vision", "pretrain", "extend", "posttrain"), TrainConfig(), {})[2:]:
        assert stage.train.freeze_vision
        assert not is_frozen(stage.train, 0)
