"""``openv41 data prepare``: files to shards, errors with status 2."""

import pytest
from typer.testing import CliRunner

from openv41.cli.main import app
from openv41.io.tokenizer import load_tokenizer, train_tokenizer
from openv41.train.token_shards import TokenShards


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "text.txt").write_text("to be or not to be\n" * 20)
    train_tokenizer([tmp_path / "text.txt"], vocab_size=262).save(tmp_path / "tokenizer")
    return tmp_path


def prepare(folder, *names, tokenizer="tokenizer"):
    files = [str(folder / name) for name in names]
    options = ["--tokenizer", str(folder / tokenizer), "--out", str(folder / "out")]
    return CliRunner().invoke(app, ["data", "prepare", *files, *options])


def test_prepare_writes_shards_with_their_tokenizer(folder):
    result = prepare(folder, "text.txt")
    assert result.exit_code == 0, result.stderr
    shards = TokenShards(folder / "out")
    assert f"out: 1 documents, 380 bytes, {shards.num_tokens} tokens (uint16" in result.stdout
    shards.check_tokenizer(load_tokenizer(folder / "out"))
    ids = shards.read(1, shards.num_tokens - 1).tolist()
    assert load_tokenizer(folder / "out").decode(ids) == (folder / "text.txt").read_text()


def test_errors_are_plain_and_leave_nothing(folder):
    result = prepare(folder, "text.txt", "gone.txt")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "error: no such text file: " in result.stderr
    result = prepare(folder, "text.txt", tokenizer="nowhere")
    assert result.exit_code == 2
    assert "nowhere: cannot read the tokenizer" in result.stderr
    assert not (folder / "out").exists()
