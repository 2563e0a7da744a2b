"""openv41 inspect image: a picture, and what it says in words."""

import pytest
from PIL import Image
from typer.testing import CliRunner

from openv41.cli.main import app
from openv41.io.fixture import FixtureOptions, make_fixture

OPTIONS = FixtureOptions(
    seed=3, vocab_size=64, hidden_size=32, num_experts=2, length=64, outputs=False
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inspect") / "fixture"
    make_fixture(folder, OPTIONS)
    return folder / "checkpoint"


def run(*words):
    return CliRunner().invoke(app, ["inspect", "image", *map(str, words)])


@pytest.mark.slow
def test_a_picture_is_written(checkpoint, tmp_path):
    Image.effect_noise((150, 90), 80).save(tmp_path / "noise.png")
    text = ("--text", "w5 w6 w7")
    result = run(tmp_path / "noise.png", checkpoint, "--out", tmp_path / "out.png", *text)
    assert result.exit_code == 0, result.stderr
    assert "150 x 90 pixels" in result.stdout
    assert "tokens" in result.stdout
    drawn = Image.open(tmp_path / "out.png")
    assert drawn.width > 1500
    assert len(drawn.convert("RGB").getcolors(1 << 20)) > 300


def test_no_image_is_one_message(checkpoint, tmp_path):
    (tmp_path / "a.png").write_text("no image")
    result = run(tmp_path / "a.png", checkpoint, "--out", tmp_path / "out.png")
    assert result.exit_code == 2
    assert "a.png: cannot be read as an image" in result.stderr
    assert not (tmp_path / "out.png").exists()
