"""A whole run of a mini model: what it writes, and that it depends on its settings alone."""

import math
import os
import signal
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

from openv41.errors import InputError
from openv41.io.checkpoint import load_model
from openv41.io.tokenizer import load_tokenizer
from openv41.layers.batch import Batch
from openv41.train import loop
from openv41.train.checkpoint import FOLDER
from openv41.train.config import OptimizerConfig
from openv41.train.data import bits_per_byte, evaluation_windows
from openv41.train.evaluate import HeldOut, pack
from openv41.train.loop import StoppedError, Trainer
from openv41.train.step import DivergedError, next_tokens
from openv41.train.token_shards import TokenShards, prepare_shards
from tests.train.runs import changed, mini_run, read_log

pytestmark = pytest.mark.unchecked


@pytest.fixture(scope="module")
def shards(text_files, text_tokenizer, tmp_path_factory):
    return prepare_shards(text_files, text_tokenizer, tmp_path_factory.mktemp("run") / "data")


@pytest.fixture(scope="module")
def finished(shards, tmp_path_factory):
    """One finished run, for the tests that only look."""
    run = mini_run(shards, tmp_path_factory.mktemp("run") / "out", heldout=shards.folder)
    trainer = Trainer(run, resume=False)
    reported = []
    trainer.fit(reported.append)
    return trainer, reported


def test_the_log_holds_every_step(finished):
    trainer, reported = finished
    records = read_log(trainer.run.out)
    assert [r["step"] for r in records] == [1, 2, 3, 4, 5, 6]
    assert [r["tokens"] for r in records] == [32, 64, 96, 128, 160, 192]
    assert ["heldout_bits_per_byte" in r for r in records] == [False, False, True] * 2
    # The first loss is that of random weights: all tokens are about equally likely.
    assert records[0]["loss"] == pytest.approx(math.log(trainer.run.model.vocab_size), rel=0.02)
    assert [r.loss for r in reported] == [r["loss"] for r in records]
    assert reported[-1].tokens_per_second > 0


def test_the_written_model_is_the_trained_one(finished):
    trainer, _ = finished
    loaded = load_model(trainer.run.out / "checkpoint")
    assert loaded.config == trainer.run.model
    assert torch.equal(loaded.token_map, trainer.model.token_map)
    before = trainer.model.state_dict()
    assert all(torch.equal(value, before[name]) for name, value in loaded.state_dict().items())
    tokenizer = load_tokenizer(trainer.run.out / "checkpoint")
    assert tokenizer.sha256 == trainer.tokenizer.sha256


def test_two_runs_are_equal_and_another_seed_is_not(finished, shards, tmp_path):
    first, _ = finished
    second = Trainer(mini_run(shards, tmp_path / "b", heldout=shards.folder), resume=False)
    second.fit()
    assert read_log(first.run.out) == read_log(second.run.out)
    after = second.model.state_dict()
    assert all(torch.equal(v, after[name]) for name, v in first.model.state_dict().items())
    other = Trainer(mini_run(shards, tmp_path / "c", seed=4, tokens=64), resume=False)
    other.fit()
    assert read_log(other.run.out)[0]["loss"] != read_log(first.run.out)[0]["loss"]


def test_all_that_is_used_moves_and_the_indexer_only_by_its_loss(finished, shards, tmp_path):
    trainer, _ = finished
    fresh = Trainer(mini_run(shards, tmp_path / "fresh"), resume=False).model.state_dict()
    untaught = Trainer(mini_run(shards, tmp_path / "untaught", indexer_loss=0.0), resume=False)
    untaught.fit()
    for name, value in trainer.model.state_dict().items():
        unused = name.endswith("gate.bias_vl")
        assert torch.equal(value, fresh[name]) == unused, name
        stays = unused or ".indexer." in name
        assert torch.equal(untaught.model.state_dict()[name], fresh[name]) == stays, name
    taught, other = read_log(trainer.run.out)[-1], read_log(untaught.run.out)[-1]
    assert taught["indexer_loss"] > 0
    assert "indexer_loss" not in other
    assert other["balance_loss"] > 0


@pytest.mark.shapes
def test_training_learns(shards, tmp_path):
    run = mini_run(shards, tmp_path / "out", tokens=16 * 32, warmup_tokens=0)
    run = changed(run, optimizer=OptimizerConfig(lr=0.1), checkpoint_steps=1000)
    trainer = Trainer(run, resume=False)
    losses = []
    trainer.fit(lambda record: losses.append(record.loss))
    assert sum(losses[-3:]) / 3 < losses[0] - 1.0


def test_the_heldout_score_covers_what_it_says(finished):
    """With enough tokens asked for it is the plain score of every document."""
    trainer, _ = finished
    shards, model = TokenShards(trainer.run.heldout), trainer.model
    sizes = {"sequence_length": 2000, "forward_tokens": 4000}
    held = HeldOut(shards, trainer.tokenizer, num_tokens=10**9, **sizes)
    assert held.num_bytes == shards.num_bytes
    nats = 0.0
    for start, stop in zip(shards.bounds, shards.bounds[1:], strict=False):
        ids = torch.from_numpy(shards.read(start, stop - 1))
        rows, targets = next_tokens(ids, (len(ids),))
        with torch.no_grad():
            hidden = model(Batch.packed(ids, [len(ids)])).hidden
        nats += cross_entropy(model.logits(hidden[rows]), targets, reduction="sum").item()
    assert held.score(model) == pytest.approx(bits_per_byte(nats, shards.num_bytes), rel=1e-5)


def test_a_part_of_the_heldout_text_is_spread_over_it(finished):
    trainer, _ = finished
    shards = TokenShards(trainer.run.heldout)
    sizes = {"sequence_length": 16, "forward_tokens": 32}
    held = HeldOut(shards, trainer.tokenizer, num_tokens=60, **sizes)
    scored = sum(len(w.ids) - w.first_scored for w in held.windows)
    assert 30 <= scored <= 90
    assert {w.document for w in held.windows} >= {0, 3}
    texts = b"".join(
        trainer.tokenizer.decode_bytes(w.ids[w.first_scored :].tolist()) for w in held.windows
    )
    assert held.num_bytes == len(texts)


@pytest.mark.parametrize("forward_tokens", [1, 30, 1000])
def test_packing_keeps_every_window_in_order(shards, forward_tokens):
    windows = list(evaluation_windows(shards, sequence_length=10, stride=5))
    packed = list(pack(iter(windows), forward_tokens))
    assert [id(w) for group in packed for w in group] == [id(w) for w in windows]
    sizes = [sum(len(w.ids) for w in group) for group in packed]
    assert max(sizes) <= max(forward_tokens, 10)
    firsts = [len(group[0].ids) for group in packed[1:]]
    assert all(a + b > forward_tokens for a, b in zip(sizes, firsts, strict=False))
    assert (len(packed) == len(windows)) == (forward_tokens == 1)


def test_a_folder_with_a_run_is_not_overwritten(finished):
    trainer, _ = finished
    with pytest.raises(InputError, match="holds a run already; add --resume"):
        Trainer(trainer.run, resume=False)


def test_a_nan_loss_leaves_a_checkpoint_that_resumes(shards, tmp_path):
    run = mini_run(shards, tmp_path / "out", max_skipped_steps=1)
    trainer = Trainer(run, resume=False)

    def spoil(record):
        if record.step == 3:
            trainer.model.head.weight.data[0, 0] = math.nan

    with pytest.raises(DivergedError, match="step 5: the loss is nan"):
        trainer.fit(spoil)
    assert [r["step"] for r in read_log(run.out)] == [1, 2, 3]
    assert trainer.skipped == 2
    assert not (run.out / "checkpoint").exists()
    again = Trainer(run, resume=True)
    assert again.step == 2
    assert all(torch.isfinite(p).all() for p in again.model.parameters())


def test_one_bad_batch_is_skipped(shards, tmp_path, monkeypatch, caplog):
    """It changes nothing, and the record after it says so."""
    plain = loop.train_step
    steps = []

    def spoiled(model, optimizer, packed, config, step, **more):
        steps.append(step)
        if step == 2:
            raise DivergedError("step 3: the loss is nan")
        return plain(model, optimizer, packed, config, step, **more)

    monkeypatch.setattr(loop, "train_step", spoiled)
    run = mini_run(shards, tmp_path / "out")
    Trainer(run, resume=False).fit()
    records = read_log(run.out)
    assert steps == [0, 1, 2, 3, 4, 5]
    assert [r["step"] for r in records] == [1, 2, 4, 5, 6]
    assert [r["skipped"] for r in records] == [0, 0, 1, 0, 0]
    assert "step 3: the loss is nan; this batch is skipped" in caplog.text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_after_its_step(shards, tmp_path, number):
    run = mini_run(shards, tmp_path / "out", checkpoint_steps=100)
    handler = signal.getsignal(number)

    def stop(record):
        if record.step == 1:
            os.kill(os.getpid(), number)

    with pytest.raises(StoppedError, match=f"stopped by {number.name} after step [12]"):
        Trainer(run, resume=False).fit(stop)
    assert signal.getsignal(number) is handler
    assert len(list((run.out / FOLDER).iterdir())) == 1
    assert Trainer(run, resume=True).step in (1, 2)


@pytest.mark.gpu
def test_one_step_on_a_gpu(shards, tmp_path):
    cpu = mini_run(shards, tmp_path / "cpu", tokens=64)
    gpu = replace(cpu, out=tmp_path / "gpu", device=torch.device("cuda"))
    torch.use_deterministic_algorithms(False)
    for run in (cpu, gpu):
        Trainer(run, resume=False).fit()
    losses = [[r["loss"] for r in read_log(run.out)] for run in (cpu, gpu)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


def test_a_run_that_learned_nothing_is_no_success(shards, tmp_path, monkeypatch):
    def spoiled(*_, **__):
        raise DivergedError("the loss is nan")

    monkeypatch.setattr(loop, "train_step", spoiled)
    run = mini_run(shards, tmp_path / "out", tokens=64)
    with pytest.raises(DivergedError, match="the loss is nan"):
        Trainer(run, resume=False).fit()
    assert not (run.out / "checkpoint").exists()


@pytest.mark.parametrize("is_spoiled", [False, True])
def test_a_skipped_end_is_saved_if_the_parameters_are_good(
    shards, tmp_path, monkeypatch, is_spoiled
):
    plain = loop.train_step

    def spoiled(model, optimizer, packed, config, step, **more):
        if step == 5:
            if is_spoiled:
                model.head.weight.data[0, 0] = math.nan
            raise DivergedError("the loss is nan")
        return plain(model, optimizer, packed, config, step, **more)

    monkeypatch.setattr(loop, "train_step", spoiled)
    run = mini_run(shards, tmp_path / "out")
    if is_spoiled:
        with pytest.raises(DivergedError, match="the loss is nan"):
            Trainer(run, resume=False).fit()
        assert Trainer(run, resume=True).step == 4
    else:
        Trainer(run, resume=False).fit()
        assert Trainer(run, resume=True).step == 6
