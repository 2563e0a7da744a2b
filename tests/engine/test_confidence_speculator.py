"""The speculator on requests whose drafts are accepted with known chances."""

import numpy as np
import pytest

from openv41.engine.confidence_speculator import PROBES, ConfidenceSpeculator
from openv41.engine.cost_table import CostTable
from openv41.engine.speculation import VerifyAll

DRAFTS = 5


def table(row, draft, base=1.0):
    """Steps whose rows cost ``row`` each beside ``base``, drafting ``draft`` for each request."""
    requests = (1, 2, 4, 8, 16, 32, 64)
    return CostTable(
        requests=requests,
        plain=tuple(base + row * r for r in requests),
        verify=tuple(
            tuple(base + (row + draft) * r + row * r * n for n in range(DRAFTS + 1))
            for r in requests
        ),
    )


FREE, DEAR = table(1e-4, 1e-4), table(1.0, 0.3, base=0.01)


def logit(chance):
    return np.log(chance / (1 - chance))


class Play:
    """Steps of requests; draft k of one is accepted with its chance, given those before it."""

    def __init__(self, speculator, seed=0):
        self.speculator, self.generator = speculator, np.random.default_rng(seed)
        self.tokens = self.steps = self.drafted = 0
        self.lengths = []

    def step(self, requests, chances, told=None):
        """``told`` are the confidences, if not the chances; say whether the step drafts."""
        chances = np.broadcast_to(chances, (len(requests), DRAFTS))
        told = chances if told is None else np.broadcast_to(told, chances.shape)
        self.steps += 1
        self.tokens += len(requests)
        if not self.speculator.plan(requests):
            self.lengths = [0] * len(requests)
            self.speculator.verified([], [], [])
            return False
        limits = [DRAFTS] * len(requests)
        self.lengths = list(self.speculator.lengths(requests, logit(told), limits))
        hits = np.cumprod(self.generator.random(chances.shape) < chances, axis=1).sum(axis=1)
        accepted = np.minimum(hits, self.lengths)
        self.speculator.verified(requests, self.lengths, accepted.tolist())
        self.tokens += accepted.sum()
        self.drafted += 1
        return True


def test_cheap_rows_are_all_used():
    play = Play(ConfidenceSpeculator(FREE, num_drafts=DRAFTS))
    for _ in range(20):
        assert play.step([3], 0.9)
    assert play.lengths == [DRAFTS]


def test_what_does_not_pay_is_not_drafted_but_for_a_probe():
    play = Play(ConfidenceSpeculator(table(0.1, 0.05), num_drafts=DRAFTS))
    for _ in range(10 + sum(PROBES[0] << n for n in range(4))):
        play.step(list(range(8)), 0.05)
    assert 4 <= play.drafted <= 12, "a few steps to learn, then a trial now and then"


def test_what_could_not_pay_is_never_tried():
    play = Play(ConfidenceSpeculator(DEAR, num_drafts=DRAFTS))
    for _ in range(2 * PROBES[0]):
        play.step(list(range(8)), 1.0)
    assert not play.drafted


def test_new_requests_do_not_start_drafting_again():
    play = Play(ConfidenceSpeculator(DEAR, num_drafts=DRAFTS))
    for _ in range(400):
        play.step(list(range(8)), 0.3)
    drafted = play.drafted
    for number in range(PROBES[0]):
        play.step([100 + 8 * number + i for i in range(8)], 0.3)
    assert play.drafted <= drafted + 1


def test_drafting_comes_back_when_the_load_falls():
    costs = table(0.08, 0.02)
    play = Play(ConfidenceSpeculator(costs, num_drafts=DRAFTS))
    for _ in range(200):
        play.step(list(range(64)), 0.6)
    assert not play.step(list(range(64)), 0.6)
    assert play.step([5], 0.6)


def test_a_probe_finds_that_acceptance_has_changed():
    costs = table(0.1, 0.05)
    play = Play(ConfidenceSpeculator(costs, num_drafts=DRAFTS))
    for _ in range(300):
        play.step([1, 2], 0.05)
    assert not play.step([1, 2], 0.05)
    drafted = play.drafted
    for _ in range(PROBES[1] + 300):
        play.step([1, 2], 0.95)
    assert play.drafted > drafted + 200


def test_trials_cost_little_however_dear_a_draft_is():
    """As where steps without drafts alone are replayed from a graph."""
    for dear, trials in ((2.0, True), (20.0, False)):
        costs = CostTable(requests=(1,), plain=(1.0,), verify=((dear,) * (DRAFTS + 1),))
        play, seconds, steps = Play(ConfidenceSpeculator(costs, num_drafts=DRAFTS)), 0.0, 3000
        for _ in range(steps):
            seconds += dear if play.step([1], 0.02) else 1.0
        assert (play.drafted > 5) is trials, play.drafted
        assert seconds < 1.03 * steps, "the first steps, then 2% of trials at most"


def test_confidences_that_promise_too_much_are_not_trusted_for_long():
    costs = table(0.3, 0.1)
    play = Play(ConfidenceSpeculator(costs, num_drafts=DRAFTS))
    for _ in range(400):
        play.step(list(range(8)), 0.1, told=0.95)
    assert play.speculator.reliability[0] < 0.4
    assert play.drafted < 60


def test_promises_that_are_half_kept_get_half_the_rows():
    budgets = []
    for chance in (0.95, 0.5):
        play = Play(ConfidenceSpeculator(table(0.12, 0.01), num_drafts=DRAFTS))
        for _ in range(100):
            play.step([1, 2], chance, told=0.95)
        budgets.append(play.speculator.budget)
    assert budgets[0] == 10
    assert 0 < budgets[1] < 10


def test_rows_go_to_the_request_whose_drafts_survive():
    play = Play(ConfidenceSpeculator(table(0.2, 0.0), num_drafts=DRAFTS))
    chances = np.array([[0.95] * DRAFTS, [0.05] * DRAFTS])
    for _ in range(10):
        play.step([1, 2], chances)
    assert play.lengths[0] >= 3
    assert play.lengths[1] == 0


def test_the_budget_does_not_depend_on_the_step():
    """Only the split does: all drafts of a step have the same sum whatever is drawn."""
    sums = set()
    for last in (0.2, 0.9):
        play = Play(ConfidenceSpeculator(table(0.1, 0.0), num_drafts=DRAFTS))
        for _ in range(10):
            play.step([1, 2, 3], 0.7)
        play.step([1, 2, 3], last)
        sums.add((play.speculator.budget, sum(play.lengths)))
    assert len(sums) == 1


def test_a_step_that_could_not_draft_is_not_planned():
    """The engine does not ask where no request has room for a draft."""
    play = Play(ConfidenceSpeculator(FREE, num_drafts=DRAFTS))
    play.step([1, 2], 0.9)
    play.speculator.verified([], [], [])
    assert play.step([1, 2], 0.9)
    assert play.lengths == [DRAFTS, DRAFTS]


def test_temperatures_change_what_is_admitted():
    costs = table(0.25, 0.0)
    lengths = []
    for temperatures in (None, [5.0] * DRAFTS):
        play = Play(ConfidenceSpeculator(costs, num_drafts=DRAFTS, temperatures=temperatures))
        for _ in range(5):
            play.step([1], 0.9)
        lengths.append(play.lengths[0])
    assert lengths[0] > lengths[1]


@pytest.mark.parametrize("lag", [0, 1, 2, 5])
def test_every_lag_gains_about_the_same(lag):
    costs = table(0.05, 0.02)
    play = Play(ConfidenceSpeculator(costs, num_drafts=DRAFTS, lag=lag))
    for _ in range(200):
        play.step(list(range(4)), 0.7)
    assert play.tokens / play.steps > 4 * 2.3


def test_it_is_never_much_slower_than_the_best_of_none_and_all():
    for row, draft, chance in [(0.01, 0.01, 0.8), (0.2, 0.1, 0.7), (1.0, 0.3, 0.6)]:
        costs = table(row, draft)
        requests = list(range(16))
        rates = []
        for speculator in (ConfidenceSpeculator(costs, num_drafts=DRAFTS), VerifyAll()):
            play, seconds = Play(speculator), 0.0
            for _ in range(150):
                drafts = play.step(requests, chance)
                times = costs.step_seconds(16, 16 * DRAFTS)
                seconds += times[sum(play.lengths)] if drafts else costs.plain_seconds(16)
            rates.append(play.tokens / seconds)
        plain = 16 / costs.plain_seconds(16)
        assert rates[0] > 0.97 * max(plain, rates[1]), (row, draft, rates, plain)
