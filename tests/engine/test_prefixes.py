"""Cold equals warm: prefix hits of every length, after eviction, from disk, with others between."""

import logging

import pytest
import torch

from openv41.engine.answering import Collector
from openv41.engine.engine import Engine, EngineConfig
from openv41.engine.pages import OutOfPages
from openv41.engine.prefix_tree import PrefixTree
from openv41.errors import ConfigError, InputError
from openv41.model.prefill import PrefillMode
from tests.close import assert_close
from tests.engine.mini_engine import WINDOW, Letters, arm, engine_of, greedy, plain_logits
from tests.layers.mini import random_ids

LENGTH = 44  # more than the rows of a replay, 9 layers times 3


SHARED = (1, 28, 43)


@pytest.fixture(scope="module")
def model():
    return arm(torch.float64, bitwise=False)


@pytest.fixture(scope="module")
def bitwise_model():
    return arm(torch.float32, bitwise=True)


def ask(engine, prompt, count=3):
    """The answer, and the logits that its tokens were drawn from."""
    number = engine._next
    [answer] = engine.generate([greedy(prompt, count)])
    return answer, torch.stack(engine.drawn_from[number])


def page_sums(engine):
    """Bytes of every page that is held."""
    allocator = engine.store.allocator
    held = [p for p in range(engine.store.cache.num_pages) if allocator.references(p)]
    return dict(zip(held, engine.store.read_pages(held), strict=True))


@pytest.mark.parametrize("mode", [PrefillMode.FULL, PrefillMode.EXACT])
@pytest.mark.parametrize("max_snapshots", [0, 64])
@pytest.mark.parametrize(
    "lengths", [SHARED, pytest.param(tuple(range(LENGTH)), marks=pytest.mark.prove)], ids=len
)
def test_a_hit_of_any_length_equals_a_cold_run(model, mode, max_snapshots, lengths):
    """With and without snapshots, odd lengths included, another request between."""
    first, other = random_ids(LENGTH, seed=1), random_ids(LENGTH, seed=2)
    for shared in lengths:
        engine = engine_of(model, mode=mode, max_snapshots=max_snapshots)
        ask(engine, first, 1)
        ask(engine, random_ids(11, seed=3), 1)
        prompt = first[:shared] + other[shared:]
        before = page_sums(engine)
        answer, got = ask(engine, prompt, 2)
        assert answer.cached_tokens >= shared - 1
        want = plain_logits(model, prompt, answer.tokens)
        assert_close(f"{shared} shared", got, want, rtol=1e-9, atol=1e-9)
        after = page_sums(engine)
        kept = [page for page in before if page in after]
        assert kept
        assert all(torch.equal(before[p], after[p]) for p in kept if is_full(engine, p)), shared


@pytest.mark.parametrize("shared", [29, pytest.param(43, marks=pytest.mark.shapes)])
def test_a_hit_equals_a_cold_run_to_the_bit(bitwise_model, shared):
    first, other = random_ids(LENGTH, seed=1), random_ids(LENGTH, seed=2)
    engine = engine_of(bitwise_model, tokens_per_step=23)
    ask(engine, first, 1)
    prompt = first[:shared] + other[shared:]
    answer, got = ask(engine, prompt, 2)
    assert torch.equal(got, plain_logits(bitwise_model, prompt, answer.tokens))


def is_full(engine, page):
    """Whether a page lies in the tree as a whole page, so that nobody may write it."""
    size = engine.store.cache.page_size
    return any(n.page == page and n.end % size == 0 for n in engine.prefixes._exact._order)


def test_the_same_prompt_again_computes_at_least_one_token(model):
    engine, prompt = engine_of(model), random_ids(LENGTH)
    cold, cold_logits = ask(engine, prompt)
    warm, warm_logits = ask(engine, prompt)
    assert (cold.cached_tokens, warm.cached_tokens) == (0, LENGTH - 1)
    assert warm.tokens == cold.tokens
    assert_close("warm", warm_logits, cold_logits, rtol=1e-9, atol=1e-9)


def test_a_snapshot_saves_the_replay(model):
    """What is fed after a hit: the rest of the last page, or what the layers' windows reach."""
    prompt = random_ids(3 * LENGTH)
    fed = {}
    for snapshots in (0, 64):
        engine = engine_of(model, max_snapshots=snapshots, cache={"page_size": 8})
        first, _ = ask(engine, prompt, 9)
        engine.batches.clear()
        longer = [*prompt, *first.tokens, 5, 6, 7]
        answer, got = ask(engine, longer)
        fed[snapshots] = engine.batches[0][0][1]
        want = plain_logits(model, longer, answer.tokens)
        assert_close("after a hit", got, want, rtol=1e-9, atol=1e-9)
    assert fed[0] >= model.config.num_layers * (WINDOW - 1)
    assert fed[64] == len(longer) - 136, "from the last page boundary"


def test_a_conversation_goes_on_where_it_was(model):
    engine, text = engine_of(model), random_ids(30)
    known = 0
    for turn in range(4):
        answer, got = ask(engine, text, 5 + turn)
        assert answer.cached_tokens == known
        want = plain_logits(model, text, answer.tokens)
        assert_close(f"turn {turn}", got, want, rtol=1e-9, atol=1e-9)
        known = len(text) + len(answer.tokens) - 1
        text = [*text, *answer.tokens, *random_ids(7, seed=turn)]


def test_eviction_and_then_the_same_prompt(model):
    engine = engine_of(model, cache={"num_pages": 20})
    prompts = [random_ids(40, seed=seed) for seed in range(3)]
    for prompt in [*prompts, *prompts]:
        answer, got = ask(engine, prompt)
        want = plain_logits(model, prompt, answer.tokens)
        assert_close("after eviction", got, want, rtol=1e-9, atol=1e-9)
    engine.prefixes.clear()
    assert engine.store.allocator.free == 20


def test_a_restart_finds_the_prefix_on_disk(bitwise_model, tmp_path, caplog):
    model, prompt = bitwise_model, random_ids(LENGTH)
    first = engine_of(model, disk_folder=tmp_path, disk_bytes=1 << 20)
    ask(first, prompt)
    first.close()
    second = engine_of(model, disk_folder=tmp_path, disk_bytes=1 << 20)
    warm, logits = ask(second, prompt)
    [page] = second.prefixes._exact.match(prompt[:4]).pages
    record = second.store.read_pages([page]).numpy().tobytes()
    second.close()
    assert warm.cached_tokens == (LENGTH - 1) // 4 * 4
    assert torch.equal(logits, plain_logits(model, prompt, warm.tokens))
    [file] = [path for path in tmp_path.iterdir() if path.stat().st_size > 1000]
    data = bytearray(file.read_bytes())
    place = data.find(record)
    assert place > 0, "the first page is on the disk as it is in memory"
    data[place + 5] ^= 0xFF
    file.write_bytes(data)
    third = engine_of(model, disk_folder=tmp_path, disk_bytes=1 << 20)
    with caplog.at_level(logging.WARNING):
        answer, logits = ask(third, prompt)
    third.close()
    assert answer.cached_tokens == 0, "nothing can follow a page that is lost"
    assert "is damaged" in caplog.text
    assert torch.equal(logits, plain_logits(model, prompt, answer.tokens))


def test_the_persistent_tier_needs_to_know_the_weights(model, tmp_path):
    config = EngineConfig(disk_folder=tmp_path, disk_bytes=1 << 20)
    with pytest.raises(ConfigError, match="pages of other weights would be taken for this model's"):
        Engine(model, Letters(), config)
    engine = engine_of(model, disk_folder=tmp_path, disk_bytes=1 << 20)
    engine.close()
    with pytest.raises(InputError, match="the engine is closed; make another one"):
        ask(engine, random_ids(5))


def test_what_a_bounded_replay_computes_is_not_shared_with_exact_requests(model):
    """After a hit in bounded mode the new rows are an approximation, in a tree of their own."""
    engine = engine_of(model, mode=PrefillMode.BOUNDED)
    text = random_ids(LENGTH, seed=1)
    first, _ = ask(engine, text, 9)
    longer = [*text, *first.tokens, *random_ids(20, seed=4)]
    second, _ = ask(engine, longer, 9)
    assert second.cached_tokens == LENGTH + 8
    again = [*longer, *second.tokens, 3]
    assert engine.prefixes._exact.match(again).length == LENGTH + 8
    assert engine.prefixes._approximate.match(again).length == len(longer) + 8
    third, _ = ask(engine, again, 2)
    assert third.cached_tokens == len(longer) + 8


def test_pages_of_exact_and_approximate_prefixes_make_room(model):
    """What both trees hold is one page, and free for a request that needs it."""
    engine = engine_of(model, mode=PrefillMode.BOUNDED, cache={"num_pages": 24})
    for seed in range(5):
        text = random_ids(22, seed=seed)
        for _ in range(2):
            ask(engine, text, 4)
    stats = engine.stats()
    assert stats.pages_cached == stats.pages_used <= 24, "no request runs"
    assert engine.prefixes.can_make_room(24 - stats.pages_free)
    answer, _ = ask(engine, random_ids(17, seed=9), 60)
    assert len(answer.tokens) == 60
    assert engine.stats().preemptions == 0
    engine.prefixes.make_room(24)
    assert engine.store.allocator.free == 24


def test_without_a_page_for_the_partly_known_one_rows_are_exact(model, monkeypatch):
    """A bounded request that starts anew after all is no approximation."""
    engine = engine_of(model, mode=PrefillMode.BOUNDED)
    text = random_ids(LENGTH, seed=1)
    first, _ = ask(engine, text, 9)
    longer = [*text, *first.tokens, *random_ids(20, seed=4)]
    second, _ = ask(engine, longer, 9)
    again = [*longer, *second.tokens, 3]

    def out_of_pages(*args):
        raise OutOfPages("made up")

    monkeypatch.setattr(engine.store, "adopt", out_of_pages)
    third, _ = ask(engine, again, 2)
    assert third.cached_tokens == 0
    assert engine.prefixes._exact.match(again).length == len(again)


def test_a_request_that_waits_takes_nothing_from_the_cache(model):
    """Its turn comes once there is room, and what is cached was of use until then."""
    engine = engine_of(model, cache={"num_pages": 14})
    cached, running, waiting = (random_ids(n, seed=n) for n in (20, 16, 48))
    ask(engine, cached, 1)
    requests = [greedy(running, 5), greedy(waiting, 2)]
    answers = [Collector() for _ in requests]
    for request, answer in zip(requests, answers, strict=True):
        engine.submit(request, answer)
        engine.step()
    for _ in range(3):
        engine.step()
        assert len(engine.scheduler.waiting) == 1
        assert engine.prefixes._exact.match(cached).length == len(cached)
    while not engine.is_idle:
        engine.step()
    for request, collector in zip(requests, answers, strict=True):
        tokens = collector.answer().tokens
        assert tokens == tuple(plain_logits(model, request.prompt, tokens).argmax(1).tolist())


def test_a_request_that_starts_spares_its_own_prefix(model):
    engine = engine_of(model, cache={"num_pages": 16})
    own, other, running = (random_ids(20, seed=seed) for seed in (1, 2, 3))
    ask(engine, own, 1)
    ask(engine, other, 1)
    engine.submit(greedy(running, 3), lambda event: None)
    engine.step()
    answer, _ = ask(engine, [*own, *random_ids(8, seed=4)], 1)
    assert answer.cached_tokens == len(own)
    assert engine.prefixes._exact.match(other).length < len(other)


def test_a_long_prompt_is_remembered_page_by_page(model, monkeypatch):
    """Each page is inserted once, however the prompt is cut; anew only where it was forgotten."""
    engine, inserted = engine_of(model, tokens_per_step=4), []
    insert_page = PrefixTree._insert_page
    monkeypatch.setattr(
        PrefixTree, "_insert_page", lambda *args: inserted.append(0) or insert_page(*args)
    )
    prompt = random_ids(LENGTH)
    ask(engine, prompt, 1)
    assert len(inserted) == LENGTH // 4
    assert engine.prefixes._exact.match(prompt).length == LENGTH
    engine.prefixes.clear()
    engine.submit(greedy(prompt, 1), lambda event: None)
    for _ in range(5):
        engine.step()
    engine.prefixes.clear()
    while not engine.is_idle:
        engine.step()
    assert engine.prefixes._exact.match(prompt).length == LENGTH
