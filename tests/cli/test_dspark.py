"""``openv41 dspark`` on a checkpoint with a drafter, and who uses what it writes."""

import json

import pytest
from typer.testing import CliRunner

from openv41.cli.main import app
from openv41.config import DsparkConfig
from openv41.engine import profile
from openv41.engine.dspark_files import CALIBRATION_FILE, PROFILE_FILE
from tests.io.tiny_checkpoint import make_checkpoint

TEXT = "To be, or not to be, that is the question. " * 8


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    drafter = DsparkConfig(
        num_stages=1,
        block_size=3,
        noise_token_id=2,
        target_layer_ids=(0, 1),
        markov_rank=4,
        num_experts=2,
        top_k=1,
    )
    folder = tmp_path_factory.mktemp("model")
    (folder / "heldout.txt").write_text(TEXT)
    return make_checkpoint(folder, dspark=drafter)


def run(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def test_calibrate_writes_temperatures_and_draws(checkpoint, tmp_path):
    text, picture = checkpoint.parent / "heldout.txt", tmp_path / "reliability.png"
    sizes = ("--prompts", 4, "--prompt-tokens", 8, "--max-tokens", 24)
    result = run("dspark", "calibrate", checkpoint, "--text", text, "--picture", picture, *sizes)
    assert result.exit_code == 0, result.output
    found = json.loads((checkpoint / CALIBRATION_FILE).read_text())
    assert len(found["temperatures"]) == 3
    assert found["rounds"] > 20
    assert "draft 3: temperature" in result.output
    assert "before" in result.output
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_profile_times_this_machine(checkpoint, monkeypatch):
    monkeypatch.setattr(profile, "TURNS", 1)
    result = run("dspark", "profile", checkpoint, "--most", 3, "--context", 4)
    assert result.exit_code == 0, result.output
    found = json.loads((checkpoint / PROFILE_FILE).read_text())
    assert found["requests"] == [1, 2, 3]
    assert len(found["verify"][0]) == 4
    assert "3 requests:" in result.stderr
    options = ("--prompt", "To be", "--max-tokens", 12, "--temperature", 0)
    drafted, plain = (run("generate", checkpoint, *options, *more) for more in ((), NO))
    assert drafted.exit_code == 0, drafted.output
    assert drafted.stdout == plain.stdout


NO = ("--no-speculation",)


def test_a_checkpoint_without_a_drafter_is_refused(tmp_path):
    folder = make_checkpoint(tmp_path)
    for words in (("calibrate", folder, "--text", folder / "config.json"), ("profile", folder)):
        result = run("dspark", *words)
        assert result.exit_code == 2
        assert "has no drafter" in result.stderr


def test_what_does_not_fit_is_refused(checkpoint, tmp_path):
    text = checkpoint.parent / "heldout.txt"
    result = run("dspark", "calibrate", checkpoint, "--text", text, "--prompts", 10_000)
    assert result.exit_code == 2
    assert "tokens are too few" in result.stderr
    text = tmp_path / "latin-1.txt"
    text.write_bytes("caf\xe9 ".encode("latin-1") * 99)
    result = run("dspark", "calibrate", checkpoint, "--text", text)
    assert result.exit_code == 2
    assert "not UTF-8 text: byte 0xe9 at offset 3" in result.stderr
    result = run("dspark", "profile", checkpoint, "--context", 1 << 20)
    assert result.exit_code == 2
    assert "use shorter ones" in result.stderr
