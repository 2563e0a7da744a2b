"""The GPU harness with a clock of the CPU: checks before timing, reasons, goals, lines."""

import gc
import json
import math
import time
import weakref
from types import SimpleNamespace

import pytest
import torch

from benchmarks.h200 import harness
from benchmarks.h200.ceilings import Ceilings
from benchmarks.h200.peers.process import Peers
from benchmarks.h200.rows import Goal, Row, relative_error, unequal

CARD = Ceilings(4.0e12, 8.0e14, 1.6e15, 4.0)


class CpuClock:
    device = torch.device("cpu")

    alive = True

    def wait(self):
        pass

    def is_alive(self):
        return self.alive

    def captured(self, run):
        outputs = run()

        def replay():
            for target, value in zip(outputs, run(), strict=True):
                target.copy_(value)

        return replay, outputs

    def count(self, runs, seconds):
        return 5

    def sample(self, runs, count):
        times = []
        for number in range(count):
            start = time.perf_counter()
            runs[number % len(runs)]()
            times.append((time.perf_counter() - start) * 1e6)
        return times


def row(**changes):
    return Row(
        **{
            "op": "double",
            "shape": {"T": 8},
            "make": lambda g: {"x": torch.randn(8, generator=g)},
            "ours": lambda x: (x + x,),
            "error": lambda inputs, out: relative_error(out[0], inputs["x"] * 2),
            "tolerance": 1e-6,
            "floor_bytes": 64,
            **changes,
        }
    )


def measured(clock=None, **changes):
    options = harness.parser("test").parse_args([])
    peers = Peers(None, 5)
    return harness.measure_row(clock or CpuClock(), CARD, row(**changes), options, peers)


def test_a_right_row_is_timed_beside_its_reference():
    line = measured(reference=lambda x: (x * 2,), variants={"times": lambda x: (2 * x,)})
    assert line["status"] == "run"
    assert line["error"] == 0
    assert set(line["candidates"]) == {"ours", "reference", "variant times"}
    assert all(found["samples"] == 20 for found in line["candidates"].values())
    assert line["floor_us"] == pytest.approx(64 / 4e12 * 1e6, abs=1e-3)
    json.dumps(line)


def unwritten(x):
    out = torch.empty(8)
    out[:7] = 2 * x[:7]
    return (out,)


def broken(x):
    raise RuntimeError("out of resource: shared memory")


@pytest.mark.parametrize(
    ("ours", "reason"),
    [
        (lambda x: (x * 2.1,), "wrong: error 0.05"),
        (unwritten, "wrong: error inf"),
        (lambda x: (x,), "wrong"),
        (broken, "out of resource"),
    ],
)
def test_what_is_wrong_is_not_timed_and_the_rest_is(ours, reason):
    line = measured(ours=ours, reference=lambda x: (x * 2,), goals=(Goal("us", 5.0),))
    assert reason in line["status"]
    assert line["ours_us"] is None
    assert line["goals"][0]["met"] is None
    assert line["reference_us"] > 0


def test_a_fault_while_timed_is_the_reason_and_ends_the_row():
    class Faulty(CpuClock):
        def sample(self, runs, count):
            raise RuntimeError("an illegal memory access was encountered")

    line = measured(Faulty())
    assert "illegal memory access" in line["status"]
    assert line["ours_us"] is None


def test_inputs_live_as_long_as_their_replays():
    """A graph knows addresses only: what it reads must not be freed before the last sample."""
    inputs = []

    def make(generator):
        made = {"x": torch.randn(8, generator=generator)}
        inputs.append(weakref.ref(made["x"]))
        return made

    class Watching(CpuClock):
        def captured(self, run):
            return (lambda: None), run()

        def sample(self, runs, count):
            gc.collect()
            assert all(reference() is not None for reference in inputs)
            return super().sample(runs, count)

    line = measured(Watching(), make=make, error=lambda given, out: 0.0)
    assert line["status"] == "run"
    assert len(inputs) == 2


def test_after_a_fault_the_rest_runs_in_a_new_process(tmp_path, monkeypatch):
    class Dying(CpuClock):
        empty_us = 4.0

        def is_alive(self):
            return not line_seen

    line_seen, started = [], []
    monkeypatch.setattr(harness, "Clock", Dying)
    monkeypatch.setattr(harness.card, "measure", lambda clock: CARD)
    monkeypatch.setattr(harness.card, "about", dict)
    rows = [row(shape={"T": t}) for t in (1, 2, 3)]
    module = SimpleNamespace(rows=lambda: rows)
    monkeypatch.setattr(harness, "declared", lambda name: module)

    def execute(program, words):
        started.append(words[-1])
        raise SystemExit

    monkeypatch.setattr(harness.os, "execv", execute)
    main = SimpleNamespace(__spec__=SimpleNamespace(name="benchmarks.run"))
    monkeypatch.setitem(harness.sys.modules, "__main__", main)
    options = harness.parser("test").parse_args([f"--out={tmp_path}"])
    options.peers = None
    monkeypatch.setattr(
        harness.sys.stdout, "write", lambda text: "T=2" in text and line_seen.append(1)
    )
    with pytest.raises(SystemExit):
        harness.run(["one"], options)
    assert started == ["--after=one/2"]
    line_seen.clear()
    options.after = "one/2"
    assert harness.run(["one"], options)
    names = [line.get("row") for line in harness.recorded("one", tmp_path)]
    assert names == [None, "double T=1", "double T=2", "double T=3"]


def test_a_peer_that_does_not_load_is_a_line_and_no_win():
    line = measured(peers=("nobody:case",), goals=(Goal("peer_ratio", 1.3),))
    assert "no folder of peers" in line["candidates"]["peer nobody:case"]["not_run"]
    assert line["goals"][0]["met"] is None


@pytest.mark.parametrize(
    ("goal", "value", "met"),
    [
        (Goal("over_floor", 1.3), 1.25, True),
        (Goal("over_floor", 1.26), 1.25, False),  # within the spread
        (Goal("us", 20.0), 12.5, True),
        (Goal("over_empty_us", 5.0), 8.5, False),
        (Goal("reference_ratio", 3.0), 4.0, True),
        (Goal("peer_ratio", 1.3), 1.2, False),
        (Goal("peer_ratio", 1.3, "slow"), 1.6, True),
        (Goal("peer_ratio", 1.3, "missing"), None, None),
    ],
)
def test_goals(goal, value, met):
    found = {
        "ours": {"us": 12.5, "spread": 0.02},
        "reference": {"us": 50.0},
        "peer fast:a": {"us": 15.0},
        "peer slow:a": {"us": 20.0},
        "peer missing:a": {"not_run": "no wheel"},
    }
    judged = harness.judged(goal, row(floor_bytes=40_000_000), CARD, found)
    assert (judged["value"], judged["met"]) == (value, met)


def test_the_floor_is_the_larger_of_bytes_and_operations():
    assert CARD.floor_us(4_000_000) == pytest.approx(1.0)
    assert CARD.floor_us(4_000_000, 8 * 10**9) == pytest.approx(10.0)
    assert CARD.floor_us(4_000_000, 8 * 10**9, "fp8") == pytest.approx(5.0)


def test_errors_see_nan_and_shapes():
    one = torch.ones(3)
    assert relative_error(torch.tensor([1.0, 1.0, math.nan]), one) == math.inf
    assert relative_error(torch.ones(2), one) == math.inf
    assert unequal(torch.tensor([1, 2]), torch.tensor([1, 3])) == 1
    assert unequal(torch.ones(2), one) == math.inf


def test_a_summary_holds_the_spread_of_its_halves():
    found = harness.summary([10.0] * 10, [11.0] * 10)
    assert (found["us"], found["samples"]) == (10.5, 20)
    assert found["spread"] == pytest.approx(1 / 10.5, abs=1e-4)
