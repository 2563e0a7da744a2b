"""Loss spikes by hand, in the log, and left out."""

import math
from dataclasses import replace

import numpy as np
import pytest

from openv41.train import loop
from openv41.train.config import TrainConfig
from openv41.train.loop import Trainer
from openv41.train.metrics import LOG_FILE
from openv41.train.spikes import SpikeWatch, read_losses
from openv41.train.step import DivergedError
from openv41.train.token_shards import prepare_shards
from tests.train.runs import mini_run, read_log

pytestmark = pytest.mark.unchecked


def test_the_bound_by_hand():
    watch = SpikeWatch(steps=4, factor=3.0)
    for loss in (9.0, 1.0, 2.0, 3.0):
        assert watch.most == math.inf
        watch.add(loss)
    watch.add(6.0)  # the nine is forgotten
    assert watch.most == pytest.approx(3 + 3 * math.sqrt((4 + 1 + 0 + 9) / 4))
    off = SpikeWatch(steps=1, factor=0.0)
    off.add(1.0)
    assert off.most == math.inf


@pytest.fixture(scope="module")
def shards(text_files, text_tokenizer, tmp_path_factory):
    return prepare_shards(text_files, text_tokenizer, tmp_path_factory.mktemp("run") / "data")


SETTINGS = {"tokens": 5 * 32, "spike_steps": 2, "spike_factor": 100.0, "checkpoint_steps": 100}


def spoil(monkeypatch, bad):
    """Let the head forget all in the steps named, as seen by the loss alone."""
    plain = loop.train_step

    def spoiled(model, optimizer, packed, config, step, **more):
        weight = model.head.weight.data
        kept = weight.clone()
        if step in bad:
            weight.mul_(-300)
        try:
            return plain(model, optimizer, packed, config, step, **more)
        finally:
            weight.copy_(kept)

    monkeypatch.setattr(loop, "train_step", spoiled)


def test_a_spike_is_logged(shards, tmp_path, monkeypatch):
    spoil(monkeypatch, {3})
    run = mini_run(shards, tmp_path / "out", **SETTINGS)
    Trainer(run, resume=False).fit()
    records = read_log(run.out)
    assert [r["spike"] for r in records] == [False] * 3 + [True, False]
    assert records[3]["loss"] > records[2]["loss"] + 1


def test_spikes_are_skipped_where_asked_a_few_times(shards, tmp_path, monkeypatch, caplog):
    spoil(monkeypatch, {3})
    run = mini_run(shards, tmp_path / "out", skip_spikes=True, max_skipped_steps=1, **SETTINGS)
    Trainer(run, resume=False).fit()
    records = read_log(run.out)
    assert [r["step"] for r in records] == [1, 2, 3, 5]
    assert [r["skipped"] for r in records] == [0, 0, 0, 1]
    assert "above" in caplog.text
    assert "this batch is skipped" in caplog.text
    spoil(monkeypatch, {2, 3})
    with pytest.raises(DivergedError, match=r"step 4: the loss is .*, above "):
        Trainer(replace(run, out=tmp_path / "often"), resume=False).fit()


def test_noise_and_progress_are_no_spikes():
    """With the default settings, over 3,000 steps of a loss that falls and is noisy."""
    config, noise = TrainConfig(), np.random.default_rng(3)
    watch = SpikeWatch(steps=config.spike_steps, factor=config.spike_factor)
    for step in range(3000):
        loss = 2 + 5 * math.exp(-step / 200) + 0.2 * noise.standard_normal()
        assert loss < watch.most, step
        watch.add(loss)
    assert watch.most < 4


@pytest.mark.shapes
def test_a_run_that_goes_on_remembers_the_losses_of_its_stage(shards, tmp_path):
    run = mini_run(shards, tmp_path / "out", **{**SETTINGS, "tokens": 96})
    first = Trainer(run, resume=False)
    first.fit()
    assert math.isfinite(first.spikes.most)
    again = Trainer(run, resume=True)
    assert again.spikes.most == first.spikes.most
    losses = [r["loss"] for r in read_log(run.out)]
    assert read_losses(run.out / LOG_FILE, "pretrain", 2) == losses[:2]
    assert read_losses(run.out / LOG_FILE, "extend", 3) == []
    assert read_losses(run.out / "nothing", "pretrain", 3) == []
