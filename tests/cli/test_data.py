"""``openv41 data``: files to shards, errors with status 2."""

import json

import pytest
from typer.testing import CliRunner

from openv41.cli.main import app
from openv41.io.tokenizer import load_tokenizer, train_tokenizer
from openv41.train.sample_shards import SampleShards
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


def test_samples_writes_conversations(folder):
    train_tokenizer([folder / "text.txt"], vocab_size=280, prompt_format=True).save(
        folder / "tokenizer"
    )
    talk = [{"role": "user", "content": "to be?"}, {"role": "assistant", "content": "not"}]
    (folder / "chats.jsonl").write_text(f"{json.dumps({'messages': talk})}\n" * 3)
    options = ["--tokenizer", str(folder / "tokenizer"), "--out", str(folder / "out")]
    words = ["data", "samples", str(folder / "chats.jsonl"), *options]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.stderr
    shards = SampleShards(folder / "out")
    assert f"out: 3 samples, {sum(shards.lengths)} text tokens, " in result.stdout
    assert f"{shards.index.targets} of them to learn" in result.stdout
    (folder / "chats.jsonl").write_text('{"messages": [{"role": "user"}]}\n')
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert "chats.jsonl:1: a message needs a 'role' and a 'content'" in result.stderr
