"""``openv41 report``: pictures and a page from a run's log."""

import json

import pytest
from typer.testing import CliRunner

from openv41.cli.main import app
from openv41.train.metrics import LOG_FILE

PNG = b"\x89PNG\r\n\x1a\n"


def record(step, **more):
    balance = {"text": {"max_over_mean": [1.5, 1.1], "entropy": [0.9, 1.0]}}
    return {
        "step": step,
        "tokens": step * 100,
        "loss": 5.0 / step,
        "lr": 1e-3,
        "grad_norm": 0.5,
        "balance": balance,
        "tokens_per_second": 1000.0,
        **more,
    }


def write(folder, records, end="\n"):
    folder.mkdir(exist_ok=True)
    (folder / LOG_FILE).write_text("\n".join(map(json.dumps, records)) + end)


def invoke(*words):
    return CliRunner().invoke(app, ["report", *map(str, words)])


def test_pictures_and_one_page(tmp_path):
    losses = {"text": 1.0, "image": 2.0}
    records = [record(n, update_rms={"muon": 0.18, "adamw": 0.9}, losses=losses) for n in (1, 2, 3)]
    del records[1]["update_rms"]["adamw"]  # a group without gradients in that stage
    records[-1]["heldout_bits_per_byte"] = 2.125
    records[-1] |= {"heldout_image_nats": 1.375, "distill_loss": 0.625}
    write(tmp_path / "my <run>", records)
    result = invoke(tmp_path / "my <run>")
    assert result.exit_code == 0, result.stderr
    folder = tmp_path / "my <run>" / "report"
    names = {"loss.png", "balance.png", "updates.png", "gradients.png", "speed.png", "report.html"}
    assert {path.name for path in folder.iterdir()} == names
    assert all(p.read_bytes().startswith(PNG) for p in folder.glob("*.png"))
    page = (folder / "report.html").read_text()
    assert "<h1>my &lt;run&gt;</h1>" in page
    assert "2.1250 bits per byte" in page
    assert "1.3750 nats per target" in page
    assert "0.6250 nats per token" in page
    assert "1.50 in the worst layer" in page
    assert page.count("data:image/png;base64,") == 5


def test_a_dropped_model_may_have_had_other_layers(tmp_path):
    """Loads are drawn of the model that is left."""
    small = {"text": {"max_over_mean": [1.5], "entropy": [0.9]}}
    write(tmp_path / "run", [record(1, balance=small), record(2), record(3)])
    assert invoke(tmp_path / "run").exit_code == 0
    write(tmp_path / "alone", [record(2), record(3)])
    assert invoke(tmp_path / "alone").exit_code == 0
    pictures = [tmp_path / name / "report" / "balance.png" for name in ("run", "alone")]
    assert all(picture.read_bytes().startswith(PNG) for picture in pictures)
    assert pictures[0].read_bytes() != pictures[1].read_bytes()  # it begins behind the first step


def test_what_was_not_logged_has_no_picture(tmp_path):
    records = [record(1), record(2)]
    for one in records:
        one["balance"] = {}
    write(tmp_path / "run", records, end='\n{"step": 3, "tok')
    result = invoke(tmp_path / "run", "--out", tmp_path / "here")
    assert result.exit_code == 0, result.stderr
    names = {path.name for path in (tmp_path / "here").iterdir()}
    assert names == {"loss.png", "gradients.png", "speed.png", "report.html"}


def test_a_contrastive_stage_has_a_picture_of_its_own(tmp_path):
    """And its loss does not stand among those of next tokens."""
    shown = {"model_flops_per_second": 2e12, "mfu": 0.25}
    seen = [record(n, retrieval=n / 8, balance={}, **shown) for n in (1, 2)]
    write(tmp_path / "run", seen)
    assert invoke(tmp_path / "run").exit_code == 0
    folder = tmp_path / "run" / "report"
    assert {path.name for path in folder.glob("*.png")} == {
        "contrast.png", "gradients.png", "speed.png",
    }  # fmt: skip
    write(tmp_path / "run", [*seen, record(3, spike=True, **shown)])
    assert invoke(tmp_path / "run").exit_code == 0
    assert (folder / "loss.png").is_file()
    page = (folder / "report.html").read_text()
    assert "25.0% in their batch" in page
    assert "<td>2 TFLOP/s</td>" in page
    assert "<tr><td>model FLOPs utilisation</td><td>25.0%</td></tr>" in page
    assert "<tr><td>loss spikes</td><td>1</td></tr>" in page


@pytest.mark.parametrize(("content", "message"), [(None, "cannot read the log"), ("", "no step")])
def test_runs_without_steps(tmp_path, content, message):
    if content is not None:
        write(tmp_path, [], end=content)
    result = invoke(tmp_path)
    assert result.exit_code == 2
    assert message in result.stderr
