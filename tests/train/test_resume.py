"""Resuming is exact: the same losses to the last bit, whatever ended the run."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

from openv41.config import NUMERICS
from openv41.errors import CheckpointError, ConfigError, InputError
from openv41.io.checkpoint import load_model
from openv41.train.checkpoint import FOLDER, Checkpoints, has_run
from openv41.train.config import OptimizerConfig
from openv41.train.loop import StoppedError, Trainer
from openv41.train.metrics import LOG_FILE
from openv41.train.stages import Stage
from openv41.train.token_shards import prepare_shards
from tests.conftest import REPOSITORY
from tests.train.runs import changed, mini_run, read_log

pytestmark = pytest.mark.unchecked

CHILD = """
import sys
from pathlib import Path
from openv41.train.loop import Trainer
from openv41.train.token_shards import TokenShards
from tests.train.runs import mini_run
data, out, steps = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
run = mini_run(TokenShards(data), out, heldout=data, tokens=steps * 32)
Trainer(run, resume=out.exists()).fit()
"""


@pytest.fixture(scope="module")
def shards(text_files, text_tokenizer, tmp_path_factory):
    return prepare_shards(text_files, text_tokenizer, tmp_path_factory.mktemp("run") / "data")


def start_child(shards, out, steps):
    command = [sys.executable, "-c", CHILD, str(shards.folder), str(out), str(steps)]
    path = os.pathsep.join([str(REPOSITORY / "src"), str(REPOSITORY)])
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"})


def stop_after(trainer, step):
    def report(record):
        if record.step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(StoppedError):
        trainer.fit(report)


def same_models(a, b):
    after = b.state_dict()
    return all(torch.equal(value, after[name]) for name, value in a.state_dict().items())


def test_a_resumed_run_equals_one_that_was_never_stopped(shards, tmp_path):
    whole = Trainer(mini_run(shards, tmp_path / "whole", heldout=shards.folder), resume=False)
    whole.fit()
    run = replace(whole.run, out=tmp_path / "parts")
    stop_after(Trainer(run, resume=False), 2)
    resumed = Trainer(run, resume=True)
    assert 2 <= resumed.step < 6
    resumed.fit()
    assert read_log(tmp_path / "parts") == read_log(tmp_path / "whole")
    assert same_models(whole.model, resumed.model)
    assert [f.name for f in sorted((tmp_path / "parts" / FOLDER).iterdir())] == [
        "step-000000004.safetensors", "step-000000006.safetensors",
    ]  # fmt: skip


@pytest.mark.shapes
def test_a_finished_run_is_written_again_and_not_trained(shards, tmp_path):
    run = mini_run(shards, tmp_path / "out", tokens=64)
    first = Trainer(run, resume=False)
    folder = first.fit()
    (folder / "config.json").unlink()
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    for file in folder.iterdir():
        file.unlink()
    again = Trainer(run, resume=True)
    again.fit(lambda record: pytest.fail(f"trained {record}"))
    assert (folder / "config.json").is_file()
    assert same_models(first.model, again.model)


def test_a_damaged_checkpoint_falls_back_to_the_one_before_it(shards, tmp_path, caplog):
    run = mini_run(shards, tmp_path / "out", tokens=128)
    Trainer(run, resume=False).fit()
    older, newest = sorted((run.out / FOLDER).iterdir())
    newest.write_bytes(newest.read_bytes()[:-100])
    assert Checkpoints(run.out).newest().step == 2
    assert "step-000000004.safetensors cannot be read" in caplog.text
    older.write_bytes(b"")
    with pytest.raises(CheckpointError, match="no checkpoint can be read"):
        Checkpoints(run.out).newest()


@pytest.mark.parametrize("place", ["a weight", "a moment", "the random state", "the description"])
def test_one_wrong_bit_is_noticed(shards, tmp_path, caplog, place):
    run = mini_run(shards, tmp_path / "out", tokens=128)
    Trainer(run, resume=False).fit()
    newest = sorted((run.out / FOLDER).iterdir())[-1]
    content = bytearray(newest.read_bytes())
    header_size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + header_size])
    names = {
        "a weight": "model.head.weight",
        "a moment": "optimizer.head.weight.momentum",
        "the random state": "rng",
    }
    if place in names:
        first, last = header[names[place]]["data_offsets"]
        content[8 + header_size + (first + last) // 2] ^= 1
    else:
        content[content.index(b"seed") + 8] ^= 1  # 3 becomes 2
    newest.write_bytes(content)
    assert Checkpoints(run.out).newest().step == 2
    assert "step-000000004.safetensors cannot be read (its checksum is another)" in caplog.text


def test_resume_before_the_first_checkpoint_starts_anew(shards, tmp_path, caplog):
    (tmp_path / LOG_FILE).write_text("")
    trainer = Trainer(mini_run(shards, tmp_path), resume=True)
    assert trainer.step == 0
    assert "holds no checkpoint yet" in caplog.text
    assert not has_run(tmp_path)


def test_nothing_to_resume_is_an_error(shards, tmp_path):
    run = mini_run(shards, tmp_path / "out")
    with pytest.raises(InputError, match=r"out holds no run to resume: there is no such folder"):
        Trainer(run, resume=True)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("")
    message = r"out holds no run to resume: there is no log\.jsonl and no resume/step-\*; .*"
    with pytest.raises(InputError, match=message + "leave out --resume"):
        Trainer(run, resume=True)


def test_another_run_is_refused_and_the_differences_named(shards, tmp_path, text_tokenizer):
    run = mini_run(shards, tmp_path / "out", tokens=64)
    Trainer(run, resume=False).fit()
    text = tmp_path / "other.txt"
    text.write_text("Other words than those. " * 30)
    other = prepare_shards([text], text_tokenizer, tmp_path / "other")
    model = replace(run.model, moe=replace(run.model.moe, route_scale=2.0))
    differing = changed(
        replace(run, data=other.folder, model=model), optimizer=OptimizerConfig(lr=0.5)
    )
    with pytest.raises(ConfigError, match="cannot be resumed: it is another run: 3") as caught:
        Trainer(differing, resume=True)
    message = str(caught.value)
    assert "data: the run has '" in message
    assert "stages.pretrain.optimizer.lr: the run has 0.001, now it is 0.5" in message
    assert "model.moe.route_scale: the run has 1.5, now it is 2.0" in message


@pytest.mark.parametrize("about", ['"text"', "[]", '{"files": []}'])
def test_a_folder_that_says_nonsense_of_itself_is_passed_over(tmp_path, about, caplog):
    folder = tmp_path / FOLDER / "step-000000002.dcp"
    folder.mkdir(parents=True)
    (folder / "about.json").write_text(about)
    with pytest.raises(CheckpointError, match="no checkpoint can be read"):
        Checkpoints(tmp_path).newest()
    assert "trying the one before it" in caplog.text


def test_a_full_disk_leaves_the_older_checkpoint(shards, tmp_path, monkeypatch):
    run = mini_run(shards, tmp_path / "out", tokens=128)
    trainer = Trainer(run, resume=False)

    def fail(*_):
        raise OSError(28, "No space left on device")

    def report(record):
        if record.step == 3:
            monkeypatch.setattr("openv41.train.checkpoint.save_file", fail)

    with pytest.raises(
        CheckpointError, match=r"No space left.*the one before it, if there is one, is still good"
    ):
        trainer.fit(report)
    assert Checkpoints(run.out).newest().step == 2
    assert [f.name for f in (run.out / FOLDER).iterdir()] == ["step-000000002.safetensors"]


def killed_and_resumed(shards, out, steps, kills, delay):
    """Kill a run some times at moments that ``delay`` chooses, then let it end."""
    for _ in range(kills):
        child = start_child(shards, out, steps)
        deadline = time.monotonic() + 120
        before = {f.name for f in (out / FOLDER).glob("step-*")}
        while child.poll() is None and time.monotonic() < deadline:
            if {f.name for f in (out / FOLDER).glob("step-*")} - before:
                break
            time.sleep(0.01)
        time.sleep(delay())
        child.kill()
        child.wait()
    child = start_child(shards, out, steps)
    assert child.wait(timeout=300) == 0


@pytest.mark.slow
def test_kill_9_and_resume_gives_the_same_losses(shards, tmp_path):
    killed_and_resumed(shards, tmp_path / "killed", 8, 1, lambda: 0.05)
    assert start_child(shards, tmp_path / "whole", 8).wait(timeout=300) == 0
    assert read_log(tmp_path / "killed") == read_log(tmp_path / "whole")
    compare_files(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.prove
def test_twenty_kills_at_random_moments(shards, tmp_path, record_proof):
    pick = random.Random(1)
    killed_and_resumed(shards, tmp_path / "killed", 50, 20, lambda: pick.uniform(0, 0.5))
    assert start_child(shards, tmp_path / "whole", 50).wait(timeout=300) == 0
    assert read_log(tmp_path / "killed") == read_log(tmp_path / "whole")
    compare_files(tmp_path / "killed", tmp_path / "whole")
    record_proof(kills=20, steps=50, equal_losses=50)


def compare_files(a, b):
    """The last state and the written model agree byte for byte."""
    for folder in (FOLDER, "checkpoint"):
        names = sorted(f.name for f in (a / folder).iterdir())
        assert names == sorted(f.name for f in (b / folder).iterdir())
        for name in names:
            assert (a / folder / name).read_bytes() == (b / folder / name).read_bytes(), name


STAGES = ("pretrain", "posttrain")


def two_stages(run):
    """Two steps with exact caches, three with rounded ones, on longer sequences."""
    [first] = run.stages
    train = replace(first.train, tokens=64, checkpoint_steps=100)
    longer = replace(train, tokens=96, numerics="f32qat", sequence_length=32)
    both = (train, longer)
    stages = tuple(Stage(name=n, train=t) for n, t in zip(STAGES, both, strict=True))
    return replace(run, stages=stages)


@pytest.mark.parametrize("stop", [1, 2, 4])
def test_a_run_goes_on_across_its_stages(shards, tmp_path, stop):
    """Momenta are kept where the stage changes; a resumed run takes the same steps."""
    whole = Trainer(two_stages(mini_run(shards, tmp_path / "whole")), resume=False)
    whole.fit()
    part = Trainer(two_stages(mini_run(shards, tmp_path / "part")), resume=False)
    part.run.out.mkdir()
    for _ in range(stop):
        part._advance()
    part.save()
    resumed = Trainer(part.run, resume=True)
    assert resumed.stage.name == STAGES[stop > 2]  # the stage that wrote the state
    resumed.fit()
    want = read_log(tmp_path / "whole")
    assert read_log(tmp_path / "part") == want[stop:]
    assert [r["stage"] for r in want] == ["pretrain"] * 2 + ["posttrain"] * 3
    assert [r["tokens"] for r in want] == [32, 64, 96, 128, 160]
    assert resumed.model.numerics == NUMERICS["f32qat"]
    after = whole.model.state_dict()
    assert all(torch.equal(v, after[n]) for n, v in resumed.model.state_dict().items())


def test_a_stage_changes_what_it_says(shards, tmp_path):
    """The second stage rounds the caches: its losses are others than without it."""
    run = two_stages(mini_run(shards, tmp_path / "rounded"))
    Trainer(run, resume=False).fit()
    exact = replace(run.stages[1], train=replace(run.stages[1].train, numerics="f32"))
    Trainer(replace(run, out=tmp_path / "exact", stages=(run.stages[0], exact)), resume=False).fit()
    rounded, plain = read_log(tmp_path / "rounded"), read_log(tmp_path / "exact")
    assert [r["loss"] for r in rounded[:2]] == [r["loss"] for r in plain[:2]]
    assert all(a["loss"] != b["loss"] for a, b in zip(rounded[2:], plain[2:], strict=True))


def test_the_export_is_the_model_that_was_asked_for(shards, tmp_path):
    """A stage may train it with another candidate pool; its configuration is not the model's."""
    run = changed(mini_run(shards, tmp_path / "out", tokens=64), restrict_candidates=False)
    trainer = Trainer(run, resume=False)
    assert trainer.model.config != run.model
    folder = trainer.fit()
    loaded = load_model(folder)
    assert loaded.config == run.model
    after = trainer.model.state_dict()
    assert all(torch.equal(v, after[n]) for n, v in loaded.state_dict().items())
    assert torch.equal(loaded.token_map, trainer.model.token_map)
