"""The deterministic mode: a row's bits depend on nothing but the row; and ties have one winner."""

import random

import pytest
import torch

from openv41 import ops
from openv41.config import NUMERICS
from openv41.ops import quantize
from tests.layers.mini import random_ids
from tests.model.mini import Session, alone, arm_model, assert_same

pytestmark = pytest.mark.unchecked

MOST = 66


def row_functions(dtype, width, streams):
    """Functions of rows by name, each with its inputs for MOST rows."""

    def rand(*shape):
        return torch.randn(*shape, dtype=dtype)

    heads, weight, keys = streams + 1, rand(width + 1, width), rand(1, width + 3, width)
    fn, base = rand(streams * (streams + 2), streams * width), rand(streams * (streams + 2))
    scale, norm = rand(3), rand(streams, width)
    turn = torch.view_as_real(
        torch.polar(torch.ones(MOST, width // 2), torch.randn(MOST, width // 2))
    )
    x, xs, xh = rand(MOST, width), rand(MOST, streams, width), rand(MOST, heads, width)
    rows = torch.stack([torch.randperm(keys.shape[1])[:3] for _ in range(MOST)])
    sure = {"deterministic": True}

    def predict(x):
        steps = {"steps": 20, "eps": 1e-6, "norm_eps": 1e-20}
        parts = ops.predict_mix(x, fn, base, scale, **steps, **sure)
        return torch.cat([part.flatten(1) for part in parts], dim=1)

    def attend(q, rows):
        planned = ops.plan_keys(rows, **sure)
        sink = base[:heads].float()
        return ops.sparse_attention(q, keys[0], planned, keys[0], planned, sink, 0.3, **sure)

    def rotate(x, turn):
        return ops.rotate(x, torch.view_as_complex(turn), **sure)

    return {
        "linear": (lambda x: ops.linear(x, weight, **sure), x),
        "quantised linear": (lambda x: ops.quantized_linear(x, weight, "exact", **sure), x),
        "router": (lambda x: ops.router_scores(x, weight, 1.5, **sure), x),
        "swiglu": (lambda a, b: ops.clamped_swiglu(a, b, 1.0, **sure), x, rand(MOST, width)),
        "predict mix": (predict, xs),
        "mix": (ops.mix_streams, xs, rand(MOST, streams)),
        "update": (
            lambda *parts: ops.update_streams(*parts, **sure),
            xs,
            x,
            rand(MOST, streams, streams),
            rand(MOST, streams),
        ),
        "norm": (lambda x: ops.rms_norm(x, norm[0], 1e-20), x),
        "rotate": (rotate, x, turn),
        "rotate heads": (rotate, xh, turn),
        "gate": (lambda x, k: ops.engram_gate(x, k, norm, norm, 1e-20, **sure), xs, 2 * xs),
        "pool": (lambda kv, g: ops.pool_group(kv, g, **sure), xs[:, :2], rand(MOST, 2, width)),
        "attention": (attend, xh, rows),
        "scores": (
            lambda q, w: ops.index_scores(q[None], w[None], keys, **sure)[0],
            xh,
            rand(MOST, heads),
        ),
        "fp8": (quantize.fake_fp8, x),
        "mxfp4": (quantize.fake_mxfp4, x),
        "fp4": (quantize.fake_fp4_e4m3, x),
    }


def rows_that_differ(function, *inputs, counts):
    """Rows whose result in some company is not that of the row alone."""
    lone = torch.cat([function(*(t[i : i + 1].clone() for t in inputs)) for i in range(MOST)])
    wrong = 0
    for count in counts:
        first = random.randrange(MOST - count + 1)
        rows = slice(first, first + count)
        got = function(*(t[rows].clone() for t in inputs))
        wrong += int((got != lone[rows]).flatten(1).any(1).sum())
    return wrong


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("width", "streams"), [(8, 3), (34, 4)])
def test_rows_are_equal_alone_and_in_company(dtype, width, streams):
    for name, (function, *inputs) in row_functions(dtype, width, streams).items():
        wrong = rows_that_differ(function, *inputs, counts=[2, 7, 16, 33, 65])
        assert wrong == 0, f"{name}: {wrong} rows"


def test_stock_products_do_differ():
    """What the mode is for; should this fail, the platform's products are row-wise already."""
    x, weight = torch.randn(MOST, 64), torch.randn(64, 64)
    assert rows_that_differ(lambda x: ops.linear(x, weight), x, counts=[2, 7, 33]) > 0


def test_scores_do_not_depend_on_later_entries():
    q, weights, keys = torch.randn(1, 5, 3, 8), torch.randn(1, 5, 3), torch.randn(1, 70, 8)
    whole = ops.index_scores(q, weights, keys, deterministic=True)
    for entries in (1, 3, 31, 32, 33, 64, 69):
        some = ops.index_scores(q, weights, keys[:, :entries], deterministic=True)
        assert torch.equal(some, whole[..., :entries]), entries


@pytest.mark.parametrize("score_dtype", [torch.float32, torch.bfloat16])
def test_fixed_scores_are_the_scores(score_dtype):
    q, weights, keys = torch.randn(2, 5, 3, 8), torch.randn(2, 5, 3), torch.randn(2, 9, 8)
    fixed = ops.index_scores(q, weights, keys, score_dtype, deterministic=True)
    torch.testing.assert_close(
        fixed, ops.index_scores(q, weights, keys, score_dtype), rtol=2e-2, atol=2e-2
    )


@pytest.fixture
def few_levels(monkeypatch):
    """Scores rounded to a few levels: ties at almost every boundary. Returns the ties seen."""
    exact, ties = ops.index_scores, []

    def rounded(*inputs, **options):
        scores = (exact(*inputs, **options) * 2).round().clamp(-3, 4)
        ties.append(scores.shape[-1] - scores[0, -1].unique().numel())
        return scores

    monkeypatch.setattr(ops, "index_scores", rounded)
    return ties


@pytest.mark.parametrize("bitwise", [False, True])
def test_tie_storm(few_levels, bitwise):
    """The lowest entry wins, whatever the chunks and the company."""
    model, ids = arm_model(torch.float64, bitwise), random_ids(19, seed=1)
    want = alone(model, ids)
    chunks = {0: [1] * 9, 1: [2] * 9, 2: [7, 3, 5], 3: []}
    session = Session(model).feed(dict.fromkeys(chunks, ids), chunks)
    assert max(few_levels) > 8
    for request in chunks:
        assert_same(session.everything(request), want, torch.float64, bitwise=bitwise)


@pytest.mark.prove
@pytest.mark.parametrize("threads", [1, 2])
def test_rows_of_many_shapes(record_proof, threads):
    """Every function at random widths and streams, rows in every company."""
    before, rows, functions = torch.get_num_threads(), 0, set()
    torch.set_num_threads(threads)
    try:
        for trial in range(16):
            dtype = (torch.float32, torch.float64)[trial % 2]
            width, streams = 2 * random.randrange(1, 80), random.randrange(2, 7)
            counts = random.sample(range(2, MOST + 1), 8)
            for name, (function, *inputs) in row_functions(dtype, width, streams).items():
                wrong = rows_that_differ(function, *inputs, counts=counts)
                assert wrong == 0, f"{name}, width {width}, {streams} streams: {wrong} rows"
                rows += sum(counts)
                functions.add(name)
    finally:
        torch.set_num_threads(before)
    record_proof(threads=threads, functions=len(functions), rows=rows, rows_that_differ=0)


@pytest.mark.prove
@pytest.mark.parametrize("threads", [1, 2])
def test_many_ways_to_serve(record_proof, threads):
    """Random requests in random chunks, joining and leaving, for random models and numerics."""
    before, requests, steps = torch.get_num_threads(), 0, 0
    torch.set_num_threads(threads)
    try:
        for trial in range(45):
            dtype = (torch.float32, torch.float64, torch.bfloat16)[trial % 3]
            model = arm_model(dtype, True, list(NUMERICS)[trial // 3 % 3], seed=trial)
            tokens = {r: random_ids(random.randrange(1, 30), seed=trial + 9 * r) for r in range(4)}
            chunks = {r: [random.randrange(1, 8) for _ in ids] for r, ids in tokens.items()}
            session = Session(model, poison=True).feed(tokens, chunks)
            for request, ids in tokens.items():
                assert_same(session.everything(request), alone(model, ids), dtype, bitwise=True)
            requests += len(tokens)
            steps += max(len(rows["logits"]) for rows in session.shown.values())
    finally:
        torch.set_num_threads(before)
    record_proof(threads=threads, requests=requests, steps=steps, values_that_differ=0)
