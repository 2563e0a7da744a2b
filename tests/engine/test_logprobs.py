"""Log-probabilities against loops."""

import math

import pytest
import torch

from openv41.engine.logprobs import logprobs, row_logprobs
from openv41.engine.request import TokenLogprob
from openv41.engine.sampler import LogitsError

pytestmark = pytest.mark.shapes


def naive(row, token, top):
    """(token, log-probability) of the token and of the ``top`` first by height, then id."""
    whole = math.fsum(math.exp(x) for x in row)
    order = sorted(range(len(row)), key=lambda t: (-row[t], t))[:top]
    return [(t, row[t] - math.log(whole)) for t in [token, *order]]


def flat(entry):
    first, rest = entry
    return [(found.token, found.logprob) for found in (first, *rest)]


def assert_equal(got, want):
    assert [token for token, _ in got] == [token for token, _ in want]
    assert [x for _, x in got] == pytest.approx([x for _, x in want], abs=4e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("top", [0, 1, 4, 30, 99])
def test_rows_equal_loops(top, dtype):
    logits = (torch.randn(7, 30) * 3).round().to(dtype)  # many are equal
    tokens = torch.randint(30, (7,)).tolist()
    for row, token, got in zip(
        logits.tolist(), tokens, row_logprobs(logits, tokens, top), strict=True
    ):
        assert_equal(flat(got), naive(row, token, top))


def test_one_row_has_the_bits_of_many():
    logits = torch.randn(9, 200)
    many = row_logprobs(logits, list(range(9)), 5)
    assert [logprobs(logits[i], i, 5) for i in range(9)] == many


def test_equals_come_by_id():
    logits = torch.zeros(2, 500)
    logits[0, [400, 17]] = 1.0
    first, second = row_logprobs(logits, [3, 4], 4)
    assert [found.token for found in first[1]] == [17, 400, 0, 1]
    assert [found.token for found in second[1]] == [0, 1, 2, 3]


def test_order_is_that_of_the_logits_where_log_probabilities_round_alike():
    logits = torch.zeros(1000)
    logits[500] = 1e-9
    _, top = logprobs(logits, 0, 2)
    assert [found.token for found in top] == [500, 0]
    assert top[0].logprob == top[1].logprob == pytest.approx(-math.log(1000))


def test_impossible_tokens_have_minus_infinity():
    own, top = logprobs(torch.tensor([0.0, -math.inf]), 1, 2)
    assert own == TokenLogprob(1, -math.inf)
    assert top == (TokenLogprob(0, 0.0), TokenLogprob(1, -math.inf))


def test_no_rows():
    assert row_logprobs(torch.zeros(0, 5), [], 3) == []


def test_a_row_with_nan_is_named():
    logits = torch.zeros(4, 5)
    logits[2, 3] = math.nan
    with pytest.raises(LogitsError, match="logits of row 2 hold NaN at 1 of 5 ids, first at 3"):
        row_logprobs(logits, [0] * 4, 1)
