"""Kernels of the indexer against float64 oracles: scores, choice, candidates, gradients."""

import math

import numpy as np
import pytest
import torch

from openv41 import ops
from openv41.ops import indexer as reference
from openv41.ops.quantize import quantize_mxfp4
from tests.close import assert_close
from tests.oracles import indexer as oracle

pytest.importorskip("triton", reason="Triton is not installed")
from openv41.ops import (
    index_prefill_cuda,
    indexer_triton,
    packed_index_cuda,
    packed_index_triton,
    top_k_cuda,
)
from openv41.ops.index_scores_triton import Tiling, dense_scores, packed_scores
from openv41.ops.packed_rows import unpack_rows
from openv41.ops.selected_scores_triton import backward
from openv41.ops.top_k_triton import Plan, choose

INF = math.inf
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter


def kinds(T, M, kind):
    """Scores of several distributions, ties and infinities among them."""
    scores = torch.randn(T, M)
    match kind:
        case "few values":
            scores = torch.randint(-2, 3, (T, M)).float()
        case "one":
            scores = torch.full((T, M), -INF)
            scores[:, M // 2] = 1.0
        case "zeros":
            scores = torch.where(torch.rand(T, M) < 0.5, 0.0, -0.0)
        case "infinities":
            scores[torch.rand(T, M) < 0.4] = INF
        case "mostly none":
            scores[torch.rand(T, M) < 0.9] = -INF
        case "tiny":
            scores *= 1e-39
        case "huge":
            scores *= 1e38
    return scores


KINDS = [
    "normal",
    "few values",
    "one",
    "zeros",
    "infinities",
    "mostly none",
    "tiny",
    "huge",
]


def chosen_oracle(scores, allowed, visible, k):
    out = torch.full((len(scores), min(k, scores.shape[1])), -1)
    for t, row in enumerate(scores.tolist()):
        legal = [x if j < visible[t] and allowed[t, j] else -INF for j, x in enumerate(row)]
        ids = oracle.select(legal, k)
        out[t, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
    return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("M", "k", "plan"), [(61, 7, None), (300, 16, Plan(64, 32)), (64, 64, None)]
)
def test_choice_follows_the_tie_rule(device, kind, M, k, plan):
    """In one program, and thinned twice; ids of 300 scores pass 64 at a time."""
    T = 3
    scores, allowed = kinds(T, M, kind), torch.rand(T, M) < 0.8
    visible = torch.tensor([M, M // 2, 0])
    want = chosen_oracle(scores, allowed, visible, k)
    parts = [x.to(device) for x in (visible, allowed)]
    assert torch.equal(choose(scores.to(device), k, *parts, plan).cpu(), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_choice_of_a_strided_view_without_masks(device, dtype):
    scores = torch.randn(40, 5).to(dtype).to(device)
    got = indexer_triton.select_top_k.run(scores.T, None, 6)
    want = chosen_oracle(scores.T.float().cpu(), torch.ones(5, 40), [40] * 5, 6)
    assert torch.equal(got.cpu(), want)


def test_choice_of_nothing(device):
    for T, M, k in ((0, 5, 3), (2, 5, 0), (2, 0, 3)):
        scores = torch.randn(T, M, device=device)
        got = indexer_triton.select_top_k.run(scores, scores > 9, k)
        assert got.shape == (T, min(k, M))
        assert got.dtype == torch.int64


def test_candidates_pin_the_newest_block(device):
    T, M, size, num = 6, 75, 8, 4
    scores = torch.randint(-3, 4, (T, M)).float()
    visible = torch.tensor([0, 1, 8, 9, 74, 75])
    got = indexer_triton.choose_candidates.run(
        scores.to(device), visible.to(device), num, size
    ).cpu()
    for t in range(T):
        want = oracle.candidate_blocks(scores[t].tolist(), int(visible[t]), size, num)
        assert got[t].tolist() == want + [-1] * (num - len(want))


def scores_oracle(q, weights, keys):
    return torch.stack(
        [
            torch.stack(
                [
                    torch.from_numpy(oracle.scores(*(p.double().numpy() for p in (a, w, k))))
                    for a, w in zip(qs, ws, strict=True)
                ]
            )
            for qs, ws, k in zip(q, weights, keys, strict=True)
        ]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 1), (2, 3, 70, 4, 24), (1, 5, 33, 20, 32)])
def test_scores_of_numbers(device, shape, dtype):
    B, T, M, I, J = shape  # noqa: E741
    q, keys = torch.randn(B, T, I, J).to(dtype), torch.randn(B, M, J).to(dtype)
    weights = torch.randn(B, T, I).to(dtype)
    got = indexer_triton.index_scores.run(*(x.to(device) for x in (q, weights, keys)))
    assert got.dtype == torch.float32
    assert_close("scores", got.cpu(), scores_oracle(q, weights, keys), ulps=16, terms=I * J)


def test_scores_rounded_as_the_released_code_rounds(device):
    q, keys = torch.randn(1, 2, 4, 32), torch.randn(1, 9, 32)
    weights = torch.randn(1, 2, 4)
    parts = [x.to(device) for x in (q, weights, keys)]
    got = indexer_triton.index_scores.run(*parts, torch.bfloat16)
    want = reference.index_scores.reference(q, weights, keys, torch.bfloat16)
    assert got.dtype == torch.bfloat16
    terms = torch.einsum("btij,bmj->btim", q, keys).relu() * weights[..., None].abs()
    bound = 2**-6 * terms.sum(2).max().item()  # a unit of bf16 in each product and sum
    assert_close("rounded", got.float().cpu(), want.float(), rtol=0, atol=bound)
    exact = indexer_triton.index_scores.run(*parts)
    assert (got.float() - exact).abs().max() > 1e-3


def packed(*shape, spread=1.0):
    """Rows of codes and scales, and what they stand for; scales differ between blocks."""
    x = torch.randn(*shape, 128) * torch.exp2(spread * torch.randn(*shape, 4)).repeat_interleave(
        32, -1
    )
    codes, scales = quantize_mxfp4(x)
    rows = torch.cat([codes, scales.view(torch.uint8)], dim=-1)
    return rows, unpack_rows(rows)


@pytest.mark.parametrize(
    ("tokens", "tiling"),
    [(1, None), (3, Tiling(16, 2, 2, 4, 1)), (3, Tiling(16, 1, 2, 4, 1, turned=True))],
)
def test_scores_of_packed_rows(device, tokens, tiling):
    """Pages out of order, one never read and poisoned with NaN; scales down to the smallest."""
    B, heads, per_page, num = 2, 4, 8, 37
    q, q_values = packed(B, tokens, heads)
    keys, key_values = packed(11 * per_page, spread=20.0)
    keys[5 * per_page : 6 * per_page] = 255
    order = torch.tensor([[3, 1, 10, 0, 2], [9, 4, 8, 7, 6]])
    order[1, 4] = 5
    visible = torch.tensor([[37, 20, 1], [32, 0, 5]])[:, :tokens]
    weights = torch.randn(B, tokens, heads)
    rows = order.repeat_interleave(per_page, 1) * per_page + torch.arange(5 * per_page) % per_page
    parts = [x.to(device) for x in (q, weights, keys, order, visible)]
    got = packed_scores(*parts, per_page, num, tiling).cpu()
    want = scores_oracle(q_values, weights, key_values[rows[:, :num]])
    want = want.masked_fill(torch.arange(num) >= visible[..., None], -INF)
    known = want > -INF
    assert torch.equal(got == -INF, ~known)
    scale = want[known].abs().max().item()
    assert_close("scores", got[known], want[known], rtol=1e-5, atol=1e-6 * scale)


def test_scores_of_packed_candidates(device):
    """Each query's own blocks, one of them none, the last one partly visible."""
    B, tokens, heads, per_page, num = 2, 2, 3, 8, 37
    q, q_values = packed(B, tokens, heads)
    keys, key_values = packed(10 * per_page)
    order = torch.stack([torch.randperm(10)[:5] for _ in range(B)])
    pools = torch.tensor([[[0, 2, 4], [1, 3, -1]], [[2, 3, -1], [0, 1, 4]]])
    visible = torch.tensor([[37, 30], [25, 37]])
    weights = torch.randn(B, tokens, heads)
    parts = [x.to(device) for x in (q, weights, keys, order, visible)]
    run = packed_index_triton.packed_index_scores.run
    got = run(*parts, per_page, num, pools.to(device)).cpu()
    rows = (order[..., None] * per_page + torch.arange(per_page)).flatten(1)
    every = scores_oracle(q_values, weights, key_values[rows])  # [B, T, 40]
    every = every.masked_fill(torch.arange(40) >= visible[..., None], -INF)
    entries = (pools[..., None] * 8 + torch.arange(8)).flatten(2)
    want = every.gather(2, entries.clamp(min=0)).masked_fill(entries < 0, -INF)
    assert torch.equal(got == -INF, want == -INF)
    known = want > -INF
    assert_close("scores", got[known], want[known], rtol=1e-5, atol=1e-4)
    plain = ops.packed_index_scores(q, weights, keys, order, visible, per_page, num, pools)
    assert torch.equal(plain == -INF, ~known)
    assert_close("reference", plain[known], want[known], rtol=1e-5, atol=1e-4)


def test_packed_reference_is_the_oracle():
    q, q_values = packed(1, 2, 3)
    keys, key_values = packed(12)
    weights, visible = torch.randn(1, 2, 3), torch.tensor([[5, 7]])
    order = torch.tensor([[2, 0]])
    got = ops.packed_index_scores(q, weights, keys, order, visible, 4, 8)
    rows = torch.tensor([8, 9, 10, 11, 0, 1, 2, 3])
    want = scores_oracle(q_values, weights, key_values[None, rows])
    want = want.masked_fill(torch.arange(8) >= visible[..., None], -INF)
    assert_close("scores", got, want, ulps=16, terms=384)


def test_a_packed_key_with_a_nan_scale_scores_nan(device):
    q, _ = packed(1, 1, 2)
    keys, _ = packed(8)
    keys[3, 66] = 255
    table, visible = torch.tensor([[0]]), torch.tensor([[8]])
    parts = [x.to(device) for x in (q, torch.ones(1, 1, 2), keys, table, visible)]
    got = packed_index_triton.packed_index_scores.run(*parts, 8, 8)[0, 0]
    assert got.isnan().nonzero().tolist() == [[3]]


@pytest.mark.parametrize("workspace", [1 << 20, 20_000])
def test_choice_from_packed_rows(device, workspace):
    """All queries at once, and a few at a time; the candidates too."""
    T, heads, num, per_page, k = 5, 3, 60, 4, 6
    q, q_values = packed(T, heads)
    keys, key_values = packed(num)
    table, weights = torch.randperm(num // per_page), torch.randn(T, heads)
    visible = torch.tensor([60, 0, 7, 33, 59])
    rows = (table[:, None] * per_page + torch.arange(per_page)).flatten()
    want = scores_oracle(q_values[None], weights[None], key_values[None, rows])[0].float()
    parts = [x.to(device) for x in (q, weights, keys, table, visible)]
    run = packed_index_triton.packed_index_choice.run
    chosen, pool = run(*parts, per_page, num, k, 4, 8, workspace=workspace)
    assert torch.equal(chosen.cpu(), chosen_oracle(want, torch.ones(T, num), visible, k))
    for t in range(T):
        blocks = oracle.candidate_blocks(want[t].tolist(), int(visible[t]), 8, 4)
        assert pool[t].tolist() == blocks + [-1] * (4 - len(blocks))


def selected_inputs(T=5, I=4, J=24, M=30, K=7, dtype=torch.float32):  # noqa: E741
    rows = torch.stack([torch.randperm(M)[:K] for _ in range(T)])
    rows = torch.where(torch.rand(T, K) < 0.3, -1, rows)
    q, weights, keys = torch.randn(T, I, J), torch.randn(T, I), torch.randn(M, J)
    return [x.to(dtype) for x in (q, weights, keys)], rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_of_listed_rows_and_their_gradients(device, dtype):
    """Against float64 autograd through the plainest formula."""
    inputs, rows = selected_inputs(dtype=dtype)
    grad = torch.randn(rows.shape)
    exact = [x.double().requires_grad_() for x in inputs]
    dots = torch.einsum("tij,tkj->tik", exact[0], exact[2][rows.clamp(min=0)])
    want = (dots.relu() * exact[1][..., None]).sum(1)
    want.backward(grad.double() * (rows >= 0))
    ours = [x.to(device).requires_grad_() for x in inputs]
    got = indexer_triton.selected_scores.run(*ours, rows.to(device))
    loose = (
        {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    )
    assert torch.equal(got.cpu() == -INF, rows < 0)
    assert_close("scores", got.cpu()[rows >= 0], want[rows >= 0], rtol=1e-4, atol=1e-4)
    got.backward(grad.to(device))
    for name, a, b in zip(("q", "weights", "keys"), ours, exact, strict=True):
        assert a.grad.dtype == dtype
        assert_close(name, a.grad.cpu().double(), b.grad, **loose)


def test_key_gradients_do_not_depend_on_the_pieces(device):
    """Cut into queries by two; the last piece is short."""
    inputs, rows = selected_inputs(T=7)
    parts = tuple(x.to(device) for x in (*inputs, rows))
    grad = torch.randn(rows.shape).to(device)
    whole = backward(parts, grad, rounded=False)
    cut = backward(parts, grad, rounded=False, pairs=2 * 30, rows_at_once=16)
    for a, b in zip(whole, cut, strict=True):
        assert_close("gradient", a.cpu(), b.cpu(), rtol=1e-5, atol=1e-6)


def test_listed_rows_of_no_keys_have_a_gradient_of_zeros(device):
    (q, weights, _), _ = selected_inputs()
    parts = [x.to(device).requires_grad_() for x in (q, weights, torch.randn(0, 24))]
    rows = torch.full((5, 3), -1, device=device)
    got = indexer_triton.selected_scores.run(*parts, rows)
    assert (got == -INF).all()
    got.nan_to_num(neginf=0).sum().backward()
    assert parts[0].grad.abs().max() == 0


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (5, 7)])
def test_divergence_and_its_gradient(device, shape):
    """A query without entries, one without mass, places of no entry."""
    scores, mass = torch.randn(shape), torch.rand(shape)
    if all(shape):
        scores[:, 5:], mass[:, 5:] = -INF, 0.0
        scores[1], mass[1], mass[2] = -INF, 0.0, 0.0
        mass[3, 2] = 0.0
    exact = scores.double().requires_grad_()
    want = reference.selection_divergence.reference(exact, mass.double())
    (want * 3).backward()
    ours = scores.to(device).requires_grad_()
    got = indexer_triton.selection_divergence.run(ours, mass.to(device))
    (got * 3).backward()
    assert_close("divergence", got.cpu(), want.float(), rtol=1e-5, atol=1e-6)
    assert_close("gradient", ours.grad.cpu(), exact.grad.float(), rtol=1e-5, atol=1e-6)
    total = sum(
        oracle.divergence(row.tolist(), part.tolist())
        for row, part in zip(scores.nan_to_num(neginf=-1e30), mass, strict=True)
        if len(row)
    )
    assert got.item() == pytest.approx(total, rel=1e-5, abs=1e-6)


def test_refusals_say_why():
    refuse = indexer_triton.index_scores.refuse
    q, weights, keys = torch.randn(1, 1, 2, 8), torch.randn(1, 1, 2), torch.randn(1, 3, 8)
    assert refuse(q, weights, keys) is None
    assert "deterministic" in refuse(q, weights, keys, deterministic=True)
    assert "float64" in refuse(q.double(), weights, keys.double())
    assert "300" in refuse(torch.randn(1, 1, 300, 8), weights, keys)
    too_many = indexer_triton.select_top_k.refuse(torch.empty(0, 1 << 20), None, 10_000)
    assert "10000" in too_many
    q, table = torch.empty(1, 1, 2, 68, dtype=torch.uint8), torch.tensor([[0]])
    rows, blocks = torch.empty(8, 68, dtype=torch.uint8), torch.tensor([[[0]]])
    own = q, weights, rows, table, torch.tensor([[8]]), 8, 8, blocks, 8  # each query's candidates
    assert packed_index_triton.packed_index_scores.refuse(*own) is None
    assert "60 and 68 bytes" in packed_index_triton.packed_index_scores.refuse(
        *(torch.empty(1, 1, 1, 60), weights, torch.empty(3, 68)), None, None, 1, 1
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("T", "M", "k"), [(8, 131_072, 512), (3, 16_385, 2048), (2, 1_000_003, 512)]
)
def test_choice_at_full_width(device, T, M, k):
    """Half of the scores are rounded, so that the last place is a tie; and twice the same."""
    scores = torch.randn(T, M, device=device)
    scores[T // 2 :] = (scores[T // 2 :] * 64).round()
    visible = torch.tensor([M - 7 * t for t in range(T)], device=device)
    seen = scores.masked_fill(torch.arange(M, device=device) >= visible[:, None], -INF)
    want = reference.ids_of(reference.keep_top_k(seen, k), k)
    for _ in range(2):
        assert torch.equal(indexer_triton.select_top_k.run(scores, None, k, visible), want)
    assert torch.equal(choose(scores, k, visible), want)
    assert top_k_cuda.refuse(scores, k, None) is None
    odd = scores[:, 1:], k, visible - 1  # rows start at any address
    assert torch.equal(top_k_cuda.choose(*odd), choose(*odd))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4, 6])
def test_packed_scores_at_full_width(device, tokens):
    """The instructions of the chip against the reference, and against plain Triton."""
    B, heads, per_page, num = 3, 32, 64, 5000
    q, keys = (x.to(device) for x in (packed(B, tokens, heads)[0], packed(300 * per_page)[0]))
    table = torch.stack([torch.randperm(300)[:80] for _ in range(B)]).to(device)
    visible = torch.randint(4000, num + 1, (B, tokens), device=device)
    weights = torch.randn(B, tokens, heads, device=device)
    got = packed_scores(q, weights, keys, table, visible, per_page, num)
    with ops.kernels("reference"):
        want = ops.packed_index_scores(
            *(x.cpu() for x in (q, weights, keys, table, visible)), per_page, num
        )
    assert torch.equal(got.cpu() == -INF, want == -INF)
    known = want > -INF
    assert_close("scores", got.cpu()[known], want[known], rtol=1e-4, atol=1e-3)
    plain = packed_scores(q, weights, keys, table, visible, per_page, num, asm=False)
    assert torch.equal(got, plain)
    assert packed_index_cuda.refuse(q, keys, per_page, None) is None
    for index in (table, table.int()):
        given = q, weights, keys, index, visible, per_page, num
        native = packed_index_cuda.scores(*given).cpu()
        assert torch.equal(native == -INF, want == -INF)
        assert_close("scores of CUDA C++", native[known], want[known], rtol=1e-4, atol=1e-3)
        assert torch.equal(packed_index_cuda.scores(*given, programs_per_sm=1).cpu(), native)


@pytest.mark.gpu
def test_packed_choice_at_full_width(device):
    """Scores of E4M3 numbers choose what float32 scores choose, but for what lies within 1e-4."""
    T, heads, num = 700, 32, 20_000
    q, keys = packed(T, heads)[0].to(device), packed(num)[0].to(device)
    table, weights = torch.arange(1, device=device), torch.randn(T, heads, device=device)
    visible = torch.randint(0, num + 1, (T,), device=device)
    given = (q, weights, keys, table, visible, num, num, 512, 2048, 8)
    assert index_prefill_cuda.refuse(q, keys, num, 512) is None
    with ops.kernels("required"):
        chosen, pool = ops.packed_index_choice(*given)
    scores = packed_scores(q[None], weights[None], keys, table[None], visible[None], num, num)[0]
    want = reference.select_top_k.reference(scores, None, 512, visible)
    last = scores.gather(1, want.clamp(min=0)).amin(1, keepdim=True)
    picked = scores.gather(1, chosen.clamp(min=0))
    assert torch.equal(chosen >= 0, want >= 0)
    scale = scores.masked_fill(scores == -INF, 0).abs().amax(1, keepdim=True)
    assert ((picked >= last - 1e-4 * scale) | (chosen < 0)).all()
    assert (chosen == want).float().mean() > 0.99
    blocks = reference.choose_candidates.reference(scores, visible, 2048, 8)
    assert (pool == blocks).float().mean() > 0.9


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense_scores_at_full_width(device, dtype):
    q, keys = torch.randn(2, 9, 32, 128), torch.randn(2, 3001, 128)
    weights, visible = torch.randn(2, 9, 32), torch.randint(0, 3002, (2, 9))
    parts = [x.to(device).to(dtype) for x in (q, weights, keys)]
    out = torch.full((2, 9, 3001), math.nan, device=device)
    got = dense_scores(*parts, visible=visible.to(device), out=out).cpu()
    q, weights, keys = (x.cpu().double() for x in parts)
    want = (torch.einsum("btij,bmj->btim", q, keys).relu() * weights[..., None]).sum(2)
    want = want.masked_fill(torch.arange(3001) >= visible[..., None], -INF)
    assert torch.equal(got == -INF, want == -INF)
    known = want > -INF
    assert_close("scores", got[known], want[known].float(), rtol=1e-4, atol=1e-3)


@pytest.mark.gpu
def test_kernels_run_in_a_graph(device):
    """Captured, then replayed on other numbers: no size depends on data."""
    B, heads, num = 2, 32, 40_000
    q, keys = (x.to(device) for x in (packed(B, 1, heads)[0], packed(B * num)[0]))
    table = torch.arange(B, device=device)[:, None]
    weights, visible = torch.randn(B, 1, heads, device=device), torch.full((B, 1), num).to(device)

    def step():
        scores = ops.packed_index_scores(q, weights, keys, table, visible, num, num)[:, 0]
        pool = ops.choose_candidates(scores, visible[:, 0], 2048, 8)
        return scores, ops.select_top_k(scores, None, 512, visible[:, 0]), pool

    with ops.kernels("required"):
        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        weights.copy_(torch.randn_like(weights))
        graph.replay()
        for a, b in zip(captured, step(), strict=True):
            assert torch.equal(a, b)


@pytest.mark.gpu
def test_gradients_at_full_width_repeat_their_bits(device):
    inputs, rows = selected_inputs(T=500, I=32, J=128, M=900, K=130, dtype=torch.bfloat16)
    parts = tuple(x.to(device) for x in (*inputs, rows))
    grad = torch.randn(rows.shape, device=device)
    first = backward(parts, grad, rounded=False)
    exact = [x.double().to(device).requires_grad_() for x in inputs]
    dots = torch.einsum("tij,tkj->tik", exact[0], exact[2][parts[3].clamp(min=0)])
    (dots.relu() * exact[1][..., None]).sum(1).backward(grad.double() * (parts[3] >= 0))
    for _ in range(3):
        for a, b in zip(first, backward(parts, grad, rounded=False), strict=True):
            assert torch.equal(a, b)
    for a, b in zip(first, exact, strict=True):
        error = (a.double() - b.grad).norm() / b.grad.norm()
        assert error < 1e-2, error


def test_oracle_agrees_with_numpy_sort():
    values = np.round(np.random.default_rng(0).normal(size=50) * 2)
    kept = oracle.select(values.tolist(), 9)
    order = np.lexsort((np.arange(50), -values))[:9]
    assert kept == sorted(order.tolist())
