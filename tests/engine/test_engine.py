"""The engine against the plain model: whatever the chunks, batches, pages and prefill mode."""

import itertools

import pytest
import torch

from openv41.layers.store import Slot, Spans
from openv41.model.prefill import PrefillMode
from tests.close import assert_close
from tests.engine.mini_engine import (
    LENGTHS,
    WINDOW,
    arm,
    engine_of,
    greedy,
    plain_logits,
    stored_rows,
)
from tests.layers.mini import random_ids

EXACT_MODES = (PrefillMode.FULL, PrefillMode.EXACT)
CHUNKS = (1, 2, 3, WINDOW - 1, WINDOW, WINDOW + 1, 512)
PAGE_SIZES, BUDGETS = (2, 6, 64), (1, 5, 512)
IN_SHORT = {  # the others are proofs
    *(("exact", 2, False), ("exact", 5, False), ("full", 3, False)),
    *(("exact", 4, True), ("full", 512, True)),
    *(("exact", 2, 5), ("exact", 64, 512), ("full", 6, 5)),
}


def cases(*axes):
    """All combinations; those outside IN_SHORT are marked as proofs."""
    return [
        pytest.param(*values, marks=[] if values in IN_SHORT else pytest.mark.prove)
        for values in itertools.product(*axes)
    ]


def assert_equals_plain(engine, prompts, answers, *, bitwise):
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        want = plain_logits(engine.model, prompt, answer.tokens)
        got = torch.stack(engine.drawn_from[number])
        assert answer.tokens == tuple(want.argmax(1).tolist()), f"prompt of {len(prompt)}"
        if bitwise:
            assert torch.equal(got, want), f"prompt of {len(prompt)}"
        else:
            assert_close(f"prompt of {len(prompt)}", got, want, rtol=1e-9, atol=1e-9)


def assert_no_page_is_lost(engine):
    engine.prefixes.clear()
    assert engine.store.allocator.free == engine.store.cache.num_pages


@pytest.mark.parametrize(
    ("mode", "chunk", "bitwise"), cases(EXACT_MODES, sorted(set(CHUNKS)), (False, True))
)
def test_requests_side_by_side_equal_the_plain_model(mode, chunk, bitwise):
    model = arm(torch.float32 if bitwise else torch.float64, bitwise=bitwise)
    engine = engine_of(model, tokens_per_step=chunk * len(LENGTHS), mode=mode)
    prompts = [random_ids(length, seed=length) for length in LENGTHS]
    answers = engine.generate([greedy(p, 4 + len(p) % 3) for p in prompts])
    assert_equals_plain(engine, prompts, answers, bitwise=bitwise)
    assert_no_page_is_lost(engine)


@pytest.mark.parametrize(("mode", "page_size", "budget"), cases(EXACT_MODES, PAGE_SIZES, BUDGETS))
def test_page_sizes_and_a_budget_that_leaves_some_waiting(mode, page_size, budget):
    model = arm(torch.float64, bitwise=False)
    cache = {"page_size": page_size, "max_requests": 3}
    engine = engine_of(model, tokens_per_step=budget, mode=mode, cache=cache)
    prompts = [random_ids(length, seed=length) for length in (17, 1, 30, 9, 4)]
    answers = engine.generate([greedy(p) for p in prompts])
    assert_equals_plain(engine, prompts, answers, bitwise=False)
    assert all(sum(n for _, n in batch) <= budget for batch in engine.batches)
    assert_no_page_is_lost(engine)


@pytest.mark.parametrize("mode", EXACT_MODES)
def test_stored_kv_equals_that_of_the_plain_model(mode):
    model = arm(torch.float32, bitwise=True)
    engine = engine_of(model, tokens_per_step=7, mode=mode)
    prompt = random_ids(29)
    number = engine.submit(greedy(prompt, 30), lambda event: None)
    for _ in range(12):
        engine.step()
    length = engine.store.length(number)
    tokens = engine._jobs[number].tokens[:length]
    want = stored_rows(model, tokens)
    for source in model.config.kv_sources:
        for kind in ("main", "index"):
            stop = length // model.config.compress_ratios[source]
            slot = Slot(kind, source)
            got = engine.store.read(slot, Spans((number,), (0,), (stop,)))
            assert torch.equal(got, want.read(slot, Spans((0,), (0,), (stop,)))), slot
    for layer in range(model.config.num_layers):
        slot = Slot("window", layer)
        first = length - (WINDOW - 1)
        got = engine.store.read(slot, Spans((number,), (first,), (length,)))
        assert torch.equal(got, want.read(slot, Spans((0,), (first,), (length,)))), slot


@pytest.mark.parametrize("numerics", [pytest.param("f32qat", marks=pytest.mark.shapes), "released"])
def test_packed_pages_equal_rounded_floats(numerics):
    """unpack(pack(x)) is the fake quantiser, so a packed cache changes nothing."""
    model = arm(torch.float32, bitwise=True, numerics=numerics)
    engine = engine_of(model, tokens_per_step=11)
    assert engine.store.pages[Slot("main", 5)].dtype == torch.uint8
    prompts = [random_ids(length, seed=length) for length in (40, 9, 23)]
    answers = engine.generate([greedy(p) for p in prompts])
    assert_equals_plain(engine, prompts, answers, bitwise=True)


def test_a_request_gives_up_its_pages_and_loses_nothing():
    """Three requests that together need more pages than there are."""
    model = arm(torch.float64, bitwise=False)
    engine = engine_of(model, tokens_per_step=16, cache={"num_pages": 15, "page_size": 4})
    prompts = [random_ids(length, seed=length) for length in (24, 21, 18)]
    answers = engine.generate([greedy(p, 12) for p in prompts])
    assert engine.stats().preemptions > 0
    assert engine.stats().prefix_hit_tokens == 0, "what was its own is no hit"
    assert all(answer.cached_tokens == 0 for answer in answers)
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        assert len(answer.tokens) == 12
        want = plain_logits(model, prompt, answer.tokens)
        assert_close(
            f"{number}", torch.stack(engine.drawn_from[number]), want, rtol=1e-9, atol=1e-9
        )
    assert_no_page_is_lost(engine)


def test_pages_that_no_job_and_no_cache_holds_are_a_fault():
    """The only job does not give up its pages to itself for ever."""
    engine = engine_of(arm(torch.float64, bitwise=False), cache={"num_pages": 5})
    engine.store.allocator.take(2)  # lost
    with pytest.raises(AssertionError, match="1 pages are missing beside the 3 of the only job"):
        engine.generate([greedy(random_ids(11), 9)])
    assert engine.is_idle
