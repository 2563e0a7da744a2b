"""Decode steps whose addresses are made on the device: same answers, and nothing waits for it."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from openv41 import ops
from openv41.engine import decode_graph
from openv41.engine.captured import Captured
from openv41.engine.decode_graph import DecodeSteps, why_not
from openv41.engine.draft_graph import DraftSteps
from openv41.engine.draw_graph import DrawGraphs, Draws
from openv41.engine.request import Request
from openv41.engine.sampler import SamplingConfig
from openv41.engine.speculation import DraftChoice, SpeculationConfig, VerifyAll
from openv41.errors import InputError
from openv41.layers import experts, hierarchical_indexer
from openv41.layers.decode_context import DecodeContext, DecodeState
from openv41.model.dspark import DSparkDrafter
from openv41.ops import pairs
from openv41.ops._dispatch import Op
from tests.close import assert_close
from tests.engine.drafts import Script, plain_answers, speculating, target, target_config
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
    """The engine with steps addressed on the device; also those of its drafter."""
    drafting, own, block = engine.drafting, None, None
    if drafting is not None and isinstance(drafting.drafter, DSparkDrafter):
        own = drafting.drafter
        drafting.graphs = DraftSteps(own, engine.model, engine.store, engine.num_tokens)
        block = drafting.graphs.block
    engine.decode = DecodeSteps(engine.model, engine.store, own)
    banned, rows = engine.model.config.image_token_id, engine.decode.most_rows
    engine.draws = Draws(engine.num_tokens, banned, engine.device, rows, block)
    return engine


class Replay:
    """Does again what was captured: with what lies where it lay, to where the answer lies."""

    def __init__(self, compute, size):
        self.again = lambda: compute(size)
        self.answer = compute(size)

    def replay(self):
        for name, fresh in vars(self.again() or SimpleNamespace()).items():
            if fresh is not None:
                getattr(self.answer, name).copy_(fresh)


@pytest.fixture(autouse=True)
def captured_on_a_cpu(monkeypatch):
    def capture(self, size):
        graph = Replay(self._compute, size)
        return graph, graph.answer

    monkeypatch.setattr(Captured, "_capture", capture)


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
    call = Op.__call__

    def op(self, *args, **options):
        before, refusing.is_on = refusing.is_on, refusing.is_on and not self.has_kernel_file
        try:
            return call(self, *args, **options)
        finally:
            refusing.is_on = before

    def computed(run):
        def refused(self, size):
            with refusing:
                return run(self, size)

        return refused

    def on_a_gpu(ids, num):
        return ids.new_zeros(num).scatter_add_(0, ids.flatten(), torch.ones_like(ids.flatten()))

    monkeypatch.setattr(Op, "__call__", op)
    monkeypatch.setattr(pairs, "count_ids", on_a_gpu)
    monkeypatch.setattr(experts, "_is_read_by_host", lambda _: False)
    parts = [(DecodeSteps, "_compute"), (DraftSteps, "_draft"), (DrawGraphs, "_compute")]
    for kind, name in parts:
        monkeypatch.setattr(kind, name, computed(getattr(kind, name)))


@pytest.fixture(autouse=True)
def no_failed_batch(caplog):
    """Nothing may fail: a request that starts again would hide it."""
    yield
    assert not [r.message for r in caplog.records if r.levelname == "ERROR"]


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
    sizes = set()
    compute = DecodeSteps._compute
    monkeypatch.setattr(
        DecodeSteps, "_compute", lambda self, size: (sizes.add(size), compute(self, size))[1]
    )
    engine = stepping(engine_of(model, **options))
    got = engine.generate(requests)
    assert {rows for rows, _ in sizes} >= {1, 2, 3}, sizes
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


@pytest.mark.parametrize("numerics", ["f32", "f32qat"])
@pytest.mark.parametrize("drafts", DraftChoice)
def test_the_drafter_drafts_alike(monkeypatch, no_waiting, drafts, numerics):
    """Requests at and above temperature 0 that come, go and draft together, windows that slide."""
    model = arm(torch.float64, bitwise=False, numerics=numerics, config=target_config())
    hot = SamplingConfig(temperature=1.3, seed=5)
    requests = [
        Request(
            prompt=tuple(random_ids(n, seed=n)), max_tokens=n, sampling=sampling, ignore_eos=True
        )
        for n, sampling in itertools.product((3, 8, 17, 20), (SamplingConfig(temperature=0), hot))
    ]
    options = {"speculation": SpeculationConfig(drafts=drafts), "tokens_per_step": 40}
    options["cache"] = {"max_requests": 7}
    want, engine = engine_of(model, **options), stepping(engine_of(model, **options))
    drafted = set()
    call = Captured.__call__

    def spied(self, size):
        if self is engine.drafting.graphs.drafted:
            drafted.add(size)
        return call(self, size)

    monkeypatch.setattr(Captured, "__call__", spied)
    answers = [[a.tokens for a in e.generate(requests)] for e in (want, engine)]
    assert answers[0] == answers[1]
    assert engine.draws.graphs.captured.replays > 3
    assert {size for size, _ in drafted} >= {2, 4, 6}, drafted
    assert want.stats().drafts_accepted == engine.stats().drafts_accepted
    accepted = sum(want.stats().drafts_accepted)
    assert sum(want.stats().drafts_verified) > accepted
    assert accepted > 0 or drafts is DraftChoice.GREEDY
    assert engine.drafting.is_on


def test_steps_that_are_captured_ahead_leave_nothing_behind():
    """All sizes, in an engine whose cache is full of what it knows; not while requests run."""
    model = arm(torch.float64, bitwise=False, config=target_config())
    requests = [greedy(random_ids(n, seed=n), 9) for n in (30, 17, 5)]
    options = {"cache": {"max_requests": 3, "num_pages": 18}}
    want, engine = engine_of(model, **options), stepping(engine_of(model, **options))
    for turn in range(2):
        if turn:
            assert engine.store.allocator.free < 6, "nothing is known"
            engine.capture_steps()
            assert engine.decode.captured.graphs >= len(engine.decode.sizes)
            assert engine.drafting.graphs.drafted.graphs >= 6
        known, found = ([a.tokens for a in e.generate(requests)] for e in (want, engine))
        assert known == found
    engine.submit(requests[0], [].append)
    with pytest.raises(InputError, match="requests run"):
        engine.capture_steps()


class Hears(VerifyAll):
    """Notes what it is told."""

    def __init__(self):
        self.asked, self.ended, self.forgotten = [], [], {}

    def lengths(self, requests, logits, limits):
        self.asked.append(list(requests))
        return super().lengths(requests, logits, limits)

    def verified(self, requests, lengths, accepted):
        self.ended += [list(requests)] if requests else []

    def forget(self, request):
        assert request not in self.forgotten
        self.forgotten[request] = len(self.ended)


@pytest.mark.parametrize("wrap", [lambda engine: engine, stepping])
def test_a_speculator_hears_of_every_step_once(wrap):
    """In their order, and of no request that it was to forget; the last step may be untold."""
    model = arm(torch.float64, bitwise=False, config=target_config())
    engine = wrap(engine_of(model, cache={"max_requests": 3}))
    engine.drafting.speculator = hears = Hears()
    engine.generate([greedy(random_ids(n, seed=n), n) for n in (5, 9, 14, 20)])
    assert len(hears.asked) > 9
    assert hears.ended == hears.asked[: len(hears.ended)]
    assert len(hears.ended) >= len(hears.asked) - 1
    assert len(hears.forgotten) >= 3
    for request, told in hears.forgotten.items():
        assert all(request not in step for step in hears.ended[told:]), request


def test_a_prompt_does_not_take_others_out_of_their_graphs(monkeypatch):
    """A step with both has two parts; the drafter knows at once what a prompt leaves."""
    model = arm(torch.float64, bitwise=False, config=target_config())
    options = {"cache": {"max_requests": 2}, "tokens_per_step": 12}
    requests = [greedy(random_ids(n, seed=n), 12) for n in (5, 40)]
    want = [answer.tokens for answer in engine_of(model, **options).generate(requests)]
    engine, computed = stepping(engine_of(model, **options)), []
    forward = type(model).forward
    monkeypatch.setattr(
        type(model),
        "forward",
        lambda self, batch, *rest, **more: (
            computed.append(batch.requests) or forward(self, batch, *rest, **more)
        ),
    )
    assert [answer.tokens for answer in engine.generate(requests)] == want
    assert computed[0] == (0, 1)
    assert len(computed) > 3
    assert set(computed[1:]) == {(1,)}, "the first request decodes in graphs"
    assert engine.stats().draft_steps > 3


def test_steps_that_find_no_room_are_told(monkeypatch):
    def full(self, page):
        raise torch.OutOfMemoryError("2 GiB asked for")

    engine = stepping(engine_of(arm(torch.float64, bitwise=False, config=target_config())))
    free = engine.store.allocator.free
    monkeypatch.setattr(DecodeSteps, "prepare", full)
    with pytest.raises(InputError, match=r"find no room.*2 GiB asked for"):
        engine.capture_steps()
    assert engine.store.allocator.free == free


def test_rows_of_one_group_write_the_same_entry():
    """The order of two writes to one place is open on a GPU: the first row of a group that the
    next one completes must not write what it knows alone."""
    places, positions = torch.tensor([3, 3, 3, 1, 1, 1]), torch.tensor([4, 5, 6, 7, 8, 8])
    state = DecodeState(
        token_ids=places,
        positions=positions,
        places=places,
        table=places[:, None],
        page_size=4,
        rings={},
        pages={},
        frequencies={},
    )
    ctx = DecodeContext(state, mini_config().attention)
    whole = [[1, 7], [1, 7], [2, 8], [3, 9], [4, 10], [5, 11]]  # behind 6 pending rows
    assert ctx.entries(2).member_rows.tolist() == whole
    assert ctx.entries(2).new_positions.tolist() == [4, 4, 6, 6, 8, 8]
    assert ctx.entries(1).member_rows.tolist() == [[n + 6] for n in range(6)]


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
