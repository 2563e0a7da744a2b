"""Whatever a request asks for and whatever happens to it, drafts change nothing that it gets."""

import itertools
import random
from dataclasses import replace

import pytest
import torch

from openv41 import ops
from openv41.engine.answering import Collector
from openv41.engine.request import FinishReason, Request, TokenLogprob
from openv41.engine.sampler import SamplingConfig
from openv41.engine.speculation import DraftChoice, SpeculationConfig, VerifyRule
from openv41.model.prefill import PrefillMode
from tests.engine.drafts import Script, lose_rows, plain_answers, speculating, target
from tests.engine.mini_engine import WINDOW, engine_of, greedy, picture, plain_logits, see, span
from tests.layers.mini import VOCAB, random_ids

LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 11, 14, 17, 20)
GREEDY_DRAFTS = SpeculationConfig(drafts=DraftChoice.GREEDY)


@pytest.fixture(scope="module")
def model():
    return target()


def prompts(count=12):
    return [random_ids(LENGTHS[i % len(LENGTHS)], seed=i) for i in range(count)]


def hot(prompt, max_tokens=14, **options):
    sampling = SamplingConfig(temperature=1.3, seed=sum(prompt), **options)
    return Request(prompt=tuple(prompt), max_tokens=max_tokens, sampling=sampling, ignore_eos=True)


@pytest.fixture(scope="module")
def plain(model):
    """Requests at both temperatures, and their answers without speculation."""
    requests = [greedy(p, 14) for p in prompts()] + [hot(p) for p in prompts()]
    return requests, plain_answers(model, requests, cache={"max_requests": 12})


def some(most, seed=0):
    """A number of held drafts for each request and position, by chance but always the same."""
    return lambda request, position: random.Random(f"{seed} {request} {position}").randint(0, most)


def script_of(requests, answers, holding, *, block_size=5, first=0):
    texts = [[*r.prompt, *a.tokens] for r, a in zip(requests, answers, strict=True)]
    return Script(dict(enumerate(texts, first)), holding, block_size)


def ask(model, requests, answers, *, holding=None, block_size=5, **options):
    """The same requests of an engine whose drafts hold as ``holding`` says."""
    script = script_of(requests, answers, holding or some(block_size), block_size=block_size)
    options = {"cache": {"max_requests": 12}, "speculation": GREEDY_DRAFTS} | options
    engine = speculating(model, script, block_size=block_size, **options)
    found = engine.generate(requests)
    assert engine.drafting.is_on, "the script was not followed"
    return engine, found


def assert_same(found, want):
    for number, (mine, other) in enumerate(zip(found, want, strict=True)):
        for name in ("tokens", "text", "finish_reason", "error"):
            assert getattr(mine, name) == getattr(other, name), f"{name} of {number}"


@pytest.mark.parametrize(
    "block_size",
    [pytest.param(n, marks=[] if n in (5, 7) else pytest.mark.prove) for n in range(1, 9)],
)
def test_every_width_of_verification(model, plain, block_size):
    """T18, T21: odd and even positions, windows that wrap; also at temperature 1."""
    requests, want = plain
    engine, found = ask(model, requests, want, block_size=block_size)
    assert_same(found, want)
    stats = engine.stats()
    assert len(stats.drafts_verified) == block_size
    assert 0 < sum(stats.drafts_accepted) < sum(stats.drafts_verified)
    engine.prefixes.clear()
    assert engine.store.allocator.free == engine.store.cache.num_pages


@pytest.mark.prove
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_two_hundred_requests_twelve_at_a_time(record_proof, temperature):
    """T21, T22: to the bit, so that no token differs; the control loses a row at each rollback."""
    model = target(torch.float32, bitwise=True)
    sampling = SamplingConfig(temperature=temperature, seed=5)
    requests = [
        Request(prompt=tuple(p), max_tokens=24, sampling=sampling, ignore_eos=True)
        for p in prompts(200)
    ]
    options = {"cache": {"max_requests": 12, "num_pages": 300}, "tokens_per_step": 64}
    want = plain_answers(model, requests, **options)
    engine, found = ask(model, requests, want, **options)
    script = script_of(requests, want, some(5))
    broken = speculating(model, script, speculation=GREEDY_DRAFTS, **options)
    lose_rows(broken.store)
    wrong = [
        sum(a.tokens != b.tokens for a, b in zip(answers, want, strict=True))
        for answers in (found, broken.generate(requests))
    ]
    stats = engine.stats()
    record_proof(
        temperature=temperature,
        requests=len(requests),
        tokens=sum(len(answer.tokens) for answer in want),
        rounds=stats.draft_rounds,
        rejected_drafts=stats.wasted_rows,
        answers_that_differ=wrong[0],
        with_a_planted_fault=wrong[1],
    )
    assert_same(found, want)
    assert wrong[1] > 0, "its script ends at the first wrong token"


def test_the_drafter_of_the_model(plain):
    """T22: whatever the real one drafts."""
    model = target(torch.float32, bitwise=True)
    requests = [greedy(p, 8) for p in prompts(6)] + [hot(p, 8) for p in prompts(6)]
    want = plain_answers(model, requests)
    engine = engine_of(model, speculation=GREEDY_DRAFTS, cache={"max_requests": 12})
    assert_same(engine.generate(requests), want)
    assert engine.stats().draft_rounds > 12
    assert engine.drafting.is_on


def test_places_are_used_again_and_requests_leave_in_the_middle(model, plain):
    """T19: a request that is cancelled between rounds, or has to wait, harms nobody."""
    requests, want = plain
    script = script_of(requests, want, some(5))
    engine = speculating(
        model, script, speculation=GREEDY_DRAFTS, tokens_per_step=23, cache={"max_requests": 3}
    )
    answers = [Collector() for _ in requests]
    for request, collector in zip(requests, answers, strict=True):
        engine.submit(request, collector)
    gone = set(range(0, len(requests), 4))
    while not engine.is_idle:
        engine.step()
        for number in gone:
            if len(answers[number].events) >= 3:
                engine.cancel(number)
    for number, (collector, answer) in enumerate(zip(answers, want, strict=True)):
        found = collector.answer()
        assert found.tokens == answer.tokens[: len(found.tokens)]
        left = number in gone and len(answer.tokens) > len(found.tokens)
        assert found.finish_reason is (FinishReason.CANCELLED if left else answer.finish_reason)


@pytest.mark.parametrize("room", [1, 2, 5])
def test_an_answer_ends_where_it_would(model, plain, room):
    """T19: at the last token asked for, or the model's last position."""
    requests, want = (part[:6] for part in plain)
    short = [replace(request, max_tokens=room) for request in requests]
    engine, found = ask(model, short, want, holding=lambda *_: 5)
    for answer, longer in zip(found, want, strict=True):
        assert answer.tokens == longer.tokens[:room]
        assert answer.finish_reason is FinishReason.LENGTH
    assert engine.stats().wasted_rows == 0, "nothing is drafted beyond the end"


def test_the_last_position_ends_an_answer(model, plain):
    requests, want = ([part[i] for i in (8, 9)] for part in plain)
    config, model.config = model.config, replace(model.config, max_position=17)
    try:
        _, found = ask(model, requests, want, holding=lambda *_: 5)
    finally:
        model.config = config
    assert [len(answer.tokens) for answer in found] == [17 - 11 + 1, 17 - 14 + 1]
    for answer, longer in zip(found, want, strict=True):
        assert answer.tokens == longer.tokens[: len(answer.tokens)]


def test_stops_inside_a_block(model, plain):
    """T19: ids and texts that end an answer, between drafts that would hold; then a hit behind."""
    requests, want = (part[:6] for part in plain)
    stops = []
    for place, (request, answer) in enumerate(zip(requests, want, strict=True), 2):
        by_text = place % 2 and len(set(answer.text[:place])) > 1
        end = (
            {"stop": (answer.text[place - 2 : place],)}
            if by_text
            else {"stop_ids": (answer.tokens[place],)}
        )
        stops.append(replace(request, **end))
    ended = plain_answers(model, stops)
    assert {answer.finish_reason for answer in ended} == {FinishReason.STOP}
    engine, found = ask(model, stops, want, holding=lambda *_: 5)
    assert_same(found, ended)
    # What a stop left in the cache is a prefix like any other.
    longer = [
        replace(r, prompt=(*r.prompt, *a.tokens), max_tokens=5)
        for r, a in zip(requests, ended, strict=True)
    ]
    again = plain_answers(model, longer)
    engine.drafting.drafter.following = script_of(longer, again, some(5), first=engine._next)
    assert_same(engine.generate(longer), again)
    assert engine.stats().prefix_hit_tokens > 0


@pytest.mark.parametrize("mode", [PrefillMode.EXACT, PrefillMode.BOUNDED])
@pytest.mark.parametrize("max_snapshots", [0, 8])
def test_a_hit_has_the_whole_window_of_the_drafter(model, mode, max_snapshots):
    """T20: the same prompt three times; drafts see as much as in the cold run."""
    request = greedy(random_ids(23, seed=3), 9)
    options = {"mode": mode, "max_snapshots": max_snapshots}
    [first] = plain_answers(model, [request], **options)
    engine = speculating(model, None, **options)
    drafter = engine.drafting.drafter
    for number in range(3):
        drafter.following = script_of([request], [first], some(5), first=number)
        drafter.seen.clear()
        [answer] = engine.generate([request])
        if mode is PrefillMode.EXACT:
            assert_same([answer], [first])
        assert number == 0 or answer.cached_tokens >= 20
        assert all(past >= min(position, WINDOW) for _, position, past in drafter.seen)


def numbers(listed):
    """All numbers of nested log-probabilities, in order."""
    if isinstance(listed, TokenLogprob):
        return [listed.token, listed.logprob]
    return [number for one in listed or () for number in numbers(one)]


def test_what_else_a_request_gets(model, plain):
    """Log-probabilities, choices, penalties and the order of events."""
    requests, _ = plain
    asked = [
        replace(requests[3], logprobs=2, prompt_logprobs=1),
        replace(requests[8], record_choices=True),
        replace(requests[16], record_choices=True, logprobs=1),
        hot(requests[5].prompt, top_k=9, top_p=0.9, min_p=0.01),
        hot(
            requests[6].prompt, repetition_penalty=1.4, frequency_penalty=0.7, presence_penalty=0.3
        ),
        hot(requests[7].prompt, logit_bias=((3, 4.0), (9, -50.0))),
    ]
    want = plain_answers(model, asked)
    _, found = ask(model, asked, want, holding=some(5, seed=2))
    assert_same(found, want)
    for mine, other in zip(found, want, strict=True):
        for name in ("logprobs", "top", "prompt_logprobs", "prompt_top"):
            mine_too, other_too = numbers(getattr(mine, name)), numbers(getattr(other, name))
            assert mine_too == pytest.approx(other_too, abs=1e-5), name
        if other.choices is not None:
            for name, rows in other.choices.items():
                assert torch.equal(mine.choices[name], rows), name


def test_few_pages_and_failing_batches(model, plain, caplog):
    """Requests that give up their pages, and batches that fail, go on as without drafts."""
    requests, want = ([part[i] for i in (8, 9, 10, 21)] for part in plain)
    script = script_of(requests, want, some(5))
    engine = speculating(
        model, script, speculation=GREEDY_DRAFTS, tokens_per_step=16, cache={"num_pages": 18}
    )
    forward, counts = engine._forward, []

    def failing(step):
        counts.append(max(count for _, count in step))
        if len(counts) == 7:
            raise RuntimeError("made up")
        return forward(step)

    engine._forward = failing
    assert_same(engine.generate(requests), want)
    assert engine.stats().preemptions > 0
    assert "requests failed" in caplog.text


class Broken:
    """Fails at its third call, or gives scores that are none."""

    def __init__(self, error):
        self.calls, self.error = 0, error

    def __call__(self, request, position, token):
        self.calls += 1
        if self.calls > 2 and self.error:
            raise RuntimeError("made up")
        return torch.full((5, VOCAB), torch.nan, dtype=torch.float64)


@pytest.mark.parametrize("error", [True, False])
@pytest.mark.parametrize("drafts", DraftChoice)
def test_a_broken_drafter_is_not_seen(model, plain, caplog, error, drafts):
    requests, want = ([part[i] for i in (3, 7)] for part in plain)
    config = SpeculationConfig(drafts=drafts)
    engine = speculating(model, Broken(error), speculation=config)
    assert_same(engine.generate(requests), want)
    assert engine.drafting.is_on is not error
    assert ("the drafter failed" in caplog.text) is error
    assert sum(engine.stats().drafts_accepted) == 0


def test_without_speculation_there_are_no_drafts(model, plain):
    requests, want = (part[:2] for part in plain)
    engine = engine_of(model, speculation=None)
    assert_same(engine.generate(requests), want)
    assert engine.drafting is None
    assert engine.stats().draft_rounds == 0


def test_images(plain):
    """T24: spans before and inside the window of the Engram's n-grams."""
    model = see(target())
    a, b = picture(1), picture(2, 7, 2)
    text = random_ids(9, seed=4)
    requests = [
        greedy([*text, *span(a)], 9, images=(a,)),
        greedy([*span(b), *text, *span(a), *text[:1]], 9, images=(b, a)),
        greedy(text, 9),
    ]
    want = plain_answers(model, requests)
    _, found = ask(model, requests, want, tokens_per_step=20)
    assert_same(found, want)


def scattered(seed, block_size=5):
    """Scores by request and position, and none too sure."""

    def scores(request, position, token):
        generator = torch.Generator().manual_seed(seed * 1000 + position * VOCAB + token)
        return torch.randn(block_size, VOCAB, generator=generator, dtype=torch.float64)

    return scores


FEW = (5, 11, 17, 23)  # tokens that may be drawn


@torch.no_grad()
def chances(model, prompt, length):
    """Of every answer of so many tokens, at temperature 2."""
    want = torch.zeros((len(FEW),) * length, dtype=torch.float64)
    for answer in itertools.product(FEW, repeat=length - 1):
        rows = plain_logits(model, prompt, [*answer, 0])[:, FEW] / 2
        p = rows.double().softmax(-1)
        places = tuple(map(FEW.index, answer))
        want[places] = p[range(length - 1), places].prod() * p[-1]
    return want


def chi_square(model, rule, count, length):
    """Statistic and degrees of so many answers, drafted at random; and what was drafted."""
    prompt = random_ids(9)
    bias = tuple((token, -100.0) for token in range(VOCAB) if token not in FEW)
    requests = [
        Request(
            prompt=tuple(prompt),
            max_tokens=length,
            ignore_eos=True,
            sampling=SamplingConfig(temperature=2.0, logit_bias=bias, seed=seed),
        )
        for seed in range(count)
    ]
    favoured = scattered(1)

    def following(*where):
        return favoured(*where) + torch.zeros(VOCAB).index_fill(0, torch.tensor(FEW), 6.0)

    engine = speculating(
        model,
        following,
        speculation=SpeculationConfig(rule=rule),
        cache={"max_requests": 100, "num_pages": 1000},
        max_queue=count,
    )
    want = count * chances(model, prompt, length)
    found = torch.zeros_like(want)
    for answer in engine.generate(requests):
        found[tuple(map(FEW.index, answer.tokens))] += 1
    big = want > 5
    pairs = [*zip(found[big], want[big], strict=True), (found[~big].sum(), want[~big].sum())]
    return sum(float((f - w) ** 2 / w) for f, w in pairs if w), len(pairs) - 1, engine.stats()


def limit(degrees):
    """Chi-square beyond which one in ten thousand lies (Wilson and Hilferty)."""
    return degrees * (1 - 2 / (9 * degrees) + 3.72 * (2 / (9 * degrees)) ** 0.5) ** 3


@pytest.mark.parametrize("rule", VerifyRule)
def test_sampled_answers_follow_the_model(model, rule):
    """T8 in the engine: three tokens of four each, drafted at random, against their chances."""
    statistic, degrees, stats = chi_square(model, rule, 200, 3)
    assert statistic < limit(degrees)
    assert 0.1 < sum(stats.drafts_accepted) / sum(stats.drafts_verified) < 0.9


@pytest.mark.prove
@pytest.mark.parametrize("rule", VerifyRule)
def test_many_sampled_answers_follow_the_model(record_proof, model, rule, monkeypatch):
    """T8, with blocks of two; the control draws from p where it should be the residual."""
    count = 20_000
    statistic, degrees, stats = chi_square(model, rule, count, 4)
    if rule is VerifyRule.TOKENS:
        monkeypatch.setattr(ops, "residual", lambda p, q: p)
    else:
        block = ops.accept_block

        def careless(p, last, *others):
            held, _ = block(p, last, *others)
            return held, torch.cat([p, last[None]])[held]

        monkeypatch.setattr(ops, "accept_block", careless)
    planted, _, _ = chi_square(model, rule, count // 2, 4)
    record_proof(
        rule=rule.value,
        answers=count,
        drafts_verified=list(stats.drafts_verified),
        acceptance=sum(stats.drafts_accepted) / sum(stats.drafts_verified),
        chi_square=statistic,
        degrees=degrees,
        limit=limit(degrees),
        planted=planted,
    )
    assert statistic < limit(degrees) < planted
