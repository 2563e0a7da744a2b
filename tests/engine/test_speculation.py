"""Speculation must not be seen: answers, caches and events are those of plain decoding."""

import itertools

import pytest
import torch

from openv41.engine import drafting
from openv41.engine.speculation import VerifyAll
from openv41.layers.batch import Batch
from openv41.layers.store import Slot, Spans
from openv41.model.cache import DenseStore
from openv41.model.prefill import PrefillMode
from tests.close import assert_close
from tests.engine.drafts import Script, lose_rows, plain_answers, speculating, target
from tests.engine.mini_engine import WINDOW, greedy
from tests.layers.mini import random_ids

BLOCK = 5


@pytest.fixture(scope="module")
def model():
    return target()


def check_states(engine, *, bitwise):
    """Everything that is kept of the requests equals a fresh forward over their tokens."""
    store, config = engine.store, engine.model.config
    engine.drafting.tell()
    jobs = [job for job in engine.scheduler.running if not job.is_prefill]
    tokens = [job.tokens[: job.done] for job in jobs]
    plain, batch = DenseStore(config.compress_ratios), Batch.from_documents(tokens)
    with torch.no_grad():
        taps = engine.model(batch, plain).taps
    for row, (job, ids) in enumerate(zip(jobs, tokens, strict=True)):
        assert len(job.tokens) == job.done + 1 == store.length(job.number) + 1
        for slot, first, stop in kept_rows(config, len(ids)):
            assert_there(store, slot, job.number, first, stop)
            mine = store.read(slot, Spans((job.number,), (first,), (stop,)))
            want = plain.read(slot, Spans((row,), (first,), (stop,)))
            assert_same(f"{slot} after {len(ids)}", mine, want, bitwise=bitwise)
        slot, first = engine.drafting.drafter.slot, max(0, len(ids) - WINDOW)
        assert_there(store, slot, job.number, first, len(ids))
        mine = store.read(slot, Spans((job.number,), (first,), (len(ids),)))[:, 0]
        begin = batch.first_rows[row]
        want = taps[begin + first : begin + len(ids)].mean(-1)
        assert_same(f"drafter after {len(ids)}", mine, want, bitwise=bitwise)


def kept_rows(config, length):
    """Every slot that a later step reads, and its rows."""
    for source in config.kv_sources:
        ratio = config.compress_ratios[source]
        yield from ((Slot(kind, source), 0, length // ratio) for kind in ("main", "index"))
        if ratio == 2 and length % 2:
            yield Slot("pending", source), length - 1, length
    for layer in range(config.num_layers):
        yield Slot("window", layer), max(0, length - (WINDOW - 1)), length
    yield Slot("tokens", -1), max(0, length - (config.engram.max_ngram - 1)), length


def assert_there(store, slot, request, first, stop):
    if slot in store.rings:
        [there] = store.rows_before(slot, (request,), (stop,))
        assert there >= stop - first, f"{slot} has {there} rows before {stop}"


def assert_same(name, mine, want, *, bitwise):
    if bitwise:
        assert torch.equal(mine, want), name
    else:
        assert_close(name, mine, want, rtol=1e-9, atol=1e-9)


def every_order(most=BLOCK):
    """Numbers 0 to ``most`` such that each is followed by each."""
    left, found = {m: list(range(most + 1)) for m in range(most + 1)}, [0]
    while left[found[-1]]:
        found.append(left[found[-1]].pop())
    assert {*itertools.pairwise(found)} == {*itertools.product(range(most + 1), repeat=2)}
    return found


def run_rounds(model, rounds, *, bitwise, mode=PrefillMode.EXACT):
    """Six requests whose rounds together have every number of held drafts after every other."""
    orders, prompts = every_order(), [random_ids(n, seed=n) for n in (3, 4, 9, 6, 13, 20)]
    held = [[orders[(6 * i + n) % 36] for n in range(rounds)] for i in range(6)]
    requests = [greedy(p, sum(h) + len(h) + 2) for p, h in zip(prompts, held, strict=True)]
    room = {"cache": {"num_pages": 600}}  # no draft lacks a page
    answers = plain_answers(model, requests, mode=mode, **room)
    number = [iter(h) for h in held]
    script = Script(
        {i: [*p, *a.tokens] for i, (p, a) in enumerate(zip(prompts, answers, strict=True))},
        lambda request, _: next(number[request], 0),
    )
    engine = speculating(model, script, mode=mode, **room)
    events = [[] for _ in requests]
    for request, sink in zip(requests, events, strict=True):
        engine.submit(request, sink.append)
    engine.step()
    for place in range(rounds):
        before = [len(job.tokens) for job in engine.scheduler.running]
        engine.step()
        grown = [len(job.tokens) for job in engine.scheduler.running]
        assert [b - a - 1 for a, b in zip(before, grown, strict=True)] == [h[place] for h in held]
        check_states(engine, bitwise=bitwise)
    while not engine.is_idle:
        engine.step()
    for answer, sent in zip(answers, events, strict=True):
        assert tuple(event.token for event in sent) == answer.tokens
    return engine


def test_state_after_every_round_is_that_of_plain_decoding(model):
    """T17: 0 to 5 drafts hold, in every order."""
    engine = run_rounds(model, 7, bitwise=False)
    stats = engine.stats()
    assert stats.draft_rounds == 6 * 7
    assert stats.drafts_accepted[4] >= 7
    assert stats.mean_accepted_length == 1 + sum(stats.drafts_accepted) / stats.draft_rounds
    assert stats.wasted_rows == sum(stats.drafts_verified) - sum(stats.drafts_accepted)


@pytest.mark.prove
@pytest.mark.parametrize("mode", [PrefillMode.EXACT, PrefillMode.FULL])
def test_state_after_hundreds_of_rounds_is_that_of_plain_decoding_to_the_bit(record_proof, mode):
    engine = run_rounds(target(torch.float32, bitwise=True), 60, bitwise=True, mode=mode)
    stats = engine.stats()
    record_proof(
        mode=mode.value,
        requests=6,
        rounds=stats.draft_rounds,
        rejected_drafts=stats.wasted_rows,
        states_that_differ=0,
    )
    assert stats.draft_rounds >= 360


def test_a_rollback_that_takes_too_much_is_noticed(model, monkeypatch):
    """Control of the states: the last row that holds is lost with those that do not."""
    right = speculating

    def faulty(*args, **options):
        engine = right(*args, **options)
        lose_rows(engine.store)
        return engine

    monkeypatch.setitem(globals(), "speculating", faulty)
    with pytest.raises(AssertionError, match="after"):
        run_rounds(model, 3, bitwise=False)


class Sometimes(VerifyAll):
    """Drafts in every fifth step."""

    def __init__(self):
        self.steps = 0

    def plan(self, requests):
        self.steps += 1
        return self.steps % 5 == 0


@pytest.mark.parametrize("at_once", [2048, pytest.param(3, marks=pytest.mark.prove)])
def test_the_drafter_hears_of_steps_without_drafts_before_it_is_asked(model, monkeypatch, at_once):
    """Their features wait, the last window of each request; also over a restart."""
    monkeypatch.setattr(drafting, "ROWS_AT_ONCE", at_once)
    requests = [greedy(random_ids(n, seed=n), 20) for n in (3, 9, 14)]
    answers = plain_answers(model, requests)
    texts = {
        i: [*r.prompt, *a.tokens] for i, (r, a) in enumerate(zip(requests, answers, strict=True))
    }
    engine = speculating(
        model,
        Script(texts, lambda *_: 3),
        speculator=Sometimes(),
        prefix_cache=False,
        cache={"num_pages": 20},
    )
    for request in requests:
        engine.submit(request, lambda event: None)
    for _ in range(8):
        engine.step()
        assert all(len(job.features) < WINDOW + 6 for job in engine.scheduler.running)
    check_states(engine, bitwise=False)
    engine.scheduler.restart(engine.scheduler.running[0])
    while not engine.is_idle:
        engine.step()
    drafter = engine.drafting.drafter
    assert len(drafter.seen) >= 6
    assert all(past >= min(position, WINDOW) for _, position, past in drafter.seen)
    assert engine.drafting.is_on
