"""Single-Pass mHC ops: coefficients, order of parameters, direction of the mix, gradients."""

import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from openv41 import ops
from openv41.ops import mhc
from tests.close import assert_close
from tests.oracles import mhc as oracle

EPS = {"steps": 20, "eps": 1e-6, "norm_eps": 1e-20}


def parameters(num, dim, dtype=torch.float32):
    size = num * (num + 2)
    fn = torch.randn(size, num * dim, dtype=dtype) / math.sqrt(num * dim)
    return fn, torch.randn(size, dtype=dtype), torch.rand(3, dtype=dtype) + 0.5


def reference(x, fn, base, scale, steps=20):
    """A, B, C of every token; B is the transpose of comb."""
    fn, base, scale = (p.double().numpy() for p in (fn, base, scale))
    found = [
        oracle.coefficients(
            oracle.project(streams, fn),
            base,
            scale,
            num_streams=len(streams),
            iterations=steps,
        )
        for streams in x.double().numpy()
    ]
    pre, post, comb = (torch.from_numpy(np.array(part)) for part in zip(*found, strict=True))
    return pre, comb.mT, post


@pytest.mark.golden
def test_golden_coefficients(golden_dir):
    stored = load_file(golden_dir / "ops" / "ops.safetensors")
    a, b, c = mhc.coefficients(
        stored["mhc.mixes"], stored["mhc.base"], stored["mhc.scale"], 4, steps=20, eps=1e-6
    )
    assert_close("pre", a, stored["mhc.pre"], ulps=4)
    assert_close("post", c, stored["mhc.post"], ulps=4)
    assert_close("comb", b.mT, stored["mhc.comb"], ulps=16)
    assert (b - stored["mhc.comb"]).abs().max() > 0.1, "a transposed comb must be visible"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("T", "N", "D"), [(1, 1, 1), (63, 2, 5), (127, 4, 3), (129, 3, 7)])
def test_predict_mix_matches_oracle(T, N, D, dtype):
    x = torch.randn(T, N, D).to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    params = parameters(N, D, wide)
    got = ops.predict_mix(x, *params, **EPS)
    tol = 200 * torch.finfo(wide).eps
    for name, ours, theirs in zip("abc", got, reference(x, *params), strict=True):
        assert ours.dtype == wide
        assert_close(name, ours, theirs, rtol=tol, atol=tol)


@pytest.mark.parametrize("steps", [1, 2])
def test_few_sinkhorn_steps_match_oracle(steps):
    x, params = torch.randn(5, 4, 3), parameters(4, 3)
    got = ops.predict_mix(x, *params, steps=steps, eps=1e-6, norm_eps=1e-20)
    assert_close("b", got[1], reference(x, *params, steps=steps)[1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("T", "N", "D"), [(1, 1, 1), (63, 2, 5), (127, 4, 3), (129, 3, 7)])
def test_mix_and_update_match_oracle(T, N, D, dtype):
    x, y = torch.randn(T, N, D).to(dtype), torch.randn(T, D).to(dtype)
    a, c, b = torch.rand(T, N), torch.rand(T, N), torch.rand(T, N, N)
    tol = 4 * N * torch.finfo(dtype).eps
    mixed, updated = [], []
    for t in range(T):
        streams = x[t].double().numpy()
        post, comb = c[t].double().numpy(), b[t].mT.double().numpy()
        mixed.append(oracle.mix_streams(streams, a[t].double().numpy()))
        updated.append(oracle.update_streams(streams, y[t].double().numpy(), post, comb))
    got = ops.mix_streams(x, a)
    assert got.dtype == dtype
    assert_close("mix", got, torch.from_numpy(np.array(mixed)), rtol=tol, atol=tol)
    got = ops.update_streams(x, y, b, c)
    assert got.dtype == dtype
    assert_close("update", got, torch.from_numpy(np.array(updated)), rtol=tol, atol=tol)


def test_only_the_named_part_of_base_moves():
    """Order of the parameters: A, C, then the mix."""
    x, (fn, base, scale) = torch.randn(2, 4, 3), parameters(4, 3)
    before = ops.predict_mix(x, fn, base, scale, **EPS)
    for part, columns in enumerate([slice(0, 4), slice(8, 24), slice(4, 8)]):
        moved = base.clone()
        moved[columns] += torch.rand(columns.stop - columns.start)
        after = ops.predict_mix(x, fn, moved, scale, **EPS)
        changed = [not torch.equal(p, q) for p, q in zip(before, after, strict=True)]
        assert changed == [i == part for i in range(3)], f"base {columns}"
    for part, index in enumerate([0, 2, 1]):
        moved = scale.clone()
        moved[index] += 0.3
        after = ops.predict_mix(x, fn, base, moved, **EPS)
        changed = [not torch.equal(p, q) for p, q in zip(before, after, strict=True)]
        assert changed == [i == part for i in range(3)], f"scale {index}"


def test_ends_on_columns_of_comb():
    x, params = torch.randn(6, 4, 5), parameters(4, 5)
    params[1][8:] *= 4
    _, b, _ = ops.predict_mix(x, *params, steps=3, eps=1e-6, norm_eps=1e-20)
    comb = b.mT
    assert (comb.sum(1) - 1).abs().max() < 3e-6
    assert (comb.sum(2) - 1).abs().max() > 1e-4


def test_one_entry_of_comb_moves_a_stream_on_paper():
    """comb[0][1] = 1 sends stream 0 to stream 1; B is its transpose."""
    x = torch.tensor([[[1.0, 2.0], [5.0, 7.0]]])
    comb = torch.tensor([[[0.0, 1.0], [0.0, 0.0]]])
    y, c = torch.tensor([[10.0, 20.0]]), torch.tensor([[0.5, 2.0]])
    want = torch.tensor([[[5.0, 10.0], [21.0, 42.0]]])
    assert torch.equal(ops.update_streams(x, y, comb.mT, c), want)
    assert torch.equal(want, torch.einsum("tjk,tjd->tkd", comb, x) + c[..., None] * y[:, None])


def test_mix_on_paper():
    x = torch.tensor([[[1.0, 2.0], [5.0, 7.0]], [[1.0, 0.0], [0.0, 1.0]]])
    a = torch.tensor([[2.0, 0.5], [1.0, 0.0]])
    assert torch.equal(ops.mix_streams(x, a), torch.tensor([[4.5, 7.5], [1.0, 0.0]]))


@pytest.mark.parametrize("pending", [True, False])
@pytest.mark.parametrize("deterministic", [True, False])
def test_mega_mhc_is_its_parts(pending, deterministic):
    """The same bits as the update, the mix, the norm and the coefficients one after the other."""
    x, y, a, c = torch.randn(7, 4, 6), torch.randn(7, 6), torch.rand(7, 4), torch.rand(7, 4)
    b, norm, (fn, base, scale) = torch.rand(7, 4, 4), torch.rand(6), parameters(4, 6)
    sure = {"deterministic": deterministic}
    given = (y, b, c) if pending else (None, None, None)
    weights = {"fn": fn, "base": base, "scale": scale, "norm": norm}
    got = ops.mega_mhc(x, *given, a, **weights, **EPS, **sure)
    new = ops.update_streams(x, y, b, c, **sure) if pending else x
    h = ops.rms_norm(ops.mix_streams(new, a), norm, EPS["norm_eps"])
    want = new, h, *ops.predict_mix(new, fn, base, scale, **EPS, **sure)
    for g, w in zip(got, want, strict=True):
        assert torch.equal(g, w)


def test_coefficients_on_paper():
    """Zero mixes: A = 1/2 + eps, C = 1; a mix of ln 3 on the diagonal gives 3/4 and 1/4."""
    base = torch.tensor([0.0] * 4 + [math.log(3), 0, 0, math.log(3)])
    a, b, c = mhc.coefficients(torch.zeros(2, 8), base, torch.ones(3), 2, steps=20, eps=1e-6)
    assert_close("a", a, torch.full((2, 2), 0.500001), rtol=1e-7)
    assert_close("c", c, torch.ones(2, 2), rtol=1e-7)
    want = torch.tensor([[0.75, 0.25], [0.25, 0.75]]).expand(2, 2, 2)
    assert_close("b", b, want, rtol=1e-5)


def test_scale_of_the_streams_does_not_matter_even_when_tiny():
    x, params = torch.randn(3, 4, 5), parameters(4, 5)
    big = ops.predict_mix(x, *params, **EPS)
    small = ops.predict_mix(x * 1e-6, *params, **EPS)
    for name, p, q in zip("abc", big, small, strict=True):
        assert_close(name, q, p, rtol=1e-4)


def test_a_token_does_not_depend_on_its_batch_when_deterministic():
    x, params = torch.randn(65, 4, 33), parameters(4, 33)
    whole = ops.predict_mix(x, *params, **EPS, deterministic=True)
    alone = ops.predict_mix(x[7:8], *params, **EPS, deterministic=True)
    for name, p, q in zip("abc", whole, alone, strict=True):
        assert torch.equal(p[7:8], q), name


def test_same_bits_with_and_without_a_gradient():
    x, y, params = torch.randn(7, 4, 5), torch.randn(7, 5), parameters(4, 5)
    found = []
    for wants_gradient in (False, True):
        x.requires_grad_(wants_gradient)
        a, b, c = ops.predict_mix(x, *params, **EPS)
        found.append([a, b, c, ops.mix_streams(x, a), ops.update_streams(x, y, b, c)])
    for plain, recorded in zip(*found, strict=True):
        assert (plain.requires_grad, recorded.requires_grad) == (False, True)
        assert torch.equal(plain, recorded)


def test_empty():
    a, b, c = ops.predict_mix(torch.zeros(0, 4, 3), *parameters(4, 3), **EPS)
    assert (a.shape, b.shape, c.shape) == ((0, 4), (0, 4, 4), (0, 4))


@pytest.mark.parametrize("spread", [1.0, 30.0], ids=["usual", "saturated rows"])
def test_gradcheck_through_sinkhorn(spread):
    fn, base, scale = parameters(4, 1, torch.float64)
    base[8:] *= spread
    x = torch.randn(1, 4, 1, dtype=torch.float64)
    inputs = [p.requires_grad_() for p in (x, base, scale)]
    assert torch.autograd.gradcheck(lambda x, *p: ops.predict_mix(x, fn, *p, **EPS), inputs)


def test_gradcheck_of_the_projection():
    fn, base, scale = parameters(2, 2, torch.float64)
    inputs = [p.requires_grad_() for p in (torch.randn(2, 2, 2, dtype=torch.float64), fn)]
    assert torch.autograd.gradcheck(lambda x, f: ops.predict_mix(x, f, base, scale, **EPS), inputs)


def test_gradcheck_of_mix_and_update():
    x = torch.randn(2, 3, 2, dtype=torch.float64, requires_grad=True)
    y = torch.randn(2, 2, dtype=torch.float64, requires_grad=True)
    b = torch.rand(2, 3, 3, dtype=torch.float64, requires_grad=True)
    c = torch.rand(2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(ops.mix_streams, (x, c))
    assert torch.autograd.gradcheck(ops.update_streams, (x, y, b, c))
