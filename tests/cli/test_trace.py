"""``openv41 trace``, ``compare`` and ``fixture`` from the command line."""

import shutil

import pytest
from typer.testing import CliRunner

from openv41.cli.main import app
from openv41.io.tensor_files import read_metadata, read_tensors

pytestmark = pytest.mark.shapes

SIZES = ("--vocab-size", "64", "--hidden-size", "32", "--num-experts", "2", "--length", "64")


def run(*args):
    return CliRunner().invoke(app, [str(arg) for arg in args])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("cli") / "fixture"
    result = run("fixture", path, "--seed", 1, "--no-outputs", *SIZES)
    assert result.exit_code == 0, result.output
    return path


@pytest.fixture(scope="module")
def traced(folder):
    out = folder.parent / "released.safetensors"
    result = trace(folder, out, "--numerics", "released")
    assert result.exit_code == 0, result.output
    assert result.stdout == ""
    return out


def trace(folder, out, *options):
    inputs = folder / "inputs.safetensors"
    return run("trace", folder / "checkpoint", "--inputs", inputs, "--out", out, *options)


def test_fixture_without_outputs_has_no_measured_rules(folder):
    files = {path.name for path in folder.iterdir()}
    assert files == {"README.md", "checkpoint", "inputs.safetensors"}
    assert "not measured" in (folder / "README.md").read_text()


def test_fixture_refuses_a_used_folder(folder):
    result = run("fixture", folder)
    assert result.exit_code == 2
    assert "is not empty; name a new folder" in result.stderr


def test_trace_says_what_it_is(traced):
    assert read_metadata(traced) == {
        "format": "pt",
        "case": "prefill",
        "numerics": "released",
        "fed": "false",
    }
    assert read_tensors(traced)["logits"].shape == (64, 64)


def test_fed_trace_equals_the_one_that_it_was_fed(folder, traced, tmp_path):
    out = tmp_path / "fed.safetensors"
    result = trace(folder, out, "--numerics", "released", "--feed", traced)
    assert result.exit_code == 0, result.output
    assert read_metadata(out)["fed"] == "true"
    compared = run("compare", traced, out)
    assert compared.exit_code == 0
    assert "no divergence" in compared.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--feed", "x"), "--feed works with --case prefill --numerics released"),
        (("--case", "image", "--numerics", "released", "--feed", "x"), "--feed works with --case"),
    ],
)
def test_trace_that_cannot_run_leaves_no_file(folder, tmp_path, options, message):
    result = trace(folder, tmp_path / "out", *options)
    assert result.exit_code == 2
    assert message in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_trace_never_overwrites_what_it_reads(folder):
    inputs = folder / "inputs.safetensors"
    before = inputs.read_bytes()
    result = trace(folder, inputs)
    assert result.exit_code == 2
    assert "is read by this command; name another file for --out" in result.stderr
    assert inputs.read_bytes() == before


@pytest.mark.parametrize(
    "place",
    ["checkpoint/config.json", "checkpoint/../link/config.json", "checkpoint/a/old", "blob"],
)
def test_trace_never_overwrites_its_checkpoint(folder, tmp_path, place):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / "link").symlink_to(copy / "checkpoint")
    (copy / "checkpoint" / "a").mkdir()
    (copy / "checkpoint" / "a" / "old").write_text("notes")
    shard = next((copy / "checkpoint").glob("*.safetensors"))
    shard.rename(copy / "blob")
    shard.symlink_to(copy / "blob")
    before = (copy / place).read_bytes()
    result = trace(copy, copy / place)
    assert result.exit_code == 2
    assert f"{place} belongs to the checkpoint; name another file for --out" in result.stderr
    assert (copy / place).read_bytes() == before
