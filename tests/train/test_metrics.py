"""The log of a run: what stands in it, and what a resumed run drops."""

import json

import pytest

from openv41.train.balance import Balance
from openv41.train.metrics import EVENTS_FOLDER, LOG_FILE, RunLog, StepRecord

BALANCE = {"text": Balance([1.5, 1.25], [0.5, 0.75])}
ACCUMULATOR = "tensorboard.backend.event_processing.event_accumulator"


def record(step, **changes):
    values = {
        "loss": 2.5,
        "losses": {"text": 2.5},
        "lr": 1e-3,
        "grad_norm": 0.5,
        "balance": BALANCE,
    }
    return StepRecord(
        step=step,
        stage="pretrain",
        tokens=step * 64,
        tokens_per_second=10.0,
        **{**values, **changes},
    )


def steps_in(folder):
    return [json.loads(line)["step"] for line in (folder / LOG_FILE).read_text().splitlines()]


def test_one_object_per_step(tmp_path):
    with RunLog(tmp_path, 0) as log:
        log.add(record(1))
        assert steps_in(tmp_path) == [1]  # it can be read while the run goes on
        log.add(record(2, heldout_bits_per_byte=1.25))
    first, second = map(json.loads, (tmp_path / LOG_FILE).read_text().splitlines())
    assert first == {
        "step": 1,
        "stage": "pretrain",
        "tokens": 64,
        "loss": 2.5,
        "losses": {"text": 2.5},
        "skipped": 0,
        "spike": False,
        "lr": 1e-3,
        "grad_norm": 0.5,
        "balance": {"text": {"max_over_mean": [1.5, 1.25], "entropy": [0.5, 0.75]}},
        "image_tokens": 0,
        "tokens_per_second": 10.0,
    }
    assert second == {**first, "step": 2, "tokens": 128, "heldout_bits_per_byte": 1.25}


def test_a_resumed_run_drops_what_lies_behind_its_checkpoint(tmp_path):
    with RunLog(tmp_path, 0) as log:
        for step in (1, 2, 3, 4):
            log.add(record(step))
    with (tmp_path / LOG_FILE).open("a") as file:
        file.write('{"step": 5, "tok')  # the process died here
    with RunLog(tmp_path, 2) as log:
        log.add(record(3))
    assert steps_in(tmp_path) == [1, 2, 3]


def test_a_new_run_starts_with_an_empty_log(tmp_path):
    (tmp_path / LOG_FILE).write_text('{"step": 1}\n')
    with RunLog(tmp_path, 0):
        assert steps_in(tmp_path) == []


def test_tensorboard_gets_the_same_values(tmp_path):
    accumulator = pytest.importorskip(ACCUMULATOR).EventAccumulator
    with RunLog(tmp_path, 0) as log:
        log.add(record(1, loss=3.0))
        log.add(record(2, loss=2.0))
    events = accumulator(str(tmp_path / EVENTS_FOLDER)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 3.0), (2, 2.0)]
    assert [e.value for e in events.Scalars("balance/text/max_over_mean/1")] == [1.25] * 2
    assert "tokens" not in events.Tags()["scalars"]
