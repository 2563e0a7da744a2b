"""Schedules against brute force, and what they must not look at. Tests T11, T12, T14."""

import itertools
import random
import time

import numpy as np
import pytest

from openv41.engine.verification_scheduler import (
    ConfidenceHistory,
    admit,
    best_budget,
    early_stop,
    ordered,
    rates,
    survival,
)
from tests.oracles.verification import algorithm_1, best_rate, global_search, rate

TARGET, DRAFT = (0.7, 0.3), (0.5, 0.5)  # of two tokens
# Appendix A of the DSpark paper: steps per second of 1, 2 and 3 rows.
PAPER_SECONDS = np.array([1 / 1.0, 1 / 0.5, 1 / 0.45])


def jagged(generator, sizes):
    """Seconds that rise in steps of any height, now and then not at all."""
    steps = generator.random(sizes) * generator.choice([0.0, 0.02, 0.6], sizes)
    return 1.0 + np.cumsum(steps)


def instances(count, seed):
    generator = np.random.default_rng(seed)
    for _ in range(count):
        requests, drafts = generator.integers(1, 5), generator.integers(1, 5)
        confidence = generator.random((requests, drafts))
        exact = generator.random(confidence.shape)
        confidence[exact < 0.2] = 1.0
        confidence[exact > 0.9] = 0.0
        yield survival(confidence), jagged(generator, confidence.size + 1)


def test_survival_is_the_product_up_to_a_draft():
    found = survival(np.array([[0.5, 0.5, 1.0], [1.0, 2.0, -1.0]]))
    np.testing.assert_array_equal(found, [[0.5, 0.25, 0.25], [1, 1, 0]])


def test_survival_ends_with_the_drafts_and_where_a_confidence_is_no_number():
    confidence = np.array([[0.5, np.nan, 1.0], [0.5, 0.5, 0.5]], np.float32)
    np.testing.assert_array_equal(survival(confidence, [3, 1]), [[0.5, 0, 0], [0.5, 0, 0]])


def test_survival_never_rises_along_a_row():
    near_one = 1 - np.random.default_rng(0).random((200, 7)) * 1e-15
    assert (np.diff(survival(near_one), axis=1) <= 0).all()


def test_candidates_come_by_survival_then_position_then_request():
    chances, owners = ordered(np.array([[1.0, 1.0, 0.0], [1.0, 0.5, 0.5], [1.0, 1.0, 1.0]]))
    assert owners.tolist() == [0, 1, 2, 0, 2, 2, 1, 1]
    assert chances.tolist() == [1, 1, 1, 1, 1, 1, 0.5, 0.5]


def test_the_budget_is_the_optimum_over_all_lengths():
    for survivals, seconds in instances(300, seed=1):
        budget = best_budget(survivals, seconds)
        lengths = admit(survivals, budget)
        assert lengths.sum() == budget
        best = best_rate(survivals.tolist(), seconds)
        assert rate(survivals.tolist(), lengths, seconds) == pytest.approx(best, rel=1e-12)
        assert rates(survivals, seconds)[budget] == pytest.approx(best, rel=1e-12)


def test_early_stop_is_algorithm_1():
    differ = 0
    for survivals, seconds in instances(300, seed=2):
        found = early_stop(survivals, seconds).tolist()
        assert found == algorithm_1(survivals.tolist(), seconds)
        differ += sum(found) != best_budget(survivals, seconds)
    assert differ > 20, "the costs are not jagged enough to tell a stop from a search"


def test_early_stop_is_the_optimum_where_costs_are_smooth():
    generator = np.random.default_rng(3)
    for _ in range(100):
        survivals = survival(generator.random((4, 4)))
        seconds = 1.0 + generator.random() * np.arange(17)
        found = rate(survivals.tolist(), early_stop(survivals, seconds), seconds)
        assert found == pytest.approx(best_rate(survivals.tolist(), seconds), rel=1e-12)


def test_dearer_rows_mean_fewer_of_them():
    survivals = survival(np.random.default_rng(4).random((8, 5)))
    slopes = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0)
    curves = [1.0 + slope * np.arange(41) for slope in slopes]
    budgets = [best_budget(survivals, seconds) for seconds in curves]
    stops = [early_stop(survivals, seconds).sum() for seconds in curves]
    assert budgets == sorted(budgets, reverse=True)
    assert budgets == stops
    assert budgets[0] > budgets[2] > budgets[-1] == 0


def test_a_candidate_that_changes_nothing_ends_the_search():
    assert early_stop(np.ones((1, 2)), np.array([1.0, 2.0, 2.5])).tolist() == [0]
    assert best_budget(np.ones((1, 1)), np.array([1.0, 2.0])) == 0


def test_many_equal_candidates_are_in_order_too():
    assert admit(np.ones((100, 3)), 150).tolist() == [2] * 50 + [1] * 50


@pytest.mark.parametrize("shape", [(0, 5), (3, 5), (3, 0)])
def test_nothing_to_verify(shape):
    nothing, seconds = np.zeros(shape), np.ones(shape[0] * shape[1] + 1)
    assert best_budget(nothing, seconds) == 0
    assert early_stop(nothing, seconds).tolist() == [0] * shape[0]
    assert admit(nothing, 4).tolist() == [0] * shape[0]


def test_a_budget_never_reaches_beyond_the_drafts():
    survivals = survival(np.ones((3, 4)), [0, 4, 2])
    assert admit(survivals, 100).tolist() == [0, 4, 2]


# What an output is distributed like: two tokens, of which the first is a draft.


def first_token(lengths_of):
    """Chances of the first token of request 0, by the token-wise rule, over all drafts of it.

    ``lengths_of`` maps its first drafted token to [(chance, length), ...].
    """
    out = [0.0, 0.0]
    for drafted, chance_drafted in enumerate(DRAFT):
        for chance, length in lengths_of(drafted):
            weight = chance_drafted * chance
            if length == 0:
                for token in (0, 1):
                    out[token] += weight * TARGET[token]
                continue
            accepted = min(1.0, TARGET[drafted] / chance_drafted)
            out[drafted] += weight * accepted
            out[0] += weight * (1 - accepted)  # the residual of these two is token 0 alone
    return out


def paper_survivals(drafted):
    """What comes behind token 0 seems certain, behind token 1 hopeless."""
    return survival(np.array([[0.8, 0.9 if drafted == 0 else 0.0]]))


def test_early_stop_keeps_the_distribution():
    def lengths(drafted):
        return [(1.0, int(early_stop(paper_survivals(drafted), PAPER_SECONDS)[0]))]

    np.testing.assert_allclose(first_token(lengths), TARGET, atol=1e-12)


@pytest.mark.parametrize("budget", range(4))
def test_a_budget_from_the_past_keeps_the_distribution(budget):
    def lengths(drafted):
        return [(1.0, int(admit(paper_survivals(drafted), budget)[0]))]

    np.testing.assert_allclose(first_token(lengths), TARGET, atol=1e-12)


def test_a_search_over_current_survivals_does_not():
    """The forbidden schedule: the second draft decides whether the first one is verified."""

    def lengths(drafted):
        return [(1.0, global_search(paper_survivals(drafted).tolist(), PAPER_SECONDS)[0])]

    np.testing.assert_allclose(first_token(lengths), (0.85, 0.15), atol=1e-12)

    def budgets(drafted):
        return [(1.0, best_budget(paper_survivals(drafted), PAPER_SECONDS))]

    np.testing.assert_allclose(first_token(budgets), (0.85, 0.15), atol=1e-12)


def tied_survivals(drafted):
    """Two requests; all is certain but for the second draft behind token 1 of the first one."""
    return survival(np.array([[1.0, 1.0 if drafted == 0 else 0.0], [1.0, 0.0]]))


@pytest.mark.parametrize("budget", range(5))
def test_equal_candidates_in_a_stable_order_keep_the_distribution(budget):
    def lengths(drafted):
        return [(1.0, int(admit(tied_survivals(drafted), budget)[0]))]

    np.testing.assert_allclose(first_token(lengths), TARGET, atol=1e-12)


def test_equal_candidates_in_any_order_do_not():
    """The forbidden order: who has more equal candidates is more likely to be among the first."""

    def lengths(drafted):
        _, owners = ordered(tied_survivals(drafted))
        return [(1 / len(owners), 1 if owner == 0 else 0) for owner in owners]

    np.testing.assert_allclose(first_token(lengths), (0.725, 0.275), atol=1e-12)


def confidences(draws, seed):
    """Confidence of draft k of a request as any function of the drafts before it."""
    found = np.zeros(draws.shape)
    for request, drafts in itertools.product(range(len(draws)), range(draws.shape[1])):
        key = (seed, request, drafts, *draws[request, :drafts].tolist())
        chance = random.Random(repr(key)).random()
        found[request, drafts] = 1.0 if chance < 0.4 else 0.0 if chance < 0.5 else chance
    return found


def anticipations(schedule, count=100):
    """Drafts whose admission changes with what is drawn at them or behind them."""
    found = 0
    for seed in range(count):
        generator = np.random.default_rng(seed)
        draws = generator.integers(0, 3, (3, 4))
        seconds = jagged(generator, draws.size + 1)
        before = schedule(survival(confidences(draws, seed)), seconds)
        request, place = generator.integers(0, 3), generator.integers(0, 4)
        other = draws.copy()
        other[request, place:] = (other[request, place:] + 1 + generator.integers(0, 2)) % 3
        after = schedule(survival(confidences(other, seed)), seconds)
        found += min(before[request], place + 1) != min(after[request], place + 1)
    return found


def test_admission_does_not_look_ahead():
    assert anticipations(early_stop) == 0
    for budget in range(1, 9):
        assert anticipations(lambda survivals, _, k=budget: admit(survivals, k)) == 0


def test_a_search_and_unstable_ties_look_ahead():
    def search(survivals, seconds):
        return global_search(survivals.tolist(), seconds)

    def later_first(survivals, _):
        owners = np.tile(np.arange(len(survivals)), survivals.shape[1])
        order = np.argsort(-survivals[:, ::-1].T.ravel(), kind="stable")[:2]
        return np.bincount(owners[order], minlength=len(survivals))

    assert anticipations(search, 400) > 0
    assert anticipations(later_first, 400) > 0


def test_history_is_as_old_as_it_says():
    history = ConfidenceHistory(2, lag=2)
    history.publish([7, 8], np.array([[0.1, 0.1], [0.2, 0.2]]))
    np.testing.assert_array_equal(history.rows([7, 8]), np.ones((2, 2)))
    history.publish([7], np.array([[0.3, 0.3]]))
    np.testing.assert_array_equal(history.rows([8, 7, 9]), [[0.2, 0.2], [0.1, 0.1], [1, 1]])
    history.publish([], np.zeros((0, 2)))
    np.testing.assert_array_equal(history.rows([7, 8]), [[0.3, 0.3], [0.2, 0.2]])


def test_history_of_an_ended_request_is_gone():
    history = ConfidenceHistory(1, lag=3)
    for value in (0.1, 0.2, 0.3):
        history.publish([7], np.array([[value]]))
    history.forget(7)
    for _ in range(3):
        np.testing.assert_array_equal(history.rows([7]), [[1.0]])
        history.publish([], np.zeros((0, 1)))


def test_ten_thousand_requests_take_n_log_n():
    def seconds_of(requests):
        survivals = survival(np.random.default_rng(0).random((requests, 5)))
        seconds = 1.0 + 1e-4 * np.arange(survivals.size + 1)
        took = []
        for _ in range(5):
            start = time.thread_time()
            admit(survivals, best_budget(survivals, seconds))
            took.append(time.thread_time() - start)
        return min(took)

    few, many = seconds_of(1000), seconds_of(10_000)
    assert many < 0.5
    assert many < 50 * few, "ten times the requests take fifty times as long"
