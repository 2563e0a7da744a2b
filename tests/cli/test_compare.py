"""``openv41 compare``: exit status, table and JSON."""

import json

import pytest
import torch
from typer.testing import CliRunner

from openv41.cli.main import app
from openv41.io.tensor_files import write_tensors


def run(*args):
    return CliRunner().invoke(app, ["compare", *(str(arg) for arg in args)])


@pytest.fixture
def files(tmp_path):
    """Two traces whose selections differ in one row, by a tie or not."""
    ids = torch.tensor([[0, 1], [0, 1]], dtype=torch.int32)
    a = {
        "layers.2.topk_indices": ids,
        "layers.2.topk_margin": torch.tensor([0.0, 0.25]),
        "logits": torch.tensor([[1.0, 2.0], [3.0, 5.0]]),
    }

    def write(row=None, error=0.0):
        changed = ids.clone()
        if row is not None:
            changed[row, 1] = 4
        b = {**a, "layers.2.topk_indices": changed, "logits": a["logits"] + error}
        paths = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
        for path, tensors in zip(paths, (a, b), strict=True):
            write_tensors(path, tensors, {"numerics": "f32"})
        return paths

    return write


def test_equal_files(files):
    result = run(*files())
    assert result.exit_code == 0
    assert "3 of 3 tensors are identical (bounds: f32)" in result.stdout
    assert "no divergence" in result.stdout


def test_a_tie_is_called_a_tie_and_counts_as_equal(files):
    result = run(*files(row=0))
    assert result.exit_code == 0
    assert "first divergence: layers.2.topk_indices: exact ties fell another way" in result.stdout
    assert "row 0: [1] against [4], a tie" in result.stdout


def test_another_choice_comes_with_its_margin(files):
    result = run(*files(row=1, error=0.5))
    assert result.exit_code == 1
    assert "first divergence: layers.2.topk_indices: 1 of 2 rows differ" in result.stdout
    assert "row 1: [1] against [4], margin 0.25" in result.stdout
    (line,) = (line for line in result.stdout.splitlines() if line.startswith("logits"))
    assert "5.00e-01" in line
    assert line.rstrip().endswith("max 0.5 above 0.0002")


def test_json(files):
    result = run(*files(row=1), "--json")
    assert result.exit_code == 1
    data = json.loads(result.stdout)
    assert data["first_divergence"] == "layers.2.topk_indices"
    (row,) = data["tensors"][1]["rows"]
    assert row == {"row": 1, "only_a": [1], "only_b": [4], "margin": 0.25}


def test_unusable_files(files, tmp_path):
    a, _ = files()
    result = run(a, tmp_path / "absent")
    assert result.exit_code == 2
    assert "not a readable safetensors file" in result.stderr
