"""Figures for wandb, through a module that only looks like it."""

import sys
from dataclasses import replace
from types import ModuleType

import pytest

from openv41.errors import InputError
from openv41.train.loop import Trainer
from openv41.train.token_shards import prepare_shards
from openv41.train.wandb_log import WandbLog
from tests.train.runs import mini_run, read_log


class FakeRun:
    def __init__(self, settings):
        self.settings, self.logged, self.finished = settings, [], False

    def log(self, values, step):
        assert not self.finished
        self.logged.append((step, values))

    def finish(self):
        self.finished = True


@pytest.fixture
def fake(monkeypatch):
    module = ModuleType("wandb")
    module.runs, module.Error = [], type("Error", (Exception,), {})

    def init(**settings):
        if settings["project"] == "forbidden":
            raise module.Error("not logged in")
        module.runs.append(FakeRun(settings))
        return module.runs[-1]

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


@pytest.fixture(scope="module")
def run(text_files, text_tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    shards = prepare_shards(text_files, text_tokenizer, folder / "data")
    return mini_run(shards, folder / "out", tokens=64)


def test_wandb_gets_what_the_log_gets(run, fake, tmp_path):
    run = replace(run, out=tmp_path / "my run", wandb="plays")
    trainer = Trainer(run, resume=False)
    trainer.fit()
    [got] = fake.runs
    assert got.finished
    assert (got.settings["project"], got.settings["name"]) == ("plays", "my run")
    assert got.settings["config"] == trainer.description
    assert got.settings["dir"] == str(run.out)
    records = read_log(run.out)
    assert [step for step, _ in got.logged] == [1, 2]
    for (_, values), record in zip(got.logged, records, strict=True):
        assert values["loss"] == record["loss"]
        assert values["losses/text"] == record["losses"]["text"]
        assert values["model_flops_per_second"] > 0
        assert values["balance/text/max_over_mean/0"] >= 1
        assert all(isinstance(value, (int, float)) for value in values.values())
    Trainer(run, resume=True).fit()  # goes on under the same id
    assert fake.runs[1].settings["id"] == got.settings["id"]
    other = replace(run, out=tmp_path / "other")
    Trainer(other, resume=False).fit()
    assert fake.runs[2].settings["id"] != got.settings["id"]


def test_it_is_not_imported_unless_asked(run, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)  # an import would fail
    Trainer(replace(run, out=tmp_path / "out"), resume=False).fit()
    asked = replace(run, out=tmp_path / "asked", wandb="plays")
    with pytest.raises(InputError, match=r"needs the wandb package; pip install .openv41\[wandb\]"):
        Trainer(asked, resume=False).fit()
    Trainer(replace(asked, wandb=None), resume=False).fit()  # the folder holds no run yet


def test_a_project_that_wandb_refuses(fake, tmp_path):
    with pytest.raises(InputError, match="--wandb forbidden: wandb did not begin: not logged in;"):
        WandbLog("forbidden", tmp_path, {})
