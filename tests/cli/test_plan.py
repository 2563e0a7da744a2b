"""``openv41 plan``."""

import json
import re

import pytest
from typer.testing import CliRunner

from openv41.cli.main import app
from openv41.io.hf_config import write_config
from openv41.presets import thin, tiny

run = CliRunner()


def plan(*arguments):
    result = run.invoke(app, ["plan", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def released_text():
    return plan("released")


@pytest.mark.parametrize(
    ("label", "figure"),
    [
        ("tensors", "96,085"),
        ("payload bytes", "510,286,023,000"),
        ("files by the naming rule", "48"),
        ("backbone with vision", "552.05 B"),
        ("backbone without vision", "551.57 B"),
        ("Engram table entries", "196.61 B"),
        ("active per token, prefill", "7.90 B"),
        ("active per token, decode", "16.13 B"),
        ("global, per token", "890"),
        ("window, per request", "2,703,360"),
        ("at a context of 65,536", "61,030,400"),
        ("all tensors", "763.21 B"),
    ],
)
def test_released_figures(released_text, label, figure):
    assert re.search(rf"^{re.escape(label)} +{re.escape(figure)} *$", released_text, re.MULTILINE)


@pytest.mark.parametrize(
    "row",
    [
        "0 window - - - - -",
        "1 window - - - - Engram",
        "2 full 2 2 2 - -",
        "14 full 2 14 14 - Engram",
        "19 reuse 2 14 14 - -",
        "20 full 1 20 20 publishes -",
        "24 reindex 1 20 24 from 20 -",
        "39 reuse 1 20 36 - tap",
    ],
)
def test_released_layers(released_text, row):
    assert row in [" ".join(line.split()) for line in released_text.splitlines()]


def test_json_of_a_checkpoint_equals_its_preset(tmp_path):
    write_config(thin(), tmp_path, quantized=True)
    got = json.loads(plan(tmp_path, "--json", "--context", 100))
    want = json.loads(plan("thin", "--json", "--context", 100))
    assert got.pop("model") == str(tmp_path)
    assert want.pop("model") == "thin"
    assert got == want
    assert len(got["layers"]) == 40
    assert got["layers"][24] == {
        "layer": 24,
        "mode": "reindex",
        "ratio": 1,
        "kv_source": 20,
        "index_source": 24,
        "publishes_candidates": False,
        "uses_candidates": True,
        "has_engram": False,
        "is_tap": False,
    }
    assert got["context"] == 100
    assert got["checkpoint"]["tensors"] == 40 * 66 + 3 * 8 + 7 + 4 * 3 + 3 + 2 * 6
    assert got["parameters"]["all"] == sum(got["parameters_by_component"].values())


def test_plain_checkpoints_are_counted_as_plain(tmp_path):
    write_config(tiny(), tmp_path, quantized=False, dtype="float32")
    checkpoint = json.loads(plan(tmp_path, "--json"))["checkpoint"]
    parameters = json.loads(plan("tiny", "--json"))["parameters"]["all"]
    assert checkpoint["variant"] == "float32"
    assert checkpoint["payload_bytes"] == 4 * parameters


def test_the_cache_of_a_short_context_holds_a_short_window():
    cache = json.loads(plan("tiny", "--json", "--context", 10))["cache_bytes"]
    assert cache["at_context"] == round(40.5 * 10) + 33 * 10 * 8


def test_golden_checkpoint(golden_dir):
    figures = json.loads(plan(golden_dir / "A" / "checkpoint", "--json"))
    assert figures["checkpoint"]["tensors"] == 801
    assert figures["context"] == 512  # as far as the model goes


def test_context_changes_the_work():
    short = json.loads(plan("tiny", "--json", "--context", 8))["flops_per_token"]["decode"]
    long = json.loads(plan("tiny", "--json"))["flops_per_token"]["decode"]
    assert short["matrices"] == long["matrices"]
    assert short["attention"] < long["attention"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["large"], "'large' is neither a preset (tiny, bench30m, thin, small, released) nor"),
        (["tiny", "--context", "0"], "--context is 0, must be 1 to 2048, the model's max_position"),
        (["tiny", "--context", "4096"], "--context is 4096, must be 1 to 2048"),
    ],
)
def test_a_wrong_argument_is_explained(arguments, text):
    result = run.invoke(app, ["plan", *arguments])
    assert result.exit_code == 2
    assert text in " ".join(result.stderr.split())
    assert result.stdout == ""


def test_a_folder_without_configuration_is_named(tmp_path):
    result = run.invoke(app, ["plan", str(tmp_path)])
    assert result.exit_code == 2
    assert "no such file; give a checkpoint folder or its config.json" in result.stderr
