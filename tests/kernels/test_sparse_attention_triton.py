"""The attention kernels against loops in float64 and the reference: values and gradients."""

import importlib
import math

import numpy as np
import pytest
import torch

from openv41 import ops
from tests.close import assert_close
from tests.oracles import attention as oracle

# The interpreter multiplies the bits of bfloat16.
DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


@pytest.fixture
def kernels(device):
    """The kernel file, imported once the interpreter is on."""
    from openv41.ops import sparse_attention_triton  # noqa: PLC0415

    return sparse_attention_triton


def case(device, T=3, H=2, C=16, S=9, M=7, W=3, K=5, dtype=torch.float32):
    """q, window, its rows, main KV, its rows, sinks, scale; rows repeat and are absent."""
    q = torch.randn(T, H, C).to(dtype)
    window_kv, main_kv = torch.randn(S, C).to(dtype), torch.randn(M, C).to(dtype)
    window_rows, main_rows = torch.randint(-1, S, (T, W)), torch.randint(-1, max(M, 1), (T, K))
    parts = q, window_kv, window_rows, main_kv, main_rows, torch.randn(H)
    return [part.to(device) for part in parts] + [C**-0.5]


def planned(inputs):
    """The arguments of the op."""
    q, window_kv, window_rows, main_kv, main_rows, sink, scale = inputs
    return q, window_kv, ops.plan_keys(window_rows), main_kv, ops.plan_keys(main_rows), sink, scale


def wanted(q, window_kv, window_rows, main_kv, main_rows, sink, scale):
    """Attention as loops in float64."""
    out = np.zeros(tuple(q.shape))
    for t in range(len(q)):
        keys = [window_kv[r] for r in window_rows[t] if r >= 0]
        keys += [main_kv[r] for r in main_rows[t] if r >= 0]
        if keys:
            parts = (x.detach().cpu().double().numpy() for x in (q[t], torch.stack(keys), sink))
            out[t] = oracle.attend(*parts, scale)
    return torch.from_numpy(out)


def wanted_mass(q, window_kv, window_rows, main_kv, main_rows, sink, scale):
    out = torch.zeros(main_rows.shape, dtype=torch.float64)
    for t in range(len(q)):
        near = [window_kv[r].tolist() for r in window_rows[t] if r >= 0]
        far = [main_kv[r].tolist() for r in main_rows[t] if r >= 0]
        found = oracle.mass(q[t].tolist(), near, far, sink.tolist(), scale)
        out[t, main_rows[t].cpu() >= 0] = torch.tensor(found, dtype=torch.float64)
    return out


def gradients(run, inputs, dtype, wide=None):
    """Gradients of q, both stores and sinks for one fixed gradient of the output."""
    q, window_kv, window_rows, main_kv, main_rows, sink, scale = inputs
    leaves = [
        x.detach().to(wide or x.dtype).requires_grad_() for x in (q, window_kv, main_kv, sink)
    ]
    args = [leaves[0], leaves[1], window_rows, leaves[2], main_rows, leaves[3], scale]
    out = run(*planned(args))
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(dtype).to(out)
    return torch.autograd.grad(out, leaves, weight)


SIZES = [
    {"T": 2, "H": 17, "C": 40, "W": 17, "K": 33},
    {"T": 1, "H": 1, "C": 8, "W": 1, "K": 1},
    {"T": 2, "H": 5, "C": 32, "W": 4, "K": 0, "M": 0},
    {"T": 2, "H": 3, "C": 24, "W": 0, "K": 20, "S": 0},
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_matches_oracle(kernels, device, size, dtype):
    inputs = case(device, dtype=dtype, **size)
    got = kernels.sparse_attention.run(*planned(inputs))
    assert got.dtype == dtype
    assert_close("attention", got, wanted(*inputs), ulps=16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_mass_matches_oracle(kernels, device, size, dtype):
    inputs = case(device, dtype=dtype, **size)
    q, window_kv, window_keys, main_kv, _, sink, scale = planned(inputs)
    got = kernels.attention_mass.run(q, window_kv, window_keys, main_kv, inputs[4], sink, scale)
    assert_close("mass", got, wanted_mass(*inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_gradients_match_the_reference(kernels, device, size, dtype):
    inputs = case(device, dtype=dtype, **size)
    got = gradients(kernels.sparse_attention.run, inputs, dtype)
    # In bfloat16 both take the sink's gradient from the rounded output.
    wide = torch.float64 if dtype == torch.float32 else None
    want = gradients(ops.sparse_attention.reference, inputs, dtype, wide=wide)
    for name, a, b in zip(("q", "window", "main", "sink"), got, want, strict=True):
        error = (a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-6)
        assert error < (1e-5 if dtype == torch.float32 else 1e-2), f"{name}: {error}"


def test_gradients_of_several_pieces(kernels, device, monkeypatch):
    """Queries whose row gradients do not fit at one time."""
    inputs = case(device, T=5)
    want = gradients(kernels.sparse_attention.run, inputs, torch.float32)
    for name in ("sparse_attention", "sparse_attention_backward_triton"):
        module = importlib.import_module(f"openv41.ops.{name}")
        monkeypatch.setattr(module, "READERS_AT_ONCE", 2)
    got = gradients(kernels.sparse_attention.run, inputs, torch.float32)
    for a, b in zip(got, want, strict=True):
        assert_close("pieces", a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sink", [0.5, -math.inf, math.inf])
def test_query_without_keys_gives_zero_and_finite_gradients(kernels, device, sink):
    inputs = case(device)
    inputs[2][1], inputs[4][1] = -1, -1
    inputs[5][:] = sink
    out = kernels.sparse_attention.run(*planned(inputs))
    assert not out[1].any()
    assert out.isfinite().all()
    assert out[0].any() == (sink != math.inf)
    got = gradients(kernels.sparse_attention.run, inputs, torch.float32)
    assert all(grad.isfinite().all() for grad in got)
    assert not got[0][1].any()


def test_rows_that_nobody_names_may_be_nan(kernels, device):
    inputs = case(device, T=6)
    inputs[2][inputs[2] == 0] = -1
    inputs[4][inputs[4] == 0] = -1
    want = kernels.sparse_attention.run(*planned(inputs))
    inputs[1][0] = inputs[3][0] = math.nan
    assert torch.equal(kernels.sparse_attention.run(*planned(inputs)), want)
    assert all(
        g.isfinite().all() for g in gradients(kernels.sparse_attention.run, inputs, want.dtype)
    )


def test_large_scores_stay_finite(kernels, device):
    inputs = case(device)
    inputs[0] *= 1e4
    assert_close("large", kernels.sparse_attention.run(*planned(inputs)), wanted(*inputs), ulps=64)


def test_no_query(kernels, device):
    inputs = case(device, T=0)
    assert kernels.sparse_attention.run(*planned(inputs)).shape == inputs[0].shape
    assert [g.shape for g in gradients(kernels.sparse_attention.run, inputs, torch.float32)] == [
        inputs[i].shape for i in (0, 1, 3, 5)
    ]


def test_strided_inputs(kernels, device):
    inputs = case(device)
    want = kernels.sparse_attention.run(*planned(inputs))
    for i in (0, 1, 2, 3, 4):
        inputs[i] = inputs[i].mT.contiguous().mT
    assert torch.equal(kernels.sparse_attention.run(*planned(inputs)), want)


def test_a_query_depends_on_its_own_rows_alone(kernels, device):
    """Absent rows at the end, and other queries, change no bit."""
    inputs = case(device, T=4, K=20)
    want = kernels.sparse_attention.run(*planned(inputs))[2:]
    inputs[0], inputs[2], inputs[4] = (inputs[i][2:] for i in (0, 2, 4))
    inputs[4] = torch.nn.functional.pad(inputs[4], (0, 90), value=-1)
    assert torch.equal(kernels.sparse_attention.run(*planned(inputs)), want)


def test_refuses_what_it_cannot_take(kernels, device):
    inputs = case(device)
    inputs[0] = inputs[0].double()
    assert "float64" in kernels.sparse_attention.refuse(*planned(inputs))
    wide = case(device, C=1024)
    assert "1024 channels" in kernels.sparse_attention.refuse(*planned(wide))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(128, 64), (63, 16), (1, 64), (3, 40)])
def test_released_widths(kernels, device, shape):
    """Heads of 512 over 128 + 512 rows: the reference in float64, and twice the same bits."""
    T, H = shape
    sizes = {"T": T, "H": H, "C": 512, "S": 300, "M": 700, "W": 128, "K": 512}
    inputs = case(device, dtype=torch.bfloat16, **sizes)
    with ops.kernels("required"):
        got = ops.sparse_attention(*planned(inputs))
        q, window_kv, window_keys, main_kv, _, sink, scale = planned(inputs)
        mass = ops.attention_mass(q, window_kv, window_keys, main_kv, inputs[4], sink, scale)
    exact = [x.double() if torch.is_tensor(x) and x.is_floating_point() else x for x in inputs]
    assert_close("attention", got, ops.sparse_attention.reference(*planned(exact)), ulps=2)
    q, window_kv, window_keys, main_kv, _, sink, scale = planned(exact)
    known = ops.attention_mass.reference(q, window_kv, window_keys, main_kv, inputs[4], sink, scale)
    assert_close("mass", mass, known, rtol=1e-3, atol=1e-4)
    first = gradients(kernels.sparse_attention.run, inputs, torch.bfloat16)
    again = gradients(kernels.sparse_attention.run, inputs, torch.bfloat16)
    want = gradients(ops.sparse_attention.reference, exact, torch.bfloat16)
    for name, a, b, c in zip(("q", "window", "main", "sink"), first, again, want, strict=True):
        assert torch.equal(a, b), name
        error = (a.double() - c).norm() / c.norm()
        assert error < 1e-2, f"{name}: {error}"
