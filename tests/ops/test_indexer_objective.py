"""What the indexer learns from: the attention that teaches it, its scores, their divergence."""

import math

import pytest
import torch

from openv41 import ops
from openv41.ops import indexer as module
from tests.close import assert_close
from tests.oracles import attention, indexer

SCALE = 0.6


def attended(T, H=3, C=4, S=9, M=7, W=3, K=4, dtype=torch.float64):  # noqa: PLR0917
    """q, window and its rows, main KV and its rows (each at most once), sinks."""
    rows = torch.stack([torch.randperm(M)[:K] for _ in range(T)])
    rows = torch.where(torch.rand(T, K) < 0.3, -1, rows)
    window_rows = torch.randint(-1, S, (T, W))
    q, window_kv, main_kv = torch.randn(T, H, C), torch.randn(S, C), torch.randn(M, C)
    return q.to(dtype), window_kv.to(dtype), window_rows, main_kv.to(dtype), rows, torch.randn(H)


def mass(q, window_kv, window_rows, main_kv, rows, sink):  # noqa: PLR0917
    keys = ops.plan_keys(window_rows)
    return ops.attention_mass(q, window_kv, keys, main_kv, rows, sink, SCALE)


def mass_oracle(q, window_kv, window_rows, main_kv, rows, sink):  # noqa: PLR0917
    out = torch.zeros(rows.shape, dtype=torch.float64)
    for t, listed in enumerate(rows):
        near = window_kv[window_rows[t][window_rows[t] >= 0]].double().tolist()
        far = main_kv[listed[listed >= 0]].double().tolist()
        found = attention.mass(q[t].double().tolist(), near, far, sink.tolist(), SCALE)
        out[t, listed >= 0] = torch.tensor(found, dtype=torch.float64)
    return out


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("T", [1, 15, 63, 129])
def test_mass_is_a_slice_of_the_joint_softmax(T, dtype):
    inputs = attended(T, dtype=dtype)
    assert_close("mass", mass(*inputs), mass_oracle(*inputs), rtol=1e-5, atol=1e-6)


def test_mass_on_paper():
    """One window key and one entry that both score ln 3, sink 0: the entry gets 3/7, twice."""
    q = torch.tensor([[[math.log(3) / SCALE, 0.0]] * 2]).view(1, 2, 2)
    kv, one = torch.tensor([[1.0, 8.0]]), torch.tensor([[0]])
    got = mass(q, kv, one, kv, one, torch.zeros(2))
    assert_close("mass", got, torch.tensor([[6 / 7]]), rtol=1e-6)


def test_softmax_over_entries_alone_is_another_teacher():
    """Heads that look at the window or the sink teach less: renormalised heads would not."""
    q, window_kv, window_rows, main_kv, _, sink = attended(20)
    rows = torch.arange(4).expand(20, -1)
    got = mass(q, window_kv, window_rows, main_kv, rows, sink)
    joint = got / got.sum(1, keepdim=True)
    per_head = (torch.einsum("thc,kc->thk", q, main_kv[:4]) * SCALE).softmax(-1)
    assert (joint - per_head.mean(1)).abs().max() > 0.05
    blind = mass(q, window_kv, window_rows * 0 - 1, main_kv, rows, sink * 0 - 1e4)
    assert_close("no window, no sink", blind / 3, per_head.mean(1), rtol=1e-9, atol=1e-12)


def test_mass_has_no_gradient():
    inputs = attended(3)
    inputs[0].requires_grad_()
    assert not mass(*inputs).requires_grad


def test_mass_of_many_queries_and_of_none():
    inputs = attended(1030)
    last = [inputs[0][1029:], inputs[1], inputs[2][1029:], inputs[3], inputs[4][1029:], inputs[5]]
    assert_close("last", mass(*inputs)[1029:], mass(*last), rtol=1e-10, atol=1e-12)
    assert mass(*attended(1, K=0)).shape == (1, 0)
    q, window_kv, window_rows, _, rows, sink = attended(2)
    assert not mass(q, window_kv, window_rows, window_kv[:0], rows * 0 - 1, sink).any()


def scored(T, I=3, J=4, M=6, K=3, dtype=torch.float64):  # noqa: E741, PLR0917
    rows = torch.stack([torch.randperm(M)[:K] for _ in range(T)])
    rows = torch.where(torch.rand(T, K) < 0.3, -1, rows)
    return torch.randn(T, I, J).to(dtype), torch.randn(T, I).to(dtype), torch.randn(M, J), rows


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("at_once", [2, 512])
@pytest.mark.parametrize("T", [1, 5])
def test_selected_scores_are_those_of_the_indexer(T, at_once, deterministic, monkeypatch):
    monkeypatch.setattr(module, "QUERIES_AT_ONCE", at_once)
    q, weights, keys, rows = scored(T)
    got = ops.selected_scores(q, weights, keys, rows, deterministic=deterministic)
    for t, listed in enumerate(rows):
        want = indexer.scores(q[t].numpy(), weights[t].numpy(), keys[listed].double().numpy())
        want[listed.numpy() < 0] = -math.inf
        assert_close("scores", got[t], torch.tensor(want), rtol=1e-10, atol=1e-12)


def test_bfloat16_scores_round_as_the_choice_does():
    q, weights, keys, rows = scored(5, dtype=torch.float32)
    rows = rows.clamp(min=0)
    every = ops.index_scores(q[None], weights[None], keys[None], torch.bfloat16)[0]
    got = ops.selected_scores(q, weights, keys, rows, torch.bfloat16)
    assert torch.equal(got, every.float().gather(1, rows))


def test_nothing_to_score():
    q, weights, keys, rows = scored(2)
    assert ops.selected_scores(q, weights, keys[:0], rows * 0 - 1).eq(-math.inf).all()
    assert ops.selected_scores(q, weights, keys, rows[:, :0]).shape == (2, 0)
    assert ops.selected_scores(q[:0], weights[:0], keys, rows[:0]).shape == (0, 3)


def test_divergence_matches_oracle():
    scores, masses = torch.randn(40, 5, dtype=torch.float64) * 4, torch.rand(40, 5).double()
    absent = torch.rand(40, 5) < 0.3
    absent[3], absent[4] = True, torch.tensor([False, True, True, True, True])
    scores, masses = scores.masked_fill(absent, -math.inf), masses.masked_fill(absent, 0)
    want = 0.0
    for values, part, hidden in zip(scores, masses, absent, strict=True):
        alone = ops.selection_divergence(values[None], part[None]).item()
        one = indexer.divergence(values[~hidden].tolist(), part[~hidden].tolist())
        assert alone == pytest.approx(one, rel=1e-10, abs=1e-12)
        want += one
    assert ops.selection_divergence(scores, masses).item() == pytest.approx(want, rel=1e-10)


def test_divergence_is_zero_where_the_student_agrees_and_where_nothing_is_seen():
    masses = torch.rand(4, 3)
    assert_close("same", ops.selection_divergence(masses.log() + 7, masses), 0.0, atol=1e-6)
    unseen = torch.full((2, 3), -math.inf, requires_grad=True)
    got = ops.selection_divergence(unseen, torch.zeros(2, 3))
    got.backward()
    assert got.item() == 0
    assert not unseen.grad.any()
    assert ops.selection_divergence(torch.zeros(2, 0), torch.zeros(2, 0)).item() == 0


def test_divergence_survives_tiny_masses_and_large_scores():
    scores = torch.tensor([[1e4, -1e4], [0.0, -math.inf]], requires_grad=True)
    got = ops.selection_divergence(scores, torch.tensor([[1e-37, 3e-37], [1e-30, 0.0]]))
    got.backward()
    assert got.item() == pytest.approx(0.75 * 2e4, rel=1e-3)
    assert scores.grad.isfinite().all()


@pytest.mark.parametrize("at_once", [2, 512])
def test_gradcheck(at_once, monkeypatch):
    """Finite differences of the whole objective, through the gathered scores."""
    monkeypatch.setattr(module, "QUERIES_AT_ONCE", at_once)
    q, weights, keys, rows = scored(5)
    rows[2] = -1
    masses = torch.rand(rows.shape).double().masked_fill(rows < 0, 0)

    def objective(q, weights, keys):
        return ops.selection_divergence(ops.selected_scores(q, weights, keys, rows), masses)

    inputs = [x.double().requires_grad_() for x in (q, weights, keys)]
    assert torch.autograd.gradcheck(objective, inputs)
    grads = torch.autograd.grad(objective(*inputs), inputs)
    assert all(grad.any() for grad in grads)
    assert not grads[0][2].any()
