"""What a request may ask for: ends, log-probabilities, choices, cancelling; and how it may fail."""

from dataclasses import replace

import pytest
import torch

from openv41.engine.answering import Collector
from openv41.engine.constraint import ConstraintError
from openv41.engine.request import Event, FinishReason, Request
from openv41.engine.sampler import SamplingConfig
from openv41.errors import ConfigError, OverloadedError
from openv41.layers.batch import Batch
from openv41.layers.probe import Probe
from openv41.model.prefill import PrefillMode
from tests.close import assert_close
from tests.engine.mini_engine import GREEDY, arm, engine_of, greedy, plain_logits
from tests.layers.mini import random_ids


@pytest.fixture(scope="module")
def model():
    return arm(torch.float64, bitwise=False)


def only(engine, request):
    [answer] = engine.generate([request])
    return answer


def test_ends(model):
    engine, prompt = engine_of(model), tuple(random_ids(9))
    free = only(engine, greedy(prompt, 6))
    assert (free.finish_reason, len(free.tokens)) == (FinishReason.LENGTH, 6)
    text = "".join(chr(0x30 + t) for t in free.tokens)
    assert free.text == text
    place = next(i for i in range(1, 6) if free.tokens[i] not in free.tokens[:i])
    stopped = only(engine, greedy(prompt, 6, stop_ids=(free.tokens[place],)))
    assert (stopped.tokens, stopped.finish_reason) == (free.tokens[:place], FinishReason.STOP)
    cut = only(engine, greedy(prompt, 6, stop=(text[1:3],)))
    assert (cut.text, cut.finish_reason) == (text[:1], FinishReason.STOP)
    assert cut.tokens == free.tokens[:3], "with those that make the stop string"
    model_eos = model.config.eos_token_id
    model.config = replace(model.config, eos_token_id=free.tokens[place])
    try:
        ended = only(engine, Request(prompt=prompt, max_tokens=6, sampling=GREEDY))
        assert (ended.tokens, ended.finish_reason) == (free.tokens[:place], FinishReason.STOP)
        assert only(engine, greedy(prompt, 6)).tokens == free.tokens, "ignore_eos"
    finally:
        model.config = replace(model.config, eos_token_id=model_eos)


def test_the_last_position_ends_an_answer(model):
    full = model.config
    model.config = replace(full, max_position=12)
    try:
        answer = only(engine_of(model), greedy(random_ids(9), 50))
        assert (len(answer.tokens), answer.finish_reason) == (4, FinishReason.LENGTH)
        with pytest.raises(ConfigError, match="the prompt has 13 tokens; there is room for 12"):
            only(engine_of(model), greedy(random_ids(13)))
    finally:
        model.config = full


def test_log_probabilities(model):
    engine, prompt = engine_of(model), random_ids(14)
    answer = only(engine, greedy(prompt, 3, logprobs=2, prompt_logprobs=1))
    ids = [*prompt, *answer.tokens]
    with torch.no_grad():
        hidden = model(Batch.from_documents([ids])).hidden
        want = model.logits(hidden).float().log_softmax(-1)
    assert answer.prompt_logprobs[0] is None
    shown = [entry.logprob for entry in answer.prompt_logprobs[1:]]
    assert_close(
        "prompt",
        torch.tensor(shown),
        want[range(13), prompt[1:]],
        rtol=1e-5,
        atol=1e-5,
    )
    assert [top[0].token for top in answer.prompt_top[1:]] == want[:13].argmax(1).tolist()
    for place, (own, top) in enumerate(zip(answer.logprobs, answer.top, strict=True)):
        row = want[13 + place]
        assert own.token == top[0].token == answer.tokens[place]
        assert own.logprob == pytest.approx(float(row.max()), abs=1e-5)
        assert [t.token for t in top] == row.topk(2).indices.tolist()


@pytest.mark.shapes
def test_prompt_log_probabilities_run_every_layer_on_every_row(model):
    engine = engine_of(model, mode=PrefillMode.BOUNDED)
    only(engine, greedy(random_ids(30), 2, prompt_logprobs=0))
    assert engine.stats().prefill_rows_skipped == 0
    only(engine, greedy(random_ids(30, seed=5), 2))
    assert engine.stats().prefill_rows_skipped > 0


@pytest.mark.parametrize("chunk", [5, pytest.param(512, marks=pytest.mark.shapes)])
def test_choices_are_recorded_and_replayed(chunk):
    """Recorded choices are those of the plain model; another model that replays them makes them."""
    model = arm(torch.float32, bitwise=True)
    engine, prompt = engine_of(model, tokens_per_step=chunk), random_ids(17)
    answers = engine.generate(
        [greedy(prompt, 4, record_choices=True), greedy(random_ids(8, seed=2), 4)]
    )
    ids = [*prompt, *answers[0].tokens[:-1]]
    probe = Probe.recording_choices()
    with torch.no_grad():
        model(Batch.from_documents([ids]), probe=probe)
    choices = answers[0].choices
    assert answers[1].choices is None
    kinds = ("expert_ids", "topk_indices")
    assert choices.keys() == {n for n in probe.values if n.rpartition(".")[2] in kinds}
    for name, value in choices.items():
        assert torch.equal(value, probe.values[name]), name
    other = arm(torch.float32, bitwise=True)
    with torch.no_grad():
        for layer in other.layers:
            layer.moe.gate.bias.neg_()
    replaying = engine_of(other, tokens_per_step=chunk)
    request = greedy(prompt, 4, record_choices=True, choices=choices)
    beside = greedy(random_ids(21, seed=3), 4)
    again, free = replaying.generate([request, beside])
    for name, value in choices.items():
        assert torch.equal(again.choices[name][: len(prompt)], value[: len(prompt)]), name
    assert torch.equal(replaying.drawn_from[0][0], engine.drawn_from[0][0])
    want = plain_logits(other, beside.prompt, free.tokens)
    assert torch.equal(torch.stack(replaying.drawn_from[1]), want), "others choose freely"


def test_choices_of_a_short_prompt_are_recorded():
    """Steps that see few entries list few: the parts are joined to the widest."""
    engine = engine_of(arm(torch.float32, bitwise=False))
    answer = only(engine, greedy([0], 5, record_choices=True))
    rows = answer.choices["layers.5.topk_indices"]
    assert rows[:3].tolist() == [[0, -1, -1], [0, 1, -1], [0, 1, 2]]
    assert len(rows) == 5


def test_cancelling_frees_the_pages_at_once(model):
    engine, events, other = engine_of(model), [], []
    number = engine.submit(greedy(random_ids(20), 50), events.append)
    engine.submit(greedy(random_ids(6), 7), other.append)
    for _ in range(3):
        engine.step()
    held = engine.store.allocator.free
    engine.cancel(number)
    assert events[-1].finish_reason is FinishReason.CANCELLED
    engine.prefixes.clear()
    assert engine.store.allocator.free > held
    engine.cancel(number)  # nothing to do
    while not engine.is_idle:
        engine.step()
    tokens = [event.token for event in other]
    want = plain_logits(model, random_ids(6), tokens)
    assert len(tokens) == 7
    assert tokens == want.argmax(1).tolist(), "the other request notices nothing"


@pytest.mark.parametrize("late", [False, True], ids=["before the model", "after it has written"])
def test_a_failing_batch_ends_only_the_request_that_fails(model, caplog, late):
    """Also where the rings have moved on by more than they hold when it fails."""
    engine = engine_of(model, tokens_per_step=48)
    forward = engine._forward

    def failing(step):
        fails = any(7 in job.request.stop_ids and job.num_output for job, _ in step)
        found = forward(step) if late or not fails else None
        if fails:
            raise ZeroDivisionError("made up")
        return found

    engine._forward = failing
    prompts = [random_ids(n, seed=n) for n in (5, 9, 100)]
    requests = [greedy(p, 4) for p in prompts]
    requests[1] = greedy(prompts[1], 4, stop_ids=(7,))
    for _ in range(2):  # the second time beside what the first one left
        first = engine._next
        answers = engine.generate(requests)
        assert answers[1].finish_reason is FinishReason.ERROR
        assert "made up" in answers[1].error
        for i in (0, 2):
            want = plain_logits(model, prompts[i], answers[i].tokens)
            got = torch.stack(engine.drawn_from[first + i])
            assert_close(f"{i}", got, want, rtol=1e-9, atol=1e-9)
    assert "a batch of 3 requests failed" in caplog.text
    engine.prefixes.clear()
    assert engine.store.allocator.free == engine.store.cache.num_pages


def test_a_request_that_runs_alone_takes_the_pages_of_those_that_wait_for_it(model, caplog):
    """After a failed batch; it gave its own up for ever, and the others never had their turn."""
    engine = engine_of(
        model, tokens_per_step=4, prefix_cache=False, cache={"num_pages": 14, "max_requests": 4}
    )
    forward, counts = engine._forward, []

    def failing(step):
        if len(step) > 1:
            counts.append(len(step))
            if len(counts) == 2:
                raise RuntimeError("made up")
        return forward(step)

    engine._forward = failing
    prompts = [random_ids(n, seed=n) for n in (20, 35, 34)]
    answers = [Collector() for _ in prompts]
    for prompt, count, collector in zip(prompts, (8, 15, 21), answers, strict=True):
        engine.submit(greedy(prompt, count), collector)
    for _ in range(120):
        engine.step()
    assert "requests failed" in caplog.text
    assert engine.is_idle
    for prompt, collector in zip(prompts, answers, strict=True):
        tokens = collector.answer().tokens
        assert tokens == tuple(plain_logits(model, prompt, tokens).argmax(1).tolist())


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (("a", ""), "stop holds an empty string; leave it out"),
        (("a", "b" * 1025), "stop holds a string of 1025 characters, must be at most 1024"),
    ],
)
def test_stop_strings_that_cannot_be(stop, text):
    with pytest.raises(ConfigError, match=text):
        greedy([1], stop=stop)
    greedy([1], stop=("b" * 1024,))


def test_an_invalid_request_of_several_leaves_none_behind(model):
    engine = engine_of(model)
    with pytest.raises(ConfigError, match="the prompt holds token 64"):
        engine.generate([greedy([1, 2]), greedy([64])])
    assert engine.is_idle


def test_logits_of_nan_end_one_request(model):
    engine = engine_of(model)
    logits = engine._logits
    engine._logits = lambda hidden: logits(hidden).index_fill(
        0, torch.tensor([1] if len(hidden) == 3 else []).long(), torch.nan
    )
    answers = engine.generate([greedy(random_ids(4, seed=i), 2) for i in range(3)])
    assert [a.finish_reason for a in answers].count(FinishReason.ERROR) == 1
    assert "NaN" in answers[1].error


def test_what_cannot_run_is_refused(model):
    engine = engine_of(model, cache={"num_pages": 4, "page_size": 4})
    with pytest.raises(ConfigError, match="may take 17 positions; the cache has 16"):
        engine.submit(greedy(random_ids(8), 10), lambda event: None)
    with pytest.raises(ConfigError, match="the prompt holds token 64; the vocabulary has 64"):
        engine.submit(greedy([64]), lambda event: None)
    with pytest.raises(ConfigError, match="the prompt holds no token"):
        greedy([])
    engine = engine_of(model, max_queue=1)
    engine.submit(greedy([1]), lambda event: None)
    with pytest.raises(OverloadedError, match="1 requests wait already"):
        engine.submit(greedy([1]), lambda event: None)


def test_one_caller_may_ask_more_than_the_queue_holds(model):
    """Nobody else would make room in it."""
    engine, prompts = engine_of(model, max_queue=1), [random_ids(5, seed=i) for i in range(4)]
    answers = engine.generate([greedy(prompt, 2) for prompt in prompts])
    for prompt, answer in zip(prompts, answers, strict=True):
        want = plain_logits(model, prompt, answer.tokens)
        assert answer.tokens == tuple(want.argmax(1).tolist())


def test_streams_and_seeds(model):
    engine = engine_of(model)
    hot = SamplingConfig(temperature=5.0, seed=3)
    request = Request(prompt=(1, 2, 3), max_tokens=5, sampling=hot, ignore_eos=True)
    events = list(engine.stream(request))
    assert [e.token for e in events] == list(only(engine, request).tokens)
    other = replace(request, sampling=replace(hot, seed=4))
    assert only(engine, other).tokens != only(engine, request).tokens
    stream = engine.stream(request)
    assert isinstance(next(stream), Event)
    stream.close()
    assert engine.is_idle


class Breaking:
    """A constraint that goes wrong at the second token, or raises something else."""

    def __init__(self, error):
        self.error, self.drawn = error, 0

    def begin(self):
        return self

    def allowed(self):
        if self.drawn:
            raise self.error

    def accept(self, token):
        self.drawn += 1


@pytest.mark.parametrize(
    ("error", "is_own"), [(ConstraintError("too complex"), True), (ValueError("a bug"), False)]
)
def test_an_event_says_whose_fault_an_error_is(model, error, is_own):
    engine, events = engine_of(model), []
    engine.submit(greedy(random_ids(5), constraint=Breaking(error)), events.append)
    engine.submit(greedy(random_ids(6)), lambda event: None)
    while not engine.is_idle:
        engine.step()
    assert events[-1].finish_reason is FinishReason.ERROR
    assert events[-1].error == f"{type(error).__name__}: {error}"
    assert events[-1].is_own_fault is is_own
    assert len(events) == 2, "one token, then the error"


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("layers.3.expert_ids", lambda ids: ids + 1000),
        ("layers.3.expert_ids", lambda ids: ids * 0),
        ("layers.3.expert_ids", lambda ids: ids[:, 0]),
        ("layers.3.expert_ids", lambda ids: ids.float()),
        ("layers.3.expert_ids", lambda ids: ids.repeat(10, 1)),
        ("layers.5.topk_indices", lambda rows: rows * 0 + 15),
        ("layers.5.topk_indices", lambda rows: rows * 0 - 7),
        ("layers.99.expert_ids", lambda ids: ids),
    ],
)
def test_choices_that_the_model_cannot_make_are_refused(name, change):
    engine, prompt = engine_of(arm(torch.float32, bitwise=True)), random_ids(17)
    good = only(engine, greedy(prompt, 4, record_choices=True)).choices
    wrong = {**good, name: change(good.get(name, good["layers.3.expert_ids"]))}
    with pytest.raises(ConfigError, match=rf"choices.*{name}"):
        engine.generate([greedy(prompt, 4, choices=wrong)])
