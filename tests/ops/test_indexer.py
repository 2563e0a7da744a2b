"""Index scores, top-k with one tie rule, candidate pool."""

import math

import numpy as np
import pytest
import torch

from openv41 import ops
from tests.close import assert_close
from tests.oracles import compressor
from tests.oracles import indexer as oracle


def chosen(ids):
    """Rows of ids as lists; checks order and that -1 stands last."""
    rows = []
    for row in ids.tolist():
        kept = [i for i in row if i >= 0]
        assert row == sorted(kept) + [-1] * (len(row) - len(kept)), (
            f"{row} is not ascending, -1 last"
        )
        rows.append(kept)
    return rows


def visible_mask(counts, num):
    return torch.arange(num) < torch.as_tensor(counts)[:, None]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 1), (2, 3, 63, 4, 5), (1, 2, 129, 3, 7)])
def test_scores_match_oracle(shape, dtype):
    B, T, M, I, J = shape  # noqa: E741
    q, keys = torch.randn(B, T, I, J).to(dtype), torch.randn(B, M, J).to(dtype)
    weights = torch.randn(B, T, I).to(dtype)
    got = ops.index_scores(q, weights, keys)
    assert got.dtype == torch.promote_types(dtype, torch.float32)
    want = torch.zeros(B, T, M, dtype=torch.float64)
    for b in range(B):
        for t in range(T):
            parts = (q[b, t], weights[b, t], keys[b])
            want[b, t] = torch.from_numpy(oracle.scores(*(p.double().numpy() for p in parts)))
    assert_close("scores", got, want, ulps=8, terms=J)


def test_relu_is_inside_the_sum_over_heads_on_paper():
    """Heads that give +3 and -5 with weights 1 score 3, not -2; weights may be negative."""
    q = torch.tensor([[[[3.0], [-5.0]]]])
    keys = torch.tensor([[[1.0], [-1.0]]])
    assert ops.index_scores(q, torch.ones(1, 1, 2), keys).tolist() == [[[3.0, 5.0]]]
    weights = torch.tensor([[[2.0, -0.5]]])
    assert ops.index_scores(q, weights, keys).tolist() == [[[6.0, -2.5]]]


def test_parity_switch_rounds_to_bfloat16():
    q, keys = torch.randn(1, 4, 8, 32).bfloat16(), torch.randn(1, 50, 32).bfloat16()
    weights = torch.randn(1, 4, 8).bfloat16()
    rough = ops.index_scores(q, weights, keys, torch.bfloat16)
    exact = ops.index_scores(q, weights, keys)
    assert rough.dtype == torch.bfloat16
    assert (rough.float() - exact).abs().max() > 1e-3
    assert_close("rounded", rough, exact, rtol=0, atol=0.05 * exact.abs().max().item())


@pytest.mark.parametrize("k", [0, 1, 5, 12])
def test_few_visible_entries_fill_with_minus_one(k):
    """Lengths 0 to k + 1 and never an index at or beyond the visible count."""
    for num in range(k + 2):
        scores = torch.randn(num + 1, num)
        counts = list(range(num + 1))
        ids = ops.select_top_k(scores, visible_mask(counts, num), k)
        assert ids.shape == (num + 1, min(k, num))
        for row, kept, count in zip(scores, chosen(ids), counts, strict=True):
            values = row.tolist()[:count] + [-math.inf] * (num - count)
            assert kept == oracle.select(values, k)
            assert len(kept) == min(k, count)


@pytest.mark.parametrize("num", [1, 63, 127, 129])
def test_tie_storm(num):
    """Scores on 8 levels: the lowest index wins, whatever the row is batched with."""
    scores = torch.randint(0, 8, (20, num)).float()
    counts = torch.randint(0, num + 1, (20,))
    allowed = visible_mask(counts, num)
    ids = ops.select_top_k(scores, allowed, 9)
    for t, kept in enumerate(chosen(ids)):
        values = [
            v if a else -math.inf for v, a in zip(scores[t].tolist(), allowed[t], strict=True)
        ]
        assert kept == oracle.select(values, 9)
        alone = ops.select_top_k(scores[t : t + 1], allowed[t : t + 1], 9)
        assert torch.equal(alone[0], ids[t])


def test_ties_on_paper():
    scores = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0]])
    allowed = torch.ones(1, 5, dtype=torch.bool)
    assert ops.select_top_k(scores, allowed, 3).tolist() == [[0, 1, 3]]
    assert ops.select_top_k(torch.zeros(1, 5), allowed, 2).tolist() == [[0, 1]]


def test_masked_columns_may_hold_anything():
    scores = torch.tensor([[1.0, math.inf, math.nan, 0.5]])
    allowed = torch.tensor([[True, False, False, True]])
    assert ops.select_top_k(scores, allowed, 1).tolist() == [[0]]
    assert ops.select_top_k(scores, allowed, 3).tolist() == [[0, 3, -1]]


def test_minus_infinity_is_never_chosen():
    scores = torch.tensor([[-math.inf, -3.0, -math.inf]])
    assert ops.select_top_k(scores, torch.ones(1, 3, dtype=torch.bool), 2).tolist() == [[1, -1]]


def test_no_queries():
    empty = torch.zeros(0, 5, dtype=torch.bool)
    assert ops.select_top_k(torch.zeros(0, 5), empty, 3).shape == (0, 3)
    none = torch.zeros(0, dtype=torch.int64)
    assert ops.choose_candidates(torch.zeros(0, 5), none, 2, 4).shape == (0, 2)


@pytest.mark.parametrize("levels", [3, 1000])
@pytest.mark.parametrize(
    ("M", "size", "blocks"), [(1, 4, 2), (63, 8, 3), (127, 4, 5), (129, 4, 40)]
)
def test_candidates_match_oracle(M, size, blocks, levels):
    scores = torch.randint(0, levels, (M + 1, M)).float()
    visible = torch.arange(M + 1)
    got = ops.pool_mask(ops.choose_candidates(scores, visible, blocks, size), M, size)
    for t in range(M + 1):
        want = oracle.candidate_mask(scores[t].numpy().copy(), t, size, blocks)
        np.testing.assert_array_equal(got[t, :t].numpy(), want[:t], f"visible {t}")


def test_newest_block_is_pinned_and_takes_a_place_on_paper():
    """Blocks of 2 score 9, 8, 7, 1; entry 6 is the newest visible one."""
    scores = torch.tensor([[9.0, 0, 8, 0, 7, 0, 1, 99]])
    pool = ops.choose_candidates(scores, torch.tensor([7]), 2, 2)
    assert pool.tolist() == [[0, 3]]
    marks = ops.pool_mask(pool, 7, 2)
    assert marks[0].tolist() == [True, True, False, False, False, False, True]


def test_nothing_visible_pins_nothing():
    pool = ops.choose_candidates(torch.ones(1, 6), torch.tensor([0]), 2, 2)
    assert pool.tolist() == [[-1, -1]]
    assert not ops.pool_mask(pool, 6, 2).any()


@pytest.mark.parametrize("size", [1, 2, 8])
def test_pools_and_their_masks_are_inverse(size):
    marks = torch.rand(9, 5) < 0.4
    mask = marks.repeat_interleave(size, 1)[:, : 5 * size - size // 2]
    pools = ops.mask_pool(mask, size)
    assert torch.equal(ops.pool_mask(pools, mask.shape[1], size), mask)
    for row, pool in zip(marks, pools, strict=True):
        blocks = row.nonzero().flatten().tolist()
        assert pool.tolist() == blocks + [-1] * (pools.shape[1] - len(blocks))


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize(("size", "group"), [(1, 1), (2, 1), (2, 2), (4, 3)])
def test_merged_pools_hold_each_querys_own_entries(queries, size, group):
    marks = torch.rand(4, queries, 7) < 0.3
    num = 7 * size - size // 2
    pools = ops.mask_pool(marks.flatten(0, 1), 1).unflatten(0, (4, queries))
    entries, own = ops.merge_pools(pools, num, size, group)
    for b in range(4):
        listed = entries[b][entries[b] >= 0].tolist()
        assert listed == sorted(set(listed))
        wide = size * group
        assert [e % wide for e in listed] == list(range(wide)) * (len(listed) // wide)
        for t in range(queries):
            mine = entries[b][own[b, t]].tolist()
            want = [e for e in range(7 * size) if marks[b, t, e // size]]
            assert [e for e in mine if e < num] == [e for e in want if e < num]


def test_visibility_formula():
    """Entry j is visible to query p iff (j + 1) * ratio <= p + 1."""
    for ratio in (1, 2):
        for p in range(9):
            seen = [j for j in range(9) if (j + 1) * ratio <= p + 1]
            assert compressor.num_visible(p, ratio) == len(seen) == (p + 1) // ratio
