"""Attention over window and selected entries with a sink: values, masks, gradients."""

import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from openv41 import ops
from tests.close import assert_close
from tests.oracles import attention as oracle


def attend(q, window_kv, window_rows, main_kv, main_rows, *rest):
    """The op, with the keys planned from the rows."""
    keys = ops.plan_keys(window_rows), ops.plan_keys(main_rows)
    return ops.sparse_attention(q, window_kv, keys[0], main_kv, keys[1], *rest)


def planned(rows, **changes):
    """Keys whose plan claims something else than it found."""
    keys = ops.plan_keys(rows)
    keys.__dict__["plan"] = keys.plan._replace(**changes)
    return keys


def case(T, H=2, C=4, S=9, M=7, W=3, K=4, dtype=torch.float64):  # noqa: PLR0917
    q = torch.randn(T, H, C).to(dtype)
    window_kv, main_kv = torch.randn(S, C).to(dtype), torch.randn(M, C).to(dtype)
    window_rows, main_rows = torch.randint(-1, S, (T, W)), torch.randint(-1, M, (T, K))
    return [q, window_kv, window_rows, main_kv, main_rows, torch.randn(H).to(dtype), 0.6]


def reference(q, window_kv, window_rows, main_kv, main_rows, sink, scale):  # noqa: PLR0917
    out = []
    for t in range(len(q)):
        keys = [window_kv[r] for r in window_rows[t] if r >= 0]
        keys += [main_kv[r] for r in main_rows[t] if r >= 0]
        keys = torch.stack(keys) if keys else q.new_zeros(0, q.shape[2])
        parts = (part.double().numpy() for part in (q[t], keys, sink))
        out.append(oracle.attend(*parts, scale))
    return torch.from_numpy(np.array(out).reshape(q.shape))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("T", [1, 63, 127, 129])
def test_matches_oracle(T, dtype):
    inputs = case(T, dtype=dtype)
    got = attend(*inputs)
    assert got.dtype == dtype
    assert_close("attention", got, reference(*inputs), ulps=16)


@pytest.mark.golden
def test_golden(golden_dir):
    stored = load_file(golden_dir / "ops" / "ops.safetensors")
    q, kv, rows = stored["attn.q"][0], stored["attn.kv"][0], stored["attn.indices"][0].long()
    got = attend(q, kv, rows, kv[:0], rows[:, :0], stored["attn.sink"], 64**-0.5)
    assert_close("attention", got, stored["attn.out"][0], ulps=2)
    split = attend(q, kv, rows[:, :30], kv, rows[:, 30:], stored["attn.sink"], 64**-0.5)
    assert_close("window and selection", split, stored["attn.out"][0], ulps=2)


def test_on_paper():
    """One key that scores ln 3 against a sink of 0 keeps 3/4; seen twice it keeps 6/7."""
    q, kv = torch.tensor([[[math.log(3), 0.0]]]), torch.tensor([[1.0, 8.0]])
    once, none, sink = torch.tensor([[0]]), torch.tensor([[-1]]), torch.zeros(1)
    got = attend(q, kv, once, kv, none, sink, 1.0)
    assert_close("once", got, torch.tensor([[[0.75, 6.0]]]), rtol=1e-6)
    got = attend(q, kv, once, kv, once, sink, 1.0)
    assert_close("twice", got, torch.tensor([[[6 / 7, 48 / 7]]]), rtol=1e-6)


def test_infinite_sink_takes_all_and_none():
    inputs = case(5)
    inputs[2][:, 0] = 1
    inputs[5] = torch.full((2,), math.inf, dtype=torch.float64)
    assert not attend(*inputs).any()
    inputs[5] = -inputs[5]
    q, window_kv, window_rows, main_kv, main_rows, _, scale = inputs
    for t, row in enumerate(attend(*inputs)):
        keys = [window_kv[r] for r in window_rows[t] if r >= 0]
        keys = torch.stack(keys + [main_kv[r] for r in main_rows[t] if r >= 0])
        want = (q[t] @ keys.T * scale).softmax(-1) @ keys
        assert_close("softmax", row, want, rtol=1e-10, atol=1e-12)


def test_sinks_belong_to_heads():
    inputs = case(4, H=3)
    order = torch.tensor([2, 0, 1])
    moved = list(inputs)
    moved[0], moved[5] = inputs[0][:, order], inputs[5][order]
    want = attend(*inputs)[:, order]
    assert_close("permuted heads", attend(*moved), want, rtol=1e-12, atol=1e-14)
    moved[5] = inputs[5]
    assert (attend(*moved) - want).abs().max() > 1e-3


def test_absent_rows_never_hide_row_zero():
    """[0, -1, -1] in any order sees row 0 once."""
    inputs = case(1, W=1, K=3)
    inputs[4] = torch.tensor([[0, -1, -1]])
    want = reference(*inputs)
    for shift in range(3):
        inputs[4] = torch.tensor([[0, -1, -1]]).roll(shift, 1)
        assert_close("order", attend(*inputs), want, rtol=1e-10, atol=1e-12)


def test_rows_that_nobody_names_may_be_nan():
    inputs = case(6)
    inputs[2][inputs[2] == 0] = -1
    inputs[4][inputs[4] == 0] = -1
    want = attend(*inputs)
    inputs[1][0] = inputs[3][0] = math.nan
    leaves = [inputs[i].requires_grad_() for i in (0, 1, 3, 5)]
    got = attend(*inputs)
    assert torch.equal(got, want)
    got.sum().backward()
    for leaf in leaves:
        assert leaf.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("T", [1, 3])
def test_where_nothing_is_hidden_bias_does_no_work(T, dtype):
    """Few queries that see all their keys skip the bias, with the same bits."""
    q, window_kv, window_rows, main_kv, main_rows, sink, scale = case(T, H=3, K=5, dtype=dtype)
    whole = [ops.plan_keys(rows.clamp(min=0)) for rows in (window_rows, main_rows)]
    masked = [planned(keys.listed, is_whole=False) for keys in whole]
    assert [keys.plan.is_whole for keys in whole + masked] == [True, True, False, False]
    got, want = (
        ops.sparse_attention(q, window_kv, near, main_kv, far, sink, scale)
        for near, far in (whole, masked)
    )
    assert torch.equal(got, want)
    q.requires_grad_()
    assert torch.equal(
        attend(q, window_kv, whole[0].listed, main_kv, whole[1].listed, sink, scale), got
    )


def test_one_absent_row_makes_a_plan_not_whole():
    assert not ops.plan_keys(torch.tensor([[0, 1], [2, -1]])).plan.is_whole
    assert not ops.plan_keys(torch.tensor([[0, 1]]), deterministic=True).plan.is_whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("near", "far"), [(9, 7), (4, 6), (9, 0), (0, 0)])
@pytest.mark.parametrize("sink", [0.5, -math.inf])
def test_one_query_that_reads_rows_in_order_gathers_nothing(near, far, dtype, sink):
    """The short way gives the bits of the general one, also where a store has more rows."""
    q, window_kv, _, main_kv, *_ = case(1, H=3, C=16, dtype=dtype)
    sinks = torch.tensor([0.2, sink, sink]).to(dtype)
    in_order = [ops.plan_keys(torch.arange(num)[None]) for num in (near, far)]
    general = [planned(keys.listed, is_in_order=False) for keys in in_order]
    assert all(keys.plan.is_in_order and keys.plan.is_whole for keys in in_order)
    got, want = (
        ops.sparse_attention(q, window_kv, a, main_kv, b, sinks, 0.25)
        for a, b in (in_order, general)
    )
    assert torch.equal(got, want)


def test_other_orders_gather():
    for rows in ([[1, 0]], [[0, 2]], [[0, -1]], [[0, 0]], [[0], [0]]):
        assert not ops.plan_keys(torch.tensor(rows)).plan.is_in_order
    assert not ops.plan_keys(torch.tensor([[0, 1]]), deterministic=True).plan.is_in_order


@pytest.mark.parametrize("sink", [0.5, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_query_without_keys_gives_zero_and_finite_gradients(dtype, sink):
    inputs = case(3, dtype=dtype)
    inputs[2][1], inputs[4][1] = -1, -1
    inputs[2][0, 0] = inputs[2][2, 0] = 0
    inputs[5] = torch.full((2,), sink)
    leaves = [inputs[i].requires_grad_() for i in (0, 1, 3, 5)]
    out = attend(*inputs)
    assert not out[1].any()
    assert out.isfinite().all()
    out.sum().backward()
    for leaf in leaves:
        assert leaf.grad.isfinite().all()
    assert not leaves[0].grad[1].any()


def test_large_scores_stay_finite():
    inputs = case(4, dtype=torch.float32)
    inputs[0] *= 1e4
    inputs[0].requires_grad_()
    out = attend(*inputs)
    out.sum().backward()
    assert_close(
        "large", out, reference(*(p.detach() if torch.is_tensor(p) else p for p in inputs)), ulps=64
    )
    assert inputs[0].grad.isfinite().all()


@pytest.mark.parametrize("T", [0, 1])
def test_empty(T):
    inputs = case(T, W=2, K=0, M=0)
    inputs[4] = torch.zeros(T, 0, dtype=torch.int64)
    assert_close("no main KV", attend(*inputs), reference(*inputs), rtol=1e-10, atol=1e-12)


def test_more_queries_than_one_tile():
    inputs = case(1030)
    inputs[0].requires_grad_()
    out = attend(*inputs)
    (whole,) = torch.autograd.grad(out.sum(), inputs[0])
    last = [inputs[0][1029:], inputs[1], inputs[2][1029:], inputs[3], inputs[4][1029:], *inputs[5:]]
    assert_close(
        "last row",
        out[1029:],
        reference(*(p.detach() if torch.is_tensor(p) else p for p in last)),
        rtol=1e-10,
        atol=1e-12,
    )
    (alone,) = torch.autograd.grad(attend(*last).sum(), inputs[0])
    assert_close("gradient", alone[1029:], whole[1029:], rtol=1e-10, atol=1e-12)


def test_gradcheck():
    q, window_kv, window_rows, main_kv, main_rows, sink, scale = case(3, C=3, S=4, M=3, W=2, K=3)
    window_rows[2], main_rows[2] = -1, -1

    def run(q, window_kv, main_kv, sink):
        return attend(q, window_kv, window_rows, main_kv, main_rows, sink, scale)

    inputs = [t.requires_grad_() for t in (q, window_kv, main_kv, sink)]
    assert torch.autograd.gradcheck(run, inputs)
    one_store = [t.detach().clone().requires_grad_() for t in (q, window_kv, sink)]
    shared = main_rows.clamp(max=3)
    assert torch.autograd.gradcheck(
        lambda q, kv, s: attend(q, kv, window_rows, kv, shared, s, scale), one_store
    )
