"""Decode steps whose addresses are made on the device: same answers, and nothing waits for it."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from openv41 import ops
from openv41.engine import decode_graph
from openv41.engine.decode_graph import DecodeSteps, why_not
from openv41.engine.speculation import VerifyAll
from openv41.layers import hierarchical_indexer
from openv41.ops._dispatch import Op
from tests.close import assert_close
from tests.engine.drafts import Script, plain_answers, speculating, target
from tests.engine.mini_engine import arm, engine_of, greedy
from tests.layers.mini import mini_config, random_ids

WAITING = {
    "_local_scalar_dense",
    "nonzero",
    "equal",
    "is_nonzero",
    "_unique2",
    "unique_dim",
    "masked_select",
    "unique_consecutive",
    "bincount",
    "lift_fresh",  # of torch.tensor: copied from the host
}


def stepping(engine):
    """The engine with decode steps addressed on the device, call by call."""
    engine.decode = DecodeSteps(engine.model, engine.store, captures=False)
    return engine


class NoWaiting(TorchDispatchMode):
    """Refuses calls that read what is on the device."""

    def __init__(self):
        super().__init__()
        self.is_on = True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[1]
        if self.is_on:
            assert name not in WAITING, f"{name} waits for the device"
            indices = args[1] if name in ("index", "index_put_", "index_put") else ()
            assert all(i is None or i.dtype != torch.bool for i in indices), "a mask is counted"
            moved = isinstance((kwargs or {}).get("device"), torch.device)
            assert name != "_to_copy" or not moved, "a copy to another device"
        return func(*args, **(kwargs or {}))


@pytest.fixture
def no_waiting(monkeypatch):
    """Decode steps must not wait; a reference that has a kernel on a GPU may."""
    refusing = NoWaiting()
    call, compute = Op.__call__, DecodeSteps._compute

    def op(self, *args, **options):
        before, refusing.is_on = refusing.is_on, refusing.is_on and not self.has_kernel_file
        try:
            return call(self, *args, **options)
        finally:
            refusing.is_on = before

    def computed(self, size):
        with refusing:
            return compute(self, size)

    monkeypatch.setattr(Op, "__call__", op)
    monkeypatch.setattr(DecodeSteps, "_compute", computed)


@pytest.mark.parametrize("numerics", ["f32", "f32qat", "packed"])
def test_steps_wait_for_nothing_and_answer_alike(monkeypatch, no_waiting, numerics):
    """Requests that join and leave, pages that are added, and a larger page table."""
    if numerics == "packed":
        numerics = "f32qat"
        monkeypatch.setattr(hierarchical_indexer, "reads_packed_rows", lambda *_: True)
    monkeypatch.setattr(decode_graph, "LEAST_POSITIONS", 16)
    config = mini_config()
    config = replace(config, attention=replace(config.attention, head_dim=32, rope_dim=8))
    model = arm(torch.float32, bitwise=False, numerics=numerics, config=config)
    lengths = {1: 9, 3: 2, 9: 5, 29: 5}
    requests = [greedy(random_ids(n, seed=n), answer) for n, answer in lengths.items()]
    options = {
        "tokens_per_step": 23,
        "prefix_cache": False,
        "cache": {"num_pages": 40, "max_requests": 4},
    }
    want = engine_of(model, **options).generate(requests)
    engine = stepping(engine_of(model, **options))
    sizes = set()
    compute = DecodeSteps._compute
    monkeypatch.setattr(
        DecodeSteps, "_compute", lambda self, size: (sizes.add(size), compute(self, size))[1]
    )
    got = engine.generate(requests)
    assert {requests for requests, _ in sizes} >= {1, 2, 4}, sizes
    assert len({pages for _, pages in sizes}) > 1, sizes
    assert [a.tokens for a in got] == [a.tokens for a in want]


def test_steps_leave_what_prefixes_and_truncations_need():
    """Known prompts are found again, windows kept; state goes on as if steps had been calls."""
    model = arm(torch.float64, bitwise=False)
    options = {"prefix_cache": True, "max_snapshots": 4, "tokens_per_step": 16}
    engines = engine_of(model, **options), stepping(engine_of(model, **options))
    prompts = [random_ids(n, seed=n) for n in (5, 17)]
    for turn in range(3):
        want, got = (e.generate([greedy(p, 7 + turn) for p in prompts]) for e in engines)
        assert [a.tokens for a in got] == [a.tokens for a in want]
        assert [a.cached_tokens for a in got] == [a.cached_tokens for a in want]
        prompts = [[*p, *a.tokens] for p, a in zip(prompts, got, strict=True)]
    for a, b in zip(*(e.drawn_from.values() for e in engines), strict=True):
        assert_close("logits", torch.stack(b), torch.stack(a), rtol=1e-9, atol=1e-9)


class EveryOther(VerifyAll):
    """Drafts in every other step."""

    drafts = True

    def plan(self, requests):
        self.drafts = not self.drafts
        return self.drafts and super().plan(requests)


def test_steps_stand_between_verified_drafts():
    """Rejected drafts are taken back; drafters get the features of both kinds of steps."""
    model = target()
    requests = [greedy(random_ids(n, seed=n), 14) for n in (5, 17)]
    want = [answer.tokens for answer in plain_answers(model, requests)]
    known = [[*r.prompt, *tokens] for r, tokens in zip(requests, want, strict=True)]
    written = []
    for wrap in (lambda engine: engine, stepping):
        script = Script(known, lambda _, position: position % 3)
        engine = wrap(speculating(model, script, speculator=EveryOther()))
        assert [answer.tokens for answer in engine.generate(requests)] == want
        assert engine.stats().draft_steps > 2
        written.append(engine.drafting.drafter.seen)
    assert written[0] == written[1]


def test_what_cannot_be_captured_says_why():
    config = mini_config()
    wide = replace(config, attention=replace(config.attention, head_dim=64, rope_dim=8))
    assert why_not(arm(torch.float32, bitwise=False, config=config)) is None
    assert why_not(arm(torch.float32, bitwise=False, numerics="f32qat", config=wide)) is None
    assert "float64" in why_not(arm(torch.float64, bitwise=False, config=config))
    assert "deterministic" in why_not(arm(torch.float32, bitwise=True, config=config))
    assert "8 numbers" in why_not(arm(torch.float32, bitwise=False, numerics="f32qat"))
    with ops.kernels("reference"):
        assert "no kernels run" in why_not(arm(torch.float32, bitwise=False, config=wide))
