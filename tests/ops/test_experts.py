"""Router: scores, choice, weights; sorting and combining."""

import math

import numpy as np
import pytest
import torch

from openv41 import ops
from tests.close import assert_close
from tests.oracles import experts as oracle


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("T", "D", "E", "A"), [(1, 1, 1, 1), (63, 5, 8, 2), (129, 3, 6, 3)])
def test_matches_oracle(T, D, E, A, dtype):
    x, gate = torch.randn(T, D).to(dtype), torch.randn(E, D).to(dtype)
    bias = torch.randn(E)
    scores = ops.router_scores(x, gate, 1.0)
    assert scores.dtype == torch.promote_types(dtype, torch.float32)
    ids = ops.choose_experts(scores, bias.expand_as(scores), A)
    weights = ops.expert_weights(scores, ids, normalise=True, scale=1.5)
    for t in range(T):
        want_ids, want = oracle.route(
            x[t].double().numpy(), gate.double().numpy(), bias.numpy(), top_k=A, scale=1.5
        )
        assert ids[t].tolist() == sorted(want_ids)
        order = np.argsort(want_ids)
        assert_close("weights", weights[t], torch.tensor(want)[order], rtol=1e-5, atol=1e-6)


def test_closed_form_of_the_score():
    logits = torch.tensor([[-3.0], [0.0], [2.0], [50.0]])
    got = ops.router_scores(logits, torch.ones(1, 1), 1.0)
    want = [math.sqrt(math.log1p(math.exp(v))) for v in (-3.0, 0.0, 2.0)] + [math.sqrt(50.0)]
    assert_close("score", got[:, 0], torch.tensor(want), rtol=1e-6)
    cooler = ops.router_scores(logits, torch.ones(1, 1), 2.0)
    assert_close(
        "temperature", cooler, ops.router_scores(logits / 2, torch.ones(1, 1), 1.0), ulps=2
    )


def test_choice_of_bfloat16_inputs_is_made_in_float32():
    x, gate = torch.randn(200, 64).bfloat16(), torch.randn(16, 64).bfloat16()
    scores = ops.router_scores(x, gate, 1.0)
    wide = ops.router_scores(x.double(), gate.double(), 1.0)
    none = torch.zeros(200, 16)
    ids = ops.choose_experts(scores, none, 4)
    assert torch.equal(ids, ops.choose_experts(wide, none.double(), 4))
    rough = ops.choose_experts(scores.bfloat16().float(), none, 4)
    assert not torch.equal(ids, rough), "rounded scores must choose differently somewhere"


def test_bias_steers_the_choice_and_not_the_weights():
    scores = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    bias = torch.tensor([[100.0, 0.0, 0.0, 0.0]])
    ids = ops.choose_experts(scores, bias, 2)
    assert ids.tolist() == [[0, 3]]
    weights = ops.expert_weights(scores, ids, normalise=True, scale=1.5)
    assert_close("weights", weights, torch.tensor([[0.3, 1.2]]), rtol=1e-6)


def test_text_and_image_rows_use_their_own_bias():
    scores = torch.ones(2, 4)
    bias = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]])
    ids = ops.choose_experts(scores, bias, 2)
    assert ids.tolist() == [[0, 1], [2, 3]]
    weights = ops.expert_weights(scores, ids, normalise=True, scale=1.0)
    assert torch.equal(weights, torch.full((2, 2), 0.5))


def test_ties_take_the_lowest_ids():
    scores = torch.tensor([[2.0, 1.0, 2.0, 2.0], [1.0, 1.0, 1.0, 1.0]])
    assert ops.choose_experts(scores, torch.zeros(2, 4), 2).tolist() == [[0, 2], [0, 1]]


def test_a_single_expert_keeps_its_raw_score():
    scores = torch.tensor([[0.25, 0.5]])
    ids = ops.choose_experts(scores, torch.zeros(1, 2), 1)
    assert ops.expert_weights(scores, ids, normalise=True, scale=1.5).tolist() == [[0.75]]


def test_without_normalisation():
    scores = torch.tensor([[0.25, 0.5]])
    got = ops.expert_weights(scores, torch.tensor([[0, 1]]), normalise=False, scale=2.0)
    assert got.tolist() == [[0.5, 1.0]]


def test_sort_and_combine_on_paper():
    ids = torch.tensor([[1, 2], [0, 1], [1, 2]])
    order, counts = ops.sort_by_expert(ids, 4)
    assert order.tolist() == [2, 0, 3, 4, 1, 5]
    assert counts.tolist() == [1, 3, 2, 0]
    outputs = torch.tensor([[10.0], [1.0], [20.0], [100.0], [2.0], [200.0]])
    assert ops.combine(outputs, order, 2).tolist() == [[3.0], [30.0], [300.0]]


def test_combine_sums_bfloat16_in_float32():
    outputs = torch.tensor([[256.0], [1.0], [1.0]]).bfloat16()
    got = ops.combine(outputs, torch.arange(3), 3)
    assert got.dtype == torch.float32
    assert got.tolist() == [[258.0]]


def test_empty():
    scores = ops.router_scores(torch.zeros(0, 3), torch.zeros(4, 3), 1.0)
    ids = ops.choose_experts(scores, scores, 2)
    order, counts = ops.sort_by_expert(ids, 4)
    assert counts.tolist() == [0, 0, 0, 0]
    assert ops.combine(torch.zeros(0, 3), order, 2).shape == (0, 3)


def test_gradcheck():
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    gate = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([[0, 2], [1, 4], [2, 3]])

    def run(x, gate):
        scores = ops.router_scores(x, gate, 1.0)
        return ops.expert_weights(scores, ids, normalise=True, scale=1.5)

    assert torch.autograd.gradcheck(run, (x, gate))


def test_very_negative_logits_keep_gradients_finite():
    """softplus underflows to 0 below -104 in float32, where the root has an infinite slope."""
    x = torch.tensor([[120.0, 1.0]], requires_grad=True)
    gate = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]], requires_grad=True)
    scores = ops.router_scores(x, gate, 1.0)
    ops.expert_weights(scores, torch.tensor([[0, 1]]), normalise=True, scale=1.5)[0, 0].backward()
    assert x.grad.isfinite().all()
    assert gate.grad.isfinite().all()


def test_a_row_of_nan_gets_legal_ids_and_keeps_to_itself():
    scores = torch.rand(3, 5)
    want = ops.choose_experts(scores, torch.zeros(3, 5), 2)
    scores[1] = torch.nan
    got = ops.choose_experts(scores, torch.zeros(3, 5), 2)
    assert got[1].tolist() == [0, 1]
    assert torch.equal(got[[0, 2]], want[[0, 2]])


def balance_case(lengths, E=5, A=2):
    scores = torch.rand(sum(lengths), E, dtype=torch.float64) + 0.1
    ids = torch.rand(sum(lengths), E).argsort(1)[:, :A]
    return scores, ids, torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))


@pytest.mark.parametrize("lengths", [(1,), (7,), (3, 0, 8, 1)])
def test_sequence_balance_matches_oracle(lengths):
    """Each sequence by a hand-written loop; together, weighted by their tokens."""
    scores, ids, sequences = balance_case(lengths)
    want = 0.0
    for rows, chosen in zip(scores.split(lengths), ids.split(lengths), strict=True):
        if len(rows):
            want += len(rows) / len(scores) * oracle.balance(rows.tolist(), chosen.tolist())
    got = ops.sequence_balance(scores, ids, sequences, len(lengths))
    assert got.item() == pytest.approx(want, rel=1e-12)


def test_sequence_balance_is_of_each_sequence_not_of_the_batch():
    """Two sequences, each on an expert of its own, are even only together."""
    scores = torch.tensor([[0.9, 0.1]] * 3 + [[0.1, 0.9]] * 3)
    ids = torch.tensor([[0]] * 3 + [[1]] * 3)
    apart = ops.sequence_balance(scores, ids, torch.tensor([0] * 3 + [1] * 3), 2)
    assert apart.item() == pytest.approx(1.8, rel=1e-6)
    together = ops.sequence_balance(scores, ids, torch.zeros(6, dtype=torch.int64), 1)
    assert together.item() == pytest.approx(1, rel=1e-6)


def test_sequence_balance_adds_up_over_accumulated_batches():
    lengths = (4, 2, 9)
    scores, ids, sequences = balance_case(lengths)
    whole = ops.sequence_balance(scores, ids, sequences, 3).item()
    first = ops.sequence_balance(scores[:6], ids[:6], sequences[:6], 2).item()
    last = ops.sequence_balance(scores[6:], ids[6:], sequences[6:] - 2, 1).item()
    assert (6 * first + 9 * last) / 15 == pytest.approx(whole, rel=1e-12)


def test_sequence_balance_pulls_on_the_scores_alone():
    """Finite differences, the choice held; a busy expert's score falls by the gradient."""
    scores, ids, sequences = balance_case((4, 3))
    scores.requires_grad_()
    assert torch.autograd.gradcheck(lambda s: ops.sequence_balance(s, ids, sequences, 2), [scores])
    busy = torch.zeros(6, 1, dtype=torch.int64)
    one = torch.zeros(6, dtype=torch.int64)
    even = torch.ones(6, 3, requires_grad=True)
    ops.sequence_balance(even, busy, one, 1).backward()
    assert (even.grad[:, 0] > 0).all()
    assert (even.grad[:, 1:] < 0).all()


def test_sequence_balance_of_nothing():
    scores, ids, sequences = balance_case((0,))
    assert ops.sequence_balance(scores, ids, sequences, 1).item() == 0
