"""Verification leaves the model's distribution as it is: by exact enumeration and by draws."""

import functools
import itertools
import math

import pytest
import torch

from openv41 import ops
from openv41.engine.random_streams import Stream, uniform
from tests.oracles import acceptance

EXACT = 1e-12


def trees(vocab, most, seed, *, holes=False):
    """Random chances of the model and of the drafter after each prefix; some drafts without."""
    generator = torch.Generator().manual_seed(seed)
    target, drafted = {}, {}
    for length in range(most + 1):
        for prefix in acceptance.sequences(vocab, length):
            p, q = torch.rand(2, vocab, generator=generator, dtype=torch.float64) ** 2
            if holes:
                q[int(torch.randint(vocab, (1,), generator=generator))] = 0
            target[prefix], drafted[prefix] = p / p.sum(), q / q.sum()
    return target, drafted


def threshold(accepts):
    """The coin up to which ``accepts`` says yes, to the last bit: that is the chance."""
    if not accepts(0.0):
        return 0.0
    low, high = 0.0, 1.0
    for _ in range(54):
        middle = (low + high) / 2
        low, high = (middle, high) if accepts(middle) else (low, middle)
    return high


def number(value):
    return torch.tensor(value, dtype=torch.float64)


def holds(p, q, coin):
    return bool(ops.accept_drafts(p, q, number(coin)))


def one_by_one(target, drafted, drafts):
    """Outcomes of the token-wise rule as the ops compute it."""
    found, stays = [], 1.0
    for place, token in enumerate(drafts):
        p, q = target[drafts[:place]], drafted[drafts[:place]]
        chance = threshold(functools.partial(holds, p[token], q[token]))
        found.append((place, stays * (1 - chance), ops.residual(p, q).tolist()))
        stays *= chance
    return [*found, (len(drafts), stays, target[drafts].tolist())]


def together(target, drafted, drafts):
    """Outcomes of the block rule as the op computes it."""
    count = len(drafts)
    if not count:
        return [(0, 1.0, target[()].tolist())]
    prefixes = [drafts[:i] for i in range(count)]
    p, q = (torch.stack([of[prefix] for prefix in prefixes]) for of in (target, drafted))

    def accept(coins):
        return ops.accept_block(p, target[drafts], q, torch.tensor(drafts), number(coins))

    def stands(place, coin):
        coins = [1.0] * count
        coins[place] = coin
        return int(accept(coins)[0]) == place + 1

    chances = [threshold(functools.partial(stands, place)) for place in range(count)]
    found = []
    for accepted in range(count + 1):
        later = math.prod(1 - chance for chance in chances[accepted:])
        share = later * (chances[accepted - 1] if accepted else 1.0)
        coins = [-1.0 if place + 1 == accepted else 2.0 for place in range(count)]
        if share:
            found.append((accepted, share, accept(coins)[1].tolist()))
    return found


RULES = {"tokens": one_by_one, "block": together}


def biased_by(rule, target, drafted, length_of):
    """How far the answer is from the model's distribution."""
    vocab, most = len(target[()]), max(map(len, target))
    found = acceptance.round_outcomes(
        target,
        drafted,
        vocab,
        most,
        rule=lambda drafts: RULES[rule](target, drafted, drafts),
        length_of=length_of,
    )
    return acceptance.distance(found, acceptance.joint(target, vocab, most + 1))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize(
    ("vocab", "most"), [(2, 1), (2, 3), (3, 2), pytest.param(4, 3, marks=pytest.mark.prove)]
)
def test_the_answer_is_distributed_as_without_drafts(rule, holes, vocab, most):
    target, drafted = trees(vocab, most, seed=vocab + most, holes=holes)
    assert biased_by(rule, target, drafted, lambda drafts: most) < EXACT


@pytest.mark.parametrize("rule", RULES)
def test_lengths_that_know_only_earlier_drafts_change_nothing(rule):
    """And the control: one that knows the draft itself, or a later one, does."""
    target, drafted = trees(3, 2, seed=4)
    stopping = biased_by(rule, target, drafted, lambda x: 2 if x[0] == 1 else 1)
    assert stopping < EXACT
    for knowing in (lambda x: int(x[0] == 1), lambda x: 2 if x[1] == 1 else 1):
        assert biased_by(rule, target, drafted, knowing) > 1e-3


@pytest.mark.parametrize("rule", RULES)
def test_what_would_bias_is_noticed(rule, monkeypatch):
    """Controls of the enumeration: p in place of the residual, and a coin that is too kind."""
    target, drafted = trees(3, 2, seed=5)
    accept = ops.accept_drafts
    if rule == "tokens":
        monkeypatch.setattr(ops, "residual", lambda p, q: p)
        assert biased_by(rule, target, drafted, lambda _: 2) > 1e-3
        monkeypatch.undo()
        monkeypatch.setattr(ops, "accept_drafts", lambda p, q, coin: accept(p * 1.1, q, coin))
    else:
        block = ops.accept_block
        monkeypatch.setattr(
            ops, "accept_block", lambda p, last, q, x, c: block(p, last, q * 0.9, x, c)
        )
    assert biased_by(rule, target, drafted, lambda _: 2) > 1e-3


@pytest.mark.parametrize("rule", RULES)
def test_drafts_of_the_model_itself_all_hold(rule):
    """p equals q: nothing is left to draw from but p."""
    target, _ = trees(3, 2, seed=6)
    assert biased_by(rule, target, target, lambda _: 2) < EXACT
    assert RULES[rule](target, target, (1, 2))[-1][:2] == (2, pytest.approx(1.0, abs=1e-12))
    p = target[()]
    assert torch.equal(ops.residual(p, p), p)
    assert torch.equal(ops.residual(p, p + 1e-12), p)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("bad", [math.nan, 0.0, -0.5, 1.5, math.inf])
def test_a_chance_that_is_none_accepts_nothing(rule, bad):
    """What is drawn in its place follows the model, whatever else the row holds."""
    target, drafted = trees(3, 1, seed=7)
    drafted[()] = torch.full((3,), bad, dtype=torch.float64)
    for token in range(3):
        outcomes = RULES[rule](target, drafted, (token,))
        assert outcomes[0][:2] == (0, 1.0)
        assert outcomes[0][2] == pytest.approx(target[()].tolist())


def test_a_single_possible_draft_holds_by_the_models_chance_of_it():
    target, _ = trees(4, 1, seed=8)
    p, q = target[()], torch.eye(4, dtype=torch.float64)[2]
    assert threshold(functools.partial(holds, p[2], q[2])) == pytest.approx(float(p[2]))
    rest = ops.residual(p, q)
    assert rest[2] == 0
    assert torch.equal(rest[[0, 1, 3]], p[[0, 1, 3]])


def test_the_block_rule_accepts_no_fewer():
    gained = []
    for seed in range(2):
        target, drafted = trees(3, 2, seed)
        means = {}
        for rule, outcomes in RULES.items():
            means[rule] = sum(
                math.prod(float(drafted[x[:i]][x[i]]) for i in range(2)) * accepted * share
                for x in acceptance.sequences(3, 2)
                for accepted, share, _ in outcomes(target, drafted, x)
            )
        gained.append(means["block"] - means["tokens"])
    assert min(gained) > -EXACT
    assert max(gained) > 1e-3


def test_acceptance_is_one_minus_the_distance():
    """T10: and the mean accepted length is one plus the survivals."""
    target, drafted = trees(3, 2, seed=9)
    mean = want = 0.0
    for x in acceptance.sequences(3, 2):
        chance = math.prod(float(drafted[x[:i]][x[i]]) for i in range(2))
        mean += chance * sum((1 + n) * s for n, s, _ in one_by_one(target, drafted, x))
    shared = {prefix: torch.minimum(target[prefix], drafted[prefix]) for prefix in drafted}
    want = 1 + float(shared[()].sum())
    want += sum(float(shared[()][a]) * float(shared[a,].sum()) for a in range(3))
    assert mean == pytest.approx(want, abs=1e-12)


def test_tokens_are_chosen_by_their_shares():
    shares = torch.tensor([[0.0, 2.0, 0.0, 6.0, 0.0]], dtype=torch.float64)
    points = [0.0, 0.2499, 0.25, 0.9999, 1.0]
    found = [int(ops.choose_tokens(shares, number([point]))) for point in points]
    assert found == [1, 1, 3, 3, 3]
    assert int(ops.choose_tokens(shares * 0, number([0.5]))) == 4


def simulate(count, vocab, coin_of, seed=0):
    """Counts of the first two tokens of ``count`` answers, drafted and verified by the ops."""
    generator = torch.Generator().manual_seed(3)
    p = torch.rand(vocab + 1, vocab, generator=generator, dtype=torch.float64).softmax(-1) ** 3
    q = torch.rand(vocab + 1, vocab, generator=generator, dtype=torch.float64).softmax(-1) ** 3
    p, q = (part / part.sum(-1, keepdim=True) for part in (p, q))

    def stream(which, place):
        return number([uniform(i, which, place) for i in range(seed, seed + count)])

    before = torch.full((count,), vocab)
    drafts, tokens, open_ = [], [], torch.ones(count, dtype=torch.bool)
    for place in range(2):
        drafts.append(ops.choose_tokens(q[before], stream(Stream.DRAFT, place)))
        before = drafts[-1]
    before = torch.full((count,), vocab)
    for place in range(2):
        draft, row = drafts[place][:, None], p[before]
        held = open_ & ops.accept_drafts(
            row.gather(1, draft)[:, 0],
            q[before].gather(1, draft)[:, 0],
            coin_of(stream, place),
        )
        rest = torch.where(open_[:, None], ops.residual(row, q[before]), row)
        other = ops.choose_tokens(rest, stream(Stream.RESIDUAL, place))
        tokens.append(torch.where(held, drafts[place], other))
        before, open_ = tokens[-1], held
    pairs = (tokens[0] * vocab + tokens[1]).bincount(minlength=vocab**2)
    want = (p[vocab][:, None] * p[:vocab]).flatten() * count
    return float(((pairs - want) ** 2 / want).sum()), vocab**2 - 1


def limit(degrees):
    """Chi-square beyond which one in ten thousand lies (Wilson and Hilferty)."""
    return degrees * (1 - 2 / (9 * degrees) + 3.72 * math.sqrt(2 / (9 * degrees))) ** 3


def coins(stream, place):
    return stream(Stream.COIN, place)


def test_draws_follow_the_model():
    """T8, and T13: a coin that is the number the draft was drawn by is noticed."""
    found, degrees = simulate(4_000, 4, coins)
    assert found < limit(degrees)
    found, degrees = simulate(4_000, 4, lambda stream, place: stream(Stream.DRAFT, place))
    assert found > 2 * limit(degrees)


@pytest.mark.prove
def test_a_million_draws_follow_the_model(record_proof, monkeypatch):
    """T8; the control draws the token in place of a rejected draft with 1% of p in the residual."""
    count = 1_000_000
    found, degrees = simulate(count, 4, coins)
    residual = ops.residual
    monkeypatch.setattr(ops, "residual", lambda p, q: 0.99 * residual(p, q) + 0.01 * p)
    planted, _ = simulate(count, 4, coins)
    most = limit(degrees)
    record_proof(draws=count, chi_square=found, degrees=degrees, limit=most, planted=planted)
    assert found < most < planted


def test_streams_share_nothing():
    """Numbers are uniform, and none of two streams, places or seeds tells about another."""
    keys = [(seed, stream, place) for seed in (0, 1) for stream in Stream for place in (0, 1, 2)]
    columns = torch.stack(
        [number([uniform(s + 7 * n, *rest) for n in range(400)]) for s, *rest in keys]
    )
    assert len(columns.unique()) == columns.numel()
    assert float(columns.min()) >= 0
    assert float(columns.max()) < 1
    assert float((columns.mean(1) - 0.5).abs().max()) < 4.5 * math.sqrt(1 / 12 / 400)
    correlation = torch.corrcoef(columns) - torch.eye(len(columns), dtype=torch.float64)
    assert float(correlation.abs().max()) < 4.5 / math.sqrt(400)
    assert all(
        a != b for a, b in itertools.pairwise(uniform(1, Stream.DRAFT, 2, k) for k in range(5))
    )
