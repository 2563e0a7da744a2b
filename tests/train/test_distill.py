"""Distillation against plain autograd; teachers that fit and those that do not."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from openv41.errors import ConfigError
from openv41.io.checkpoint import load_model, save_model
from openv41.io.tokenizer import train_tokenizer
from openv41.layers.batch import Batch
from openv41.ops import linear_loss
from openv41.train.config import OptimizerConfig, TrainConfig
from openv41.train.distill import Teachers, TeacherSpec, open_teachers, parse_teachers
from openv41.train.loop import Trainer
from openv41.train.optimizer import Optimizers
from openv41.train.packed_batch import PackedBatch
from openv41.train.placement import distribute
from openv41.train.sample_shards import SampleShards
from openv41.train.step import Sums, next_tokens, train_step
from openv41.train.token_shards import prepare_shards
from tests.layers.mini import VOCAB, mini_model, random_ids
from tests.train.runs import changed, mini_run, read_log

pytestmark = pytest.mark.unchecked

LENGTHS = (7, 1, 12)
CONFIG = TrainConfig(tokens=200, batch_tokens=20, sequence_length=20, warmup_tokens=0)
ALONE = replace(CONFIG, balance_loss=0.0, indexer_loss=0.0)
WEIGHTS = (0.3, 1.1)


def packed():
    return PackedBatch(torch.tensor(random_ids(sum(LENGTHS))), LENGTHS)


def plain_loss(student, teachers, part, lm_weight, distill_weight):
    """The same loss from all logits at once, by torch's own operations."""
    rows, targets = next_tokens(part.ids, part.lengths)
    batch = Batch.packed(part.ids, part.lengths)
    logits = student.logits(student(batch).hidden)[rows]
    loss = lm_weight * torch.nn.functional.cross_entropy(logits, targets)
    for teacher, weight in teachers:
        with torch.no_grad():
            log_q = teacher.logits(teacher(batch).hidden)[rows].log_softmax(-1)
        log_p = logits.log_softmax(-1)
        divergence = torch.nn.functional.kl_div(log_q, log_p, log_target=True, reduction="sum")
        loss = loss + distill_weight * weight * divergence / len(rows)
    return loss


@pytest.mark.parametrize("logits_at_once", [1, 7 * VOCAB + 5, 1 << 22])
def test_pieces_give_the_gradients_of_the_whole(monkeypatch, logits_at_once):
    monkeypatch.setattr(linear_loss, "LOGITS_AT_ONCE", logits_at_once)
    monkeypatch.setattr(linear_loss, "LEAST_ROWS", 1)
    student = mini_model(1)
    teachers = [(mini_model(n), w) for n, w in zip((2, 3), WEIGHTS, strict=True)]
    Optimizers(distribute(student), CONFIG.optimizer)
    want = plain_loss(student, teachers, packed(), 0.7, 0.4)
    want.backward()
    want_gradients = {name: p.grad for name, p in student.named_parameters()}
    config = replace(ALONE, lm_weight=0.7, distill_weight=0.4)
    sums, found = run(student, config, Teachers(teachers))
    assert 0.7 * sums.loss + 0.4 * sums.distill == pytest.approx(want.item(), rel=1e-12)
    for name, gradient in found.items():
        if want_gradients[name] is None:
            assert gradient is None, name
        else:
            torch.testing.assert_close(gradient, want_gradients[name], rtol=1e-8, atol=1e-11)


def run(student, config, teachers):
    """Sums and gradients of the batch."""
    student.zero_grad(set_to_none=True)
    sums = Sums(student, packed(), config, teachers)
    sums.add(packed())
    return sums, {name: p.grad for name, p in student.named_parameters()}


def gradients(config, teachers):
    student = mini_model(1)
    Optimizers(distribute(student), config.optimizer)
    sums, found = run(student, config, teachers)
    return sums, torch.cat([g.flatten() for g in found.values() if g is not None])


def test_a_teacher_that_is_the_student_teaches_nothing():
    """But for rounding: a forward without gradients sums in another order."""
    config = replace(ALONE, lm_weight=0.0)
    sums, found = gradients(config, Teachers([(mini_model(1), 1.0)]))
    other, learned = gradients(config, Teachers([(mini_model(2), 1.0)]))
    assert abs(sums.distill) < 1e-13
    assert other.distill > 0.1
    assert found.abs().max() < 1e-12 * learned.abs().max()
    assert sums.loss == other.loss > 1


def test_parts_of_a_batch_give_the_step_of_the_whole():
    results, models = [], []
    for most in (0, 6):
        model, config = mini_model(2), replace(CONFIG, micro_batch_tokens=most)
        teachers = Teachers([(mini_model(3), 0.5)])
        optimizer = Optimizers(distribute(model), config.optimizer)
        results.append(train_step(model, optimizer, packed(), config, 0, teachers=teachers))
        models.append(model.state_dict())
    first, second = results
    assert first.distill_loss > 0.1
    assert second.distill_loss == pytest.approx(first.distill_loss, rel=1e-9)
    assert second.grad_norm == pytest.approx(first.grad_norm, rel=1e-9)
    for name, value in models[0].items():
        torch.testing.assert_close(models[1][name], value, rtol=1e-6, atol=1e-9, msg=name)


@pytest.fixture(scope="module")
def shards(text_files, text_tokenizer, tmp_path_factory):
    return prepare_shards(text_files, text_tokenizer, tmp_path_factory.mktemp("run") / "data")


@pytest.fixture(scope="module")
def teacher(shards, tmp_path_factory):
    """A checkpoint that has learned something."""
    run = mini_run(shards, tmp_path_factory.mktemp("teacher") / "out", tokens=192, warmup_tokens=0)
    run = changed(run, optimizer=OptimizerConfig(lr=0.1), checkpoint_steps=1000)
    return Trainer(run, resume=False).fit()


def distilling(shards, teacher, out, weight=1.0, **changes):
    settings = {"lm_weight": 0.0, "tokens": 192, "warmup_tokens": 0, "checkpoint_steps": 5}
    run = changed(mini_run(shards, out, **settings), optimizer=OptimizerConfig(lr=0.1), **changes)
    return replace(run, teachers=(TeacherSpec(teacher, weight),))


@pytest.mark.shapes
def test_a_run_comes_closer_to_its_teacher(shards, teacher, tmp_path):
    run = distilling(shards, teacher, tmp_path / "out")
    trainer = Trainer(run, resume=False)
    trainer.fit()
    losses = [record["distill_loss"] for record in read_log(run.out)]
    assert losses[-1] < 0.7 * losses[0]
    resumed = Trainer(run, resume=True)
    assert resumed.step == 6
    with pytest.raises(ConfigError, match=r"teachers\.\w{64}: the run has 1.0, now it is 0.5"):
        Trainer(distilling(shards, teacher, run.out, weight=0.5), resume=True)
    other = run.out / "checkpoint"
    with pytest.raises(ConfigError, match=r"teachers\.\w{64}: the run has None, now it is 1.0"):
        Trainer(distilling(shards, other, run.out), resume=True)


def test_a_run_that_starts_from_its_teacher_has_nothing_to_learn(shards, teacher, tmp_path):
    run = replace(distilling(shards, teacher, tmp_path / "out", tokens=32), base=teacher)
    Trainer(run, resume=False).fit()
    assert abs(read_log(run.out)[0]["distill_loss"]) < 1e-7


def test_teachers_must_read_what_the_student_reads(shards, teacher, tmp_path, text_files):
    run = mini_run(shards, tmp_path / "out")
    tokenizer = Trainer(run, resume=False).tokenizer

    def problems(*specs, model=run.model, stages=run.stages, own=tokenizer, samples=()):
        device = torch.device("cpu")
        with pytest.raises(ConfigError) as caught:
            open_teachers(specs, model, stages, own, samples=samples, device=device)
        return str(caught.value)

    spec, size = TeacherSpec(teacher), run.model.vocab_size
    found = problems(spec, model=replace(run.model, vocab_size=size + 1))
    assert f"its vocabulary has {size} tokens, the student's {size + 1}" in found
    another = train_tokenizer(text_files[:1], vocab_size=270)
    assert "its tokenizer is another one than that of the data" in problems(spec, own=another)
    long = changed(run, sequence_length=1024, batch_tokens=1024, tokens=2048).stages
    assert "it reads 512 tokens, the longest document may have 1024" in problems(spec, stages=long)
    pictures = SampleShards.__new__(SampleShards)
    pictures.lengths, pictures.index = [700, 30], SimpleNamespace(vision={})
    found = problems(spec, samples=[pictures])
    assert "it reads 512 tokens, the longest document may have 700" in found
    assert "it has no vision encoder; leave out --images" in found
    assert "is named twice" in problems(spec, TeacherSpec(teacher, 0.5))
    idle = changed(run, lm_weight=0.0).stages
    assert "lm_weight is 0 in pretrain and there is no --teacher" in problems(stages=idle)


def test_teachers_from_words(tmp_path):
    specs = parse_teachers(["a/b", "c=0.25", "d=e", "f=g=2"])
    assert [(str(s.checkpoint), s.weight) for s in specs] == [
        ("a/b", 1.0), ("c", 0.25), ("d=e", 1.0), ("f=g", 2.0),
    ]  # fmt: skip
    for word in ("a=0", "a=-1", "a=nan", "a=inf"):
        with pytest.raises(
            ConfigError, match=r"the weight of a is .*, must be above 0, at most 1e"
        ):
            parse_teachers([word])


def test_a_released_checkpoint_teaches_too(shards, teacher, tmp_path):
    """Its stored values count, in float32."""
    save_model(load_model(teacher), tmp_path / "released")
    (tmp_path / "released" / "tokenizer.json").write_bytes(
        (teacher / "tokenizer.json").read_bytes()
    )
    run = replace(
        distilling(shards, tmp_path / "released", tmp_path / "out", tokens=32), base=teacher
    )
    Trainer(run, resume=False).fit()
    assert 0 < read_log(run.out)[0]["distill_loss"] < 0.5
