"""``openv41 dspark regenerate``: what the target says, up to the stage that learns it."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from openv41.cli.main import app
from openv41.config import DsparkConfig
from openv41.engine.engine import Engine
from openv41.engine.request import FinishReason
from openv41.errors import DataError
from openv41.io.checkpoint import load_model
from openv41.io.tokenizer import load_tokenizer
from openv41.train.sample_encoder import EOS_ID, SampleEncoder
from openv41.train.sample_shards import SampleShards
from openv41.train.samples import read_samples
from tests.conftest import REPOSITORY
from tests.io.tiny_checkpoint import make_checkpoint

TEXT = "To be, or not to be, that is the question. " * 8
SIZES = ("--prompts", 5, "--prompt-tokens", 8, "--max-tokens", 12)


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
    (folder / "prompts.txt").write_text(TEXT)
    return make_checkpoint(folder, std=0.3, dspark=drafter)


def run(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def regenerate(checkpoint, out, *options):
    text = checkpoint.parent / "prompts.txt"
    return run("dspark", "regenerate", checkpoint, "--text", text, "--out", out, *SIZES, *options)


def records(checkpoint, out, *options):
    result = regenerate(checkpoint, out, *options)
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_answers_are_what_the_target_says(checkpoint, tmp_path):
    """At temperature 0 those of ``openv41 generate``, however many run at once; at 1 others."""
    greedy = records(checkpoint, tmp_path / "a.jsonl", "--temperature", 0, "--at-once", 2)
    again = records(checkpoint, tmp_path / "b.jsonl", "--temperature", 0)
    drawn = records(checkpoint, tmp_path / "c.jsonl", "--temperature", 1)
    assert len(greedy) == len(drawn) == 5
    assert greedy == again
    prompts = [record["parts"][0] for record in greedy]
    assert prompts == [record["parts"][0] for record in drawn]
    assert all(part["text"] in TEXT and part["loss"] is False for part in prompts)
    assert all(a["parts"][1] != b["parts"][1] for a, b in zip(greedy, drawn, strict=True))
    options = ("--max-tokens", 12, "--temperature", 0, "--no-speculation")
    said = run("generate", checkpoint, "--prompt", prompts[1]["text"], *options)
    assert said.exit_code == 0, said.output
    assert greedy[1]["parts"][1]["text"]
    assert greedy[1]["parts"][1]["text"] in said.stdout


@pytest.mark.parametrize("temperature", [0, 1])
def test_the_drafter_learns_from_them(checkpoint, tmp_path, temperature):
    """What the target said is learned, neither its prompts nor an end where it was only cut."""
    found = records(checkpoint, tmp_path / "answers.jsonl", "--temperature", temperature)
    named = ("--tokenizer", checkpoint, "--out")
    done = run("data", "samples", tmp_path / "answers.jsonl", *named, tmp_path / "answers")
    assert done.exit_code == 0, done.output
    done = run("data", "prepare", checkpoint.parent / "prompts.txt", *named, tmp_path / "text")
    assert done.exit_code == 0, done.output
    shards, tokenizer = SampleShards(tmp_path / "answers"), load_tokenizer(checkpoint)
    for number, record in enumerate(found):
        sample = shards.read(number)
        learned = sample.tokens[sample.weights > 0].tolist()
        assert learned == record["parts"][1]["ids"]
        assert tokenizer.decode(learned) == record["parts"][1]["text"]
    settings = ("tokens=128", "batch_tokens=64", "sequence_length=64", "warmup_tokens=0")
    words = [word for setting in settings for word in ("--set", f"dspark.{setting}")]
    done = run(
        *("train", "--stages", "dspark", "--from", checkpoint, "--data", tmp_path / "text"),
        *("--sft", tmp_path / "answers", "--out", tmp_path / "drafted", *words),
    )
    assert done.exit_code == 0, done.output
    assert f" epochs of 5 sample(s) from {tmp_path / 'answers'}, " in done.stderr
    assert "of text" not in done.stderr
    before, after = (
        load_model(folder, dtype=torch.float32).state_dict()
        for folder in (checkpoint, tmp_path / "drafted" / "checkpoint")
    )
    moved = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert "drafter.main_proj.weight" in moved
    assert all(name.startswith("drafter.") for name in moved)


def test_the_end_of_an_answer_is_learned_where_the_target_ended_it(
    checkpoint, tmp_path, monkeypatch
):
    generate = Engine.generate

    def some_end(engine, requests):
        assert not any(request.ignore_eos for request in requests)
        first, *others = generate(engine, requests)
        return [replace(first, finish_reason=FinishReason.STOP), *others]

    monkeypatch.setattr(Engine, "generate", some_end)
    found = records(checkpoint, tmp_path / "answers.jsonl")
    samples = list(read_samples(tmp_path / "answers.jsonl"))
    encoder = SampleEncoder(load_tokenizer(checkpoint), None)
    ends = [(e.tokens[-1], e.weights[-1]) for e in map(encoder.encode, samples)]
    assert len(found) == 5
    assert ends == [(EOS_ID, 1.0)] + [(EOS_ID, 0.0)] * 4


def test_tokens_that_no_text_holds_are_learned_as_they_were_drawn(checkpoint, tmp_path):
    """Parts of a character, and a word in more tokens than the tokenizer would take."""
    tokenizer = load_tokenizer(checkpoint)
    by_bytes = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    ids = [by_bytes[bytes([byte])] for byte in (0xE2, 0x82, *b"the", 0xAC)]
    text = tokenizer.decode(ids)
    assert tokenizer.encode(text) != ids
    record = {"parts": [{"text": text, "ids": ids}], "tokenizer": tokenizer.sha256}
    found = encoded(record, tokenizer, tmp_path)
    assert found.tokens.tolist()[1:-1] == ids
    assert found.weights.tolist() == [0.0] + [1.0] * (len(ids) + 1)
    for changes, message in (
        ({"tokenizer": "0" * 64}, f"'ids' are of the tokenizer of sha256 {'0' * 64}, .* has "),
        ({"parts": [{"text": "a", "ids": [tokenizer.vocab_size]}]}, "the vocabulary ends at "),
    ):
        with pytest.raises(DataError, match=message):
            encoded({**record, **changes}, tokenizer, tmp_path)


def encoded(record, tokenizer, folder):
    (folder / "one.jsonl").write_text(json.dumps(record))
    [sample] = read_samples(folder / "one.jsonl")
    return SampleEncoder(tokenizer, None).encode(sample)


def test_an_answer_that_failed_is_no_sample(checkpoint, tmp_path, monkeypatch):
    generate = Engine.generate

    def one_fails(engine, requests):
        first, *others = generate(engine, requests)
        return [replace(first, finish_reason=FinishReason.ERROR, error="it broke"), *others]

    monkeypatch.setattr(Engine, "generate", one_fails)
    result = regenerate(checkpoint, tmp_path / "answers.jsonl")
    assert result.exit_code == 2
    assert "an answer to a prompt failed: it broke" in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("old", [None, "what was there\n"])
def test_an_interrupted_run_leaves_no_half_file(checkpoint, tmp_path, monkeypatch, old):
    out, rounds, generate = tmp_path / "answers.jsonl", [], Engine.generate
    if old is not None:
        out.write_text(old)

    def interrupted(engine, requests):
        rounds.append(len(requests))
        if len(rounds) == 2:
            raise KeyboardInterrupt
        return generate(engine, requests)

    monkeypatch.setattr(Engine, "generate", interrupted)
    assert regenerate(checkpoint, out, "--at-once", 2).exit_code != 0
    assert rounds == [2, 2]
    partial = tmp_path / "answers.jsonl.partial"
    assert [path.read_text() for path in tmp_path.iterdir() if path != partial] == (
        [] if old is None else [old]
    )
    monkeypatch.setattr(Engine, "generate", counted(rounds, generate))
    result = regenerate(checkpoint, out, "--at-once", 2)
    assert result.exit_code == 0, result.output
    assert f"going on behind round 1 of 3 in {partial}" in result.stderr
    assert rounds == [2, 2, 2, 1]
    assert [path.name for path in tmp_path.iterdir()] == ["answers.jsonl"]
    monkeypatch.undo()
    records(checkpoint, tmp_path / "whole.jsonl", "--at-once", 2)
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def counted(rounds, generate):
    def count(engine, requests):
        rounds.append(len(requests))
        return generate(engine, requests)

    return count


def test_what_another_command_began_is_not_mixed_in(checkpoint, tmp_path, monkeypatch):
    out, generate = tmp_path / "answers.jsonl", Engine.generate
    interrupted = iter([False, True])

    def once(engine, requests):
        if next(interrupted):
            raise KeyboardInterrupt
        return generate(engine, requests)

    monkeypatch.setattr(Engine, "generate", once)
    result = regenerate(checkpoint, out, "--at-once", 2)
    assert result.exit_code == 130
    assert f"1 rounds are in {out}.partial: the same command goes on there" in result.stderr
    monkeypatch.undo()
    before = (tmp_path / "answers.jsonl.partial").read_bytes()
    result = regenerate(checkpoint, out, "--at-once", 2, "--temperature", 0.5)
    assert result.exit_code == 2
    assert "this one differs (temperature: 1.0, now 0.5); give the same options" in result.stderr
    assert (tmp_path / "answers.jsonl.partial").read_bytes() == before


def test_killed_and_started_again_it_writes_the_same_file(checkpoint, tmp_path):
    """Whatever the moment: here behind the first round, then behind a later one."""
    out = tmp_path / "answers.jsonl"
    partial = tmp_path / "answers.jsonl.partial"
    text = checkpoint.parent / "prompts.txt"
    options = ["--prompts", "12", "--prompt-tokens", "8", "--max-tokens", "12", "--at-once", "1"]
    words = ["dspark", "regenerate", checkpoint, "--text", text, "--out", out, *options]
    command = [sys.executable, "-m", "openv41", *map(str, words)]
    path = os.pathsep.join([str(REPOSITORY / "src"), str(REPOSITORY)])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    for rounds in (1, 3):
        child = subprocess.Popen(command, env=env, stderr=subprocess.PIPE)
        while not partial.exists() or partial.read_bytes().count(b"\n") < 1 + rounds:
            assert child.poll() is None, child.stderr.read()
            time.sleep(0.002)
        child.kill()
        child.communicate()
        assert not out.exists()
    with partial.open("ab") as file:
        file.write(b'["half of a rou')
    assert run(*words).exit_code == 0
    assert run(*words[: -len(options) - 1], tmp_path / "whole.jsonl", *options).exit_code == 0
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert len(out.read_text().splitlines()) == 12
    assert sorted(f.name for f in tmp_path.iterdir()) == ["answers.jsonl", "whole.jsonl"]
