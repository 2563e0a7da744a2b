"""Stage "dspark" as a part of a run, and from a checkpoint with and without a drafter."""

from dataclasses import replace

import pytest
import torch

from openv41.errors import ConfigError
from openv41.io.checkpoint import load_model
from openv41.presets import tiny, with_drafter
from openv41.train.config import DraftConfig, TrainConfig
from openv41.train.loop import Trainer
from openv41.train.recipes import configure, without_data
from openv41.train.stages import DRAFT_STAGE, RECIPES, Stage, check_names
from openv41.train.token_shards import prepare_shards
from tests.train.runs import mini_run, read_log


@pytest.fixture(scope="module")
def shards(text_files, text_tokenizer, tmp_path_factory):
    return prepare_shards(text_files, text_tokenizer, tmp_path_factory.mktemp("run") / "data")


def drafting_run(shards, out, *, heldout=None, base=None, names=("pretrain", DRAFT_STAGE)):
    run = mini_run(shards, out, heldout=heldout, tokens=64, draft=DraftConfig(anchors=4))
    [stage] = run.stages
    stages = tuple(Stage(name=name, train=RECIPES[name](stage.train)) for name in names)
    return replace(run, model=with_drafter(run.model), stages=stages, base=base)


def without_drafter(model):
    return {n: p for n, p in model.named_parameters() if not n.startswith("drafter.")}


def test_a_drafter_follows_pretraining(shards, tmp_path):
    run = drafting_run(shards, tmp_path / "run", heldout=shards.folder)
    folder = Trainer(run, resume=False).fit()
    records = read_log(tmp_path / "run")
    assert [r["stage"] for r in records] == ["pretrain", "pretrain", DRAFT_STAGE]
    assert all("draft" not in r for r in records[:2])
    last = records[-1]
    assert len(last["draft"]["acceptance"]) == len(last["heldout_draft"]["auroc"]) == 5
    assert 1 < last["heldout_draft"]["tau"] < 6
    assert "heldout_bits_per_byte" not in last
    assert sum(share for *_, share in last["heldout_draft"]["reliability"]) == pytest.approx(1)
    trained = load_model(folder, dtype=torch.float32)
    assert trained.config == run.model
    second = drafting_run(shards, tmp_path / "more", base=folder, names=(DRAFT_STAGE,))
    again = load_model(Trainer(second, resume=False).fit(), dtype=torch.float32)
    for name, value in without_drafter(again).items():
        assert torch.equal(value, trained.get_parameter(name)), name
    assert not torch.equal(again.drafter.main_proj.weight, trained.drafter.main_proj.weight)


@pytest.mark.gpu
def test_a_drafter_learns_on_a_gpu(shards, tmp_path):
    cpu = drafting_run(shards, tmp_path / "cpu", heldout=shards.folder)
    gpu = replace(cpu, out=tmp_path / "gpu", device=torch.device("cuda"))
    torch.use_deterministic_algorithms(False)
    for run in (cpu, gpu):
        Trainer(run, resume=False).fit()
    losses = [[r["loss"] for r in read_log(run.out)] for run in (cpu, gpu)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


def test_a_checkpoint_without_a_drafter_gets_one(shards, tmp_path):
    plain = mini_run(shards, tmp_path / "plain", tokens=64)
    base = Trainer(plain, resume=False).fit()
    run = drafting_run(shards, tmp_path / "run", base=base, names=(DRAFT_STAGE,))
    trained = load_model(Trainer(run, resume=False).fit(), dtype=torch.float32)
    before = load_model(base, dtype=torch.float32)
    assert before.drafter is None
    assert trained.drafter is not None
    for name, value in without_drafter(trained).items():
        assert torch.equal(value, before.get_parameter(name)), name


def test_a_drafter_in_about_the_released_proportions():
    dspark = with_drafter(tiny()).dspark
    assert (dspark.num_stages, dspark.block_size) == (3, 5)
    assert dspark.target_layer_ids == (5, 6, 7)
    assert dspark.noise_token_id == tiny().pad_token_id
    assert with_drafter(with_drafter(tiny())) == with_drafter(tiny())


def test_a_weight_gives_a_model_its_drafter(shards):
    for settings, has_drafter in (["draft.weight=1"], True), (["draft.weight=0"], False):
        model, _, _ = configure("tiny", shards.folder, settings)
        explained, _ = without_data("tiny", settings)
        assert [found.dspark is not None for found in (model, explained)] == [has_drafter] * 2
    with pytest.raises(ConfigError, match=r"draft\.weight is 'lots', must be a number"):
        configure("tiny", shards.folder, ["draft.weight=lots"])


def test_encoders_are_made_without_drafts():
    both = replace(TrainConfig(), draft=DraftConfig(weight=2.0))
    weights = {name: RECIPES[name](both).draft.weight for name in RECIPES}
    assert weights == dict.fromkeys(RECIPES, 2.0) | {"vision": 0.0, "vision-lm": 0.0}


def test_a_drafter_needs_a_trained_model():
    with pytest.raises(ConfigError, match="begins with dspark"):
        check_names((DRAFT_STAGE,))
    check_names((DRAFT_STAGE,), has_base=True)
    check_names(("pretrain", DRAFT_STAGE))
