"""Two processes compute what one does: losses, gradients, updates, biases."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from openv41.errors import ConfigError
from openv41.io.checkpoint import load_model
from openv41.train.checkpoint import FOLDER, Checkpoints
from openv41.train.loop import MODEL_FOLDER
from openv41.train.parallel import check_placement
from openv41.train.processes import Processes
from openv41.train.token_shards import prepare_shards
from tests.layers.mini import mini_config
from tests.train.runs import mini_run, read_log
from tests.train.shared_cases import CASES, run_case
from tests.train.shared_runs import go_on

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.dist,
    pytest.mark.unchecked,
    pytest.mark.xdist_group("two processes"),
]


def torchrun(*words, processes=2, options=()):
    """Run a module in several processes of one thread each."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    return subprocess.run(
        [*command, "--standalone", *options, "-m", *map(str, words)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.fixture(scope="module")
def shards(text_files, text_tokenizer, tmp_path_factory):
    return prepare_shards(text_files, text_tokenizer, tmp_path_factory.mktemp("run") / "data")


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    return cases_on("cpu", tmp_path_factory.mktemp("together"))


@pytest.fixture(scope="module")
def on_gpus(tmp_path_factory):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    return cases_on("cuda", tmp_path_factory.mktemp("on gpus"))


def cases_on(device, out):
    """Every case in two processes, in one start of them."""
    done = torchrun("tests.train.shared_cases", out, device)
    assert done.returncode == 0, done.stderr[-3000:]
    return {name: torch.load(out / f"{name}.pt", map_location="cpu") for name in CASES}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_two_processes_compute_what_one_does(together, name):
    compare(run_case(CASES[name], Processes()), together[name])


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_two_gpus_compute_what_one_does(on_gpus, name):
    alone = run_case(CASES[name], Processes(device=torch.device("cuda")))
    compare(alone, on_gpus[name])


def compare(alone, shared):
    """Figures, loads, parameters and buffers, and the score of images."""
    (results, whole, score), (shared_results, found, shared_score) = alone, shared
    assert shared_score == pytest.approx(score, rel=1e-9)
    for one, two in zip(results, shared_results, strict=True):
        for key in ("loss", "losses", "indexer_loss", "balance_loss", "grad_norm", "lr"):
            assert two[key] == pytest.approx(one[key], rel=1e-9), key
        if one["draft"] is not None:
            assert_same_drafts(one["draft"], two["draft"])
        assert two["update_rms"] == pytest.approx(one["update_rms"], rel=1e-6)
        for layer, load in one["loads"].items():
            assert torch.equal(two["loads"][layer].cpu(), load.cpu()), layer
    assert found.keys() == whole.keys()
    for key, value in whole.items():
        torch.testing.assert_close(found[key], value, rtol=1e-6, atol=1e-9, msg=key)


def assert_same_drafts(one, two):
    """Losses, acceptances and confidences of the drafter."""
    assert two.keys() == one.keys()
    for key, value in one.items():
        assert two[key] == pytest.approx(value, rel=1e-8, abs=1e-12), key


def test_a_mix_that_cannot_be_is_refused_with_what_can():
    config = mini_config()
    with pytest.raises(ConfigError, match=r"5 experts .* 2 processes.*supported: "):
        check_placement(config, Processes(size=2), "parallel")
    even = replace(config, moe=replace(config.moe, num_experts=6))
    check_placement(even, Processes(size=2), "parallel")


@pytest.mark.slow
def test_a_run_moves_from_one_process_to_two_and_back(shards, tmp_path, caplog):
    """Checkpoints of both kinds are read by both: 1 -> 2 -> 1 goes on as one process would.

    A damaged folder falls back to the checkpoint before it.
    """
    whole = go_on(mini_run(shards, tmp_path / "whole", heldout=shards.folder, heldout_steps=2), 6)
    out = tmp_path / "moved"
    run = mini_run(shards, out, heldout=shards.folder, heldout_steps=2)
    losses = go_on(run, 2)
    done = torchrun("tests.train.shared_runs", shards.folder, out, 4)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Warning" not in done.stderr  # such as torch's of views that a layer returns
    losses += json.loads((out / "losses.json").read_text())
    names = sorted(path.name for path in (out / FOLDER).iterdir())
    assert names == ["step-000000002.safetensors", "step-000000004.dcp"]
    shutil.copytree(out, tmp_path / "hurt")
    part = next((tmp_path / "hurt" / FOLDER / names[1]).glob("__1_*"))
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    assert Checkpoints(tmp_path / "hurt").newest().step == 2
    assert f"the size or checksum of {part.name} is another" in caplog.text
    losses += go_on(run, 6)
    for one, moved in zip(whole, losses, strict=True):
        assert moved == pytest.approx(one, rel=1e-4)


@pytest.mark.slow
def test_a_process_that_dies_in_a_step_is_started_again(shards, tmp_path):
    """torchrun starts all anew, and the run goes on as one without the accident."""
    (tmp_path / "dies").touch()
    out = tmp_path / "out"
    words = ("tests.train.shared_runs", shards.folder, out, 0)
    done = torchrun(*words, options=("--max-restarts", "1"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert not (tmp_path / "dies").exists()
    assert "Traceback" not in done.stderr or "LostProcessError: another process" in done.stderr
    run = mini_run(shards, tmp_path / "alone", heldout=shards.folder, heldout_steps=2)
    alone = [loss for loss, *_ in go_on(run, 6)]
    assert [record["loss"] for record in read_log(out)] == pytest.approx(alone, rel=1e-4)
    assert load_model(out / MODEL_FOLDER).config.num_layers == 4
