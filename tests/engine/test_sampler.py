"""Sampling against loops, counts and hand-made cases."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openv41 import ops
from openv41.engine import joint_sampling
from openv41.engine.constraint import ConstraintError
from openv41.engine.joint_sampling import Drawing, draw_together
from openv41.engine.random_streams import Stream, uniform
from openv41.engine.sampler import Draft, LogitsError, Sampler, SamplingConfig, kept_ids
from openv41.errors import ConfigError, InputError

pytestmark = pytest.mark.shapes

SHARES = torch.tensor([0.1, 0.4, 0.05, 0.25, 0.2], dtype=torch.float64)
EIGHTHS = torch.tensor([1, 4, 0, 2, 1], dtype=torch.float64) / 8
CRITICAL = {2: 13.82, 3: 16.27, 4: 18.47}  # chi-square at 0.001, by degrees of freedom


def draws(count, logits=None, **options):
    logits = SHARES.log().float() if logits is None else logits
    sampler = Sampler(SamplingConfig(**options), len(logits))
    return [sampler.draw(logits) for _ in range(count)]


def naive_scores(logits, prompt, output, config):
    """Bias and penalties, one token at a time, from the whole history."""
    scores = list(logits)
    for token, bias in config.logit_bias:
        scores[token] += bias
    for token in range(len(scores)):
        if token in prompt or token in output:
            if scores[token] > 0:
                scores[token] /= config.repetition_penalty
            else:
                scores[token] *= config.repetition_penalty
        times = sum(1 for other in output if other == token)
        scores[token] -= times * config.frequency_penalty
        if times:
            scores[token] -= config.presence_penalty
    return scores


def naive_shares(scores, config):
    """Probability of each token that may be drawn, by id; temperature is not 0."""
    heights = [math.exp((score - max(scores)) / config.temperature) for score in scores]
    kept = [t for t in range(len(scores)) if heights[t] >= config.min_p * max(heights)]
    kept = [t for t in kept if heights[t] > 0]
    kept.sort(key=lambda t: (-heights[t], t))
    if config.top_k is not None:
        kept = kept[: config.top_k]
    whole, held, fewest = math.fsum(heights[t] for t in kept), 0.0, []
    for token in kept:
        if fewest and held >= config.top_p * whole:
            break
        fewest.append(token)
        held += heights[token]
    return {token: heights[token] / held for token in sorted(fewest)}


def naive_draw(logits, prompt, output, config, point):
    scores = naive_scores(logits, prompt, output, config)
    if config.temperature == 0:
        return scores.index(max(scores))
    shares = naive_shares(scores, config)
    for token, share in shares.items():
        point -= share
        if point < 0:
            return token
    return max(shares)


# Steps of one half make ties; the shares asked for lie between those that ties can have.
logit_rows = st.lists(st.integers(-8, 8).map(lambda i: i / 2), min_size=9, max_size=9)
choices = {
    "temperature": [0.0, 0.31, 1.0, 2.7],
    "top_k": [None, 1, 3, 6, 40],
    "top_p": [1e-9, 0.1371, 0.3713, 0.8297, 1.0],
    "min_p": [0.0, 0.0317, 0.317, 1.0],
    "repetition_penalty": [0.7, 1.0, 1.3],
    "presence_penalty": [-0.7, 0.0, 1.9],
    "frequency_penalty": [-0.4, 0.0, 0.3],
    "logit_bias": [(), ((0, 1.25), (7, -100.0)), ((4, 0.5), (2, 3.0))],
    "seed": range(100),
}
some_settings = st.fixed_dictionaries({name: st.sampled_from(c) for name, c in choices.items()})


@pytest.mark.property
@settings(max_examples=60)
@given(
    rows=st.lists(logit_rows, min_size=1, max_size=6),
    prompt=st.lists(st.integers(0, 8), max_size=4),
    chosen=some_settings,
)
def test_draws_equal_loops(rows, prompt, chosen):
    config = SamplingConfig(**chosen)
    sampler, output = Sampler(config, 9, prompt), []
    for place, row in enumerate(rows):
        point = uniform(config.seed, Stream.TOKEN, place)
        want = naive_draw(row, prompt, output, config, point)
        assert sampler.draw(torch.tensor(row)) == want
        output.append(want)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0, "top_k": 3},
        {"top_p": 0.9, "logit_bias": ((2, 2.0),)},
        {"min_p": 0.3, "temperature": 1.5},
    ],
)
def test_frequencies_are_the_probabilities(options):
    count, logits = 1000, SHARES.log().float()
    config = SamplingConfig(seed=11, **options)
    want = naive_shares(naive_scores(logits.tolist(), [1, 3], [], config), config)
    found = dict.fromkeys(want, 0)
    sampler = Sampler(config, 5, [1, 3])
    for _ in range(count):
        found[sampler.draw(logits)] += 1
    excess = sum((found[t] - count * want[t]) ** 2 / (count * want[t]) for t in want)
    assert excess < CRITICAL[len(want) - 1]


def test_temperature_zero_takes_the_lowest_id_among_equals():
    logits = torch.tensor([0.0, 2.0, -1.0, 2.0])
    assert draws(3, logits, temperature=0.0) == [1, 1, 1]


def test_temperature_zero_takes_the_most_likely_after_bias_and_penalties():
    logits = torch.tensor([1.0, 3.0, 2.5, 0.0])
    assert draws(2, logits, temperature=0.0, logit_bias=((3, 4.0),)) == [3, 3]
    assert draws(4, logits, temperature=0.0, presence_penalty=2.0) == [1, 2, 0, 1]
    assert draws(5, logits, temperature=0.0, frequency_penalty=1.0) == [1, 2, 1, 2, 0]
    assert draws(4, logits, temperature=0.0, repetition_penalty=4.0) == [1, 2, 0, 1]


def test_only_the_repetition_penalty_looks_at_the_prompt():
    logits = torch.tensor([-1.0, -1.5, -4.0])

    def first(**options):
        return Sampler(SamplingConfig(temperature=0.0, **options), 3, [0, 0, 0]).draw(logits)

    assert first(repetition_penalty=2.0) == 1
    assert first(repetition_penalty=1.4) == 0
    assert first(presence_penalty=2.0, frequency_penalty=2.0) == 0


def test_a_bias_of_100_and_of_minus_100_decide():
    assert set(draws(50, logit_bias=((2, 100.0),))) == {2}
    assert set(draws(200, logit_bias=((1, -100.0), (3, -100.0)))) == {0, 2, 4}


def test_logits_are_not_changed():
    logits = SHARES.clone()
    draws(3, logits, logit_bias=((1, 5.0),), frequency_penalty=1.0, repetition_penalty=2.0)
    assert logits.tolist() == SHARES.tolist()


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({}, [0, 1, 3, 4]),  # what has no probability is never kept
        ({"top_k": 1}, [1]),
        ({"top_k": 3}, [0, 1, 3]),  # 0 and 4 are equal
        ({"top_k": 9}, [0, 1, 3, 4]),
        ({"top_p": 0.5}, [1]),
        ({"top_p": 0.75}, [1, 3]),
        ({"top_p": 0.76}, [0, 1, 3]),
        ({"top_p": 0.875}, [0, 1, 3]),
        ({"top_p": 0.876}, [0, 1, 3, 4]),
        ({"top_p": 5e-324}, [1]),
        ({"top_k": 2, "top_p": 0.66}, [1]),  # 4/8 of 6/8
        ({"top_k": 2, "top_p": 0.67}, [1, 3]),
        ({"min_p": 0.25}, [0, 1, 3, 4]),
        ({"min_p": 0.26}, [1, 3]),
        ({"min_p": 1.0}, [1]),
        ({"min_p": 0.5, "top_p": 0.7}, [1, 3]),
        ({"min_p": 0.5, "top_p": 0.66}, [1]),  # min_p comes first: 4/8 of 6/8
    ],
)
def test_cuts(options, want):
    assert kept_ids(EIGHTHS, SamplingConfig(**options)).tolist() == want


def test_cuts_take_the_lowest_ids_among_equals():
    equal = torch.full((1024,), 2.0**-10, dtype=torch.float64)
    assert kept_ids(equal, SamplingConfig(top_k=3)).tolist() == [0, 1, 2]
    assert kept_ids(equal, SamplingConfig(top_p=0.25)).tolist() == list(range(256))
    assert kept_ids(equal, SamplingConfig(top_p=5e-324)).tolist() == [0]


@pytest.mark.parametrize("top_p", [0.00137, 0.3001, 0.9001, 0.99999])
@pytest.mark.parametrize("spread", [0.0, 1.0, 8.0])
def test_top_p_of_a_large_vocabulary_equals_loops(spread, top_p):
    config = SamplingConfig(top_p=top_p)
    scores = (torch.randn(3000) * spread).round(decimals=1).double()
    got = kept_ids(torch.softmax(scores, 0), config).tolist()
    assert got == list(naive_shares(scores.tolist(), config))


def test_impossible_tokens_are_never_drawn():
    logits = torch.tensor([-math.inf, 0.0, -math.inf, 0.0])
    assert set(draws(200, logits)) == {1, 3}


def test_a_denormal_temperature_takes_the_most_likely_token():
    assert draws(3, temperature=1e-320) == [1, 1, 1]


def test_a_point_that_rounds_up_to_the_end_draws_a_possible_token(monkeypatch):
    monkeypatch.setattr("openv41.engine.sampler.uniform", lambda *_: 1.0)
    assert draws(1, torch.tensor([0.0, 0.0, 0.0, -math.inf])) == [2]


def test_frequencies_over_seeds_are_the_probabilities():
    """The first token of many requests; penalties on the prompt included."""
    count, logits, options = 1000, SHARES.log().float(), {"repetition_penalty": 1.5}
    config = SamplingConfig(**options)
    want = naive_shares(naive_scores(logits.tolist(), [1, 3], [], config), config)
    found = dict.fromkeys(want, 0)
    for seed in range(count):
        found[Sampler(SamplingConfig(seed=seed, **options), 5, [1, 3]).draw(logits)] += 1
    excess = sum((found[t] - count * want[t]) ** 2 / (count * want[t]) for t in want)
    assert excess < CRITICAL[4]


def test_seeds():
    assert draws(50, seed=3) == draws(50, seed=3)
    assert draws(50, seed=3) != draws(50, seed=4)


def test_a_sampler_is_independent_of_others():
    rows = torch.randn(40, 6)
    config = SamplingConfig(seed=5, frequency_penalty=0.5)
    alone = Sampler(config, 6)
    want = [alone.draw(row) for row in rows]
    ours, other = Sampler(config, 6), Sampler(SamplingConfig(seed=6, frequency_penalty=2.0), 6)
    found = []
    for row in rows:
        found.append(ours.draw(row))
        other.draw(-row)
        torch.rand(3)
    assert found == want


def test_the_dtype_of_equal_logits_does_not_matter():
    logits = torch.randn(20).bfloat16()
    assert draws(30, logits) == draws(30, logits.float()) == draws(30, logits.double())


def test_prompt_tokens_that_cannot_be_drawn_do_not_matter():
    config = SamplingConfig(temperature=0.0, repetition_penalty=9.0)
    assert Sampler(config, 3, [1, 3, 1000]).draw(torch.tensor([0.5, 2.0, 1.0])) == 2


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        ([0.0, math.nan, 1.0, math.nan], "next token hold NaN at 2 of 4 ids, first at 1;"),
        ([0.0, math.inf, math.nan, 1.0], "NaN at 1 of 4 ids, first at 2;"),
        ([0.0, 1.0, math.inf, 1.0], r"hold \+inf at 1 of 4 ids, first at 2;"),
        ([-math.inf] * 4, "hold -inf at 4 of 4 ids, first at 0;"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_unusable_logits_are_named(temperature, logits, message):
    with pytest.raises(LogitsError, match=message):
        draws(1, torch.tensor(logits), temperature=temperature)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1, must be at least 0 and finite"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"top_k": 0}, "top_k is 0, must be at least 1; leave it out for all"),
        ({"top_p": 0.0}, "top_p is 0.0, must be above 0 and at most 1"),
        ({"top_p": math.nan}, "top_p is nan"),
        ({"min_p": 1.1}, "min_p is 1.1, must be from 0 to 1"),
        ({"min_p": math.nan}, "min_p is nan"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0, must be from 0.001 to 1000"),
        ({"repetition_penalty": math.inf}, "repetition_penalty is inf"),
        ({"presence_penalty": -2.1}, "presence_penalty is -2.1, must be from -2 to 2"),
        ({"frequency_penalty": math.nan}, "frequency_penalty is nan, must be from -2 to 2"),
        ({"logit_bias": ((7, math.inf),)}, "token 7 is inf, must be from -100 to 100"),
        ({"logit_bias": ((7, math.nan),)}, "token 7 is nan, must be from -100 to 100"),
        ({"logit_bias": ((7, 1.0), (7, 1.0))}, "names token 7 2 times; give each token one bias"),
        ({"seed": -1}, r"seed is -1, must be from 0 to 2\^63 - 1"),
    ],
)
def test_settings_are_checked(options, message):
    with pytest.raises(ConfigError, match=message):
        SamplingConfig(**options)


def test_every_problem_is_named():
    with pytest.raises(ConfigError, match=r"sampling: 4 problem") as caught:
        SamplingConfig(temperature=-1.0, min_p=2.0, logit_bias=((1, 101.0),), seed=-5)
    assert [text.split()[0] for text in caught.value.problems] == [
        "temperature", "min_p", "seed", "logit_bias",
    ]  # fmt: skip


@pytest.mark.parametrize("token", [-1, 5])
def test_a_bias_on_a_token_that_cannot_be_drawn_is_refused(token):
    with pytest.raises(InputError, match=rf"tokens \[{token}\]; .* are from 0 to 4"):
        Sampler(SamplingConfig(logit_bias=((token, 1.0),)), 5)


class Allowing:
    """A guide that always allows the same tokens."""

    def __init__(self, *tokens):
        self.tokens = tokens

    def allowed(self):
        return torch.zeros(5, dtype=torch.bool).index_fill(
            0, torch.tensor(self.tokens).long(), True
        )

    def accept(self, token):
        assert token in self.tokens


@pytest.mark.parametrize("tokens", [(), (2,)], ids=["no token", "one that is never drawn"])
def test_a_constraint_that_leaves_nothing_is_at_fault(tokens):
    sampler = Sampler(SamplingConfig(), 5, banned=[2], guide=Allowing(*tokens))
    with pytest.raises(ConstraintError, match="allows none of the tokens that can be drawn next"):
        sampler.draw(torch.zeros(5))


def test_a_model_that_gives_no_chance_is_at_fault():
    sampler = Sampler(SamplingConfig(), 5, banned=[2], guide=Allowing(2, 3))
    assert sampler.draw(torch.zeros(5)) == 3
    with pytest.raises(LogitsError, match=r"none of the 1 tokens .* the model gives each of them"):
        sampler.draw(torch.tensor([0.0, 0.0, 0.0, -torch.inf, 0.0]))


def some_drafts(sampler, rows, kinds, generator):
    """Drafts by chance, with chances and without; some of them surely right."""
    drafts = []
    for row, kind in zip(rows, kinds, strict=True):
        if kind == "likeliest":
            drafts.append(Draft(int(row.argmax())))
        elif kind == "only":
            drafts.append(Draft(int(torch.randint(9, (1,), generator=generator))))
        else:
            shares = torch.rand(9, generator=generator, dtype=torch.float64).softmax(0)
            token = int(torch.multinomial(shares, 1, generator=generator))
            drafts.append(Draft(token, float(shares[token]), shares))
    return drafts


@pytest.mark.parametrize("at_once", [1, 1 << 25])
def test_requests_drawn_together_draw_what_each_draws_alone(monkeypatch, at_once):
    """Greedy and sampled, with every kind of draft, or with a row that is no distribution."""
    monkeypatch.setattr(joint_sampling, "ELEMENTS_AT_ONCE", at_once)
    generator, kinds = torch.Generator().manual_seed(4), ("likeliest", "only", "sampled")
    configs = [
        SamplingConfig(temperature=temperature, seed=seed, **more)
        for seed in range(8)
        for temperature, more in ((0.0, {}), (0.0, {"top_k": 2}), (1.3, {}), (0.7, {"top_k": 3}))
    ]
    for count in range(4):
        ours, alone = ([Sampler(c, 9, banned=[8]) for c in configs] for _ in range(2))
        logits = torch.randn(len(configs) * (count + 1), 9, generator=generator)
        logits[5 * (count + 1)] = math.nan
        rows = logits.split(count + 1)
        chosen = [
            [kinds[int(i)] for i in torch.randint(3, (count,), generator=generator)] for _ in rows
        ]
        drafts = [
            some_drafts(sampler, row[:count], own, generator)
            for sampler, row, own in zip(alone, rows, chosen, strict=True)
        ]
        drawings = [
            Drawing(sampler, own, i * (count + 1))
            for i, (sampler, own) in enumerate(zip(ours, drafts, strict=True))
        ]
        drawn = draw_together(logits, drawings, banned=8)
        for i, (found, sampler, row) in enumerate(zip(drawn, alone, rows, strict=True)):
            if i == 5:
                assert found is None, "the sampler says what is wrong"
                continue
            assert (found is None) is (configs[i].top_k == 3)
            if found is not None:
                assert found == list(sampler.verify(row, drafts[i])), f"{i}: {chosen[i]}"
                assert list(ours[i].remember(found)) == found
                assert ours[i].place == sampler.place == len(found)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 3.0, "top_k": 3},
        {"top_p": 0.9, "logit_bias": ((2, 2.0),)},
        {"min_p": 0.3, "temperature": 1.5},
        {"repetition_penalty": 1.6, "frequency_penalty": 0.5},
    ],
)
def test_drafts_change_no_frequency(options):
    """T9: whatever cuts the model's shares, and though some are drafted that it rules out."""
    count, config = 400, SamplingConfig(**options)
    logits = SHARES.log().float()
    want = naive_shares(naive_scores(logits.tolist(), [1, 3], [], config), config)
    q = torch.tensor([0.3, 0.0, 0.1, 0.2, 0.4], dtype=torch.float64)
    found = [0] * 5
    for seed in range(count):
        point = torch.tensor([uniform(seed, Stream.DRAFT, 0)]).double()
        token = int(ops.choose_tokens(q[None], point))
        sampler = Sampler(SamplingConfig(seed=seed, **options), 5, [1, 3])
        found[sampler.draw(logits, Draft(token, float(q[token]), q))] += 1
    assert {token for token in range(5) if found[token]} == want.keys()
    off = sum((found[t] - count * share) ** 2 / (count * share) for t, share in want.items())
    assert off < CRITICAL[len(want) - 1]


@pytest.mark.prove
def test_draws_follow_the_model_in_the_whole_vocabulary():
    """T8: 10,000 draws among 129,280 tokens, most of which the model or the drafter rules out."""
    size, count, generator = 129_280, 10_000, torch.Generator().manual_seed(6)
    support = torch.randperm(size, generator=generator)[:8]
    p, q = torch.rand(2, 8, generator=generator, dtype=torch.float64)
    p[1], q[3] = 0, 0
    p, q = (torch.zeros(size).double().index_copy(0, support, part / part.sum()) for part in (p, q))
    found, accepted = torch.zeros(size), 0
    for begin in range(0, count, 50):
        samplers = [Sampler(SamplingConfig(seed=begin + i), size) for i in range(50)]
        points = torch.tensor([uniform(begin + i, Stream.DRAFT, 0) for i in range(50)]).double()
        tokens = ops.choose_tokens(q.expand(50, -1), points).tolist()
        drawings = [
            Drawing(sampler, [Draft(token, float(q[token]), q)], 2 * i)
            for i, (sampler, token) in enumerate(zip(samplers, tokens, strict=True))
        ]
        for drawn in draw_together(p.log().expand(100, -1), drawings, banned=size):
            found[drawn[0]] += 1
            accepted += len(drawn) - 1
    want = p * count
    assert found[want == 0].sum() == 0
    some = want > 0
    assert float(((found - want)[some] ** 2 / want[some]).sum()) < 27.9  # six degrees, at 1e-4
    share = float(torch.minimum(p, q).sum())
    assert accepted / count == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / count))


@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize("penalty", [0.0, 1.5])
def test_verified_rows_see_the_drafts_before_them(block, penalty):
    """Penalties of row j are those after j drafts, whether they are verified together or not."""
    config = SamplingConfig(frequency_penalty=penalty)
    rows = torch.randn(3, 5, generator=torch.Generator().manual_seed(1))
    shares = [
        naive_shares(naive_scores(row.tolist(), [], [2] * k, config), config)
        for k, row in enumerate(rows)
    ]
    ratios = [share[2] / 0.2 for share in shares[:2]]  # p / q of a draft of five equal chances
    first, second = min(1.0, ratios[0]), min(1.0, ratios[1])
    want = min(1.0, first * ratios[1]) if block else first * second
    draft, tries, held = Draft(2, 0.2, torch.full((5,), 0.2, dtype=torch.float64)), 400, 0
    for seed in range(tries):
        sampler = Sampler(replace(config, seed=seed), 5)
        held += len(list(sampler.verify(rows, [draft, draft], block=block))) == 3
    assert held / tries == pytest.approx(want, abs=4 * math.sqrt(0.25 / tries))
