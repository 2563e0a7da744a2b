"""Kernels of Engram against float64 oracles: hash and lookup, the gated update, its gradients."""

import numpy as np
import pytest
import torch

from openv41 import ops
from openv41.ops import engram as reference
from openv41.ops.quantize import dequantize_fp8_rows, quantize_fp8_rows
from tests.close import assert_close
from tests.oracles import engram as oracle

pytest.importorskip("triton", reason="Triton is not installed")
from openv41.ops import engram_triton as kernels

EPS = 1e-20
PAD = 2


def hashing(T, heads=2, max_ngram=4, vocab=40):
    """Arguments of the hash, and what it has to give."""
    primes = oracle.primes(1, max_ngram, heads, vocab)[0]
    factors = oracle.multipliers(3, max_ngram, 50)
    flat = np.array(primes).reshape(-1)
    offsets = torch.from_numpy((np.cumsum(flat) - flat).reshape(np.array(primes).shape))
    cids = torch.randint(-1, 50, (T,)).tolist()
    padded = [ops.DEAD] * (max_ngram - 1) + cids
    recent = [padded[p : p + max_ngram][::-1] for p in range(T)]
    want = [oracle.hash_rows(cids, p, factors, primes, PAD) for p in range(T)]
    recent = torch.tensor(recent, dtype=torch.int64).view(-1, max_ngram)
    given = recent, torch.tensor(factors), torch.tensor(primes), offsets
    return (
        given,
        torch.tensor(want, dtype=torch.int64).view(T, heads * (max_ngram - 1)),
        int(flat.sum()),
    )


@pytest.mark.parametrize("T", [0, 1, 7])
def test_hash(device, T):
    given, want, _ = hashing(T)
    got = kernels.hash_ngrams.run(*(x.to(device) for x in given), PAD)
    assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lookup_gives_the_exact_values(device, dtype):
    """Scales from the least to the largest of a block, one of them NaN."""
    given, rows, num = hashing(5)
    table = torch.randn(num, 96) * torch.exp2(torch.randint(-9, 9, (num, 1)).float())
    codes, scales = quantize_fp8_rows(table)
    scales.view(torch.uint8)[rows[1, 0], 1] = 255
    scales.view(torch.uint8)[rows[2, 0], 0] = 0
    tables = [x.to(device) for x in (codes, scales)]
    got = kernels.lookup_ngrams.run(*(x.to(device) for x in given), PAD, *tables, dtype)
    want = dequantize_fp8_rows(codes, scales)[rows].flatten(1).to(dtype)
    assert got.dtype == dtype
    assert torch.equal(got.cpu().isnan(), want.isnan())
    assert torch.equal(got.cpu().nan_to_num(7), want.nan_to_num(7))
    with ops.kernels("reference"):
        plain = ops.lookup_ngrams(*given, PAD, codes, scales, dtype)
    assert torch.equal(plain.nan_to_num(7), want.nan_to_num(7))


def streams(T=5, N=3, D=40, dtype=torch.float32):
    """Streams, keys and values cut from one product, and weights."""
    x = torch.randn(T, N, D)
    joint = torch.randn(T, (N + 1) * D)
    if T > 1:
        x[1] = 0.0  # a dot of zero
    weights = 1 + 0.3 * torch.randn(2, N, D)
    keys, value = joint.to(dtype).split([N * D, D], dim=1)
    return x.to(dtype), keys.unflatten(1, (N, D)), value, *weights.to(dtype)


def update_oracle(x, key, value, q_weight, k_weight, is_image):
    x, key, value, q_weight, k_weight = (t.double() for t in (x, key, value, q_weight, k_weight))
    out = x.clone()
    for t in range(len(x)):
        for n in range(x.shape[1]):
            parts = (x[t, n], key[t, n], q_weight[n], k_weight[n])
            gate = 0.0 if is_image[t] else oracle.gate(*(p.numpy() for p in parts))
            out[t, n] += gate * value[t]
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("T", [0, 1, 6])
def test_update(device, dtype, T):
    given = streams(T, dtype=dtype)
    is_image = torch.arange(T) == 3
    want = update_oracle(*given, is_image)
    parts = [x.to(device) for x in given]
    got = kernels.engram_update.run(*parts, EPS, is_image.to(device))
    loose = {"rtol": 2**-7, "atol": 1e-6}  # a unit of bf16: the interpreter does not round
    if dtype == torch.float32:
        loose = {"rtol": 1e-5, "atol": 1e-6}
    assert_close("streams", got.cpu().double(), want, **loose)
    x, key, value, q_weight, k_weight = parts
    gate = kernels.engram_gate.run(x, key, q_weight, k_weight, EPS)
    plain = reference.engram_gate.reference(*given[:2], *given[3:], EPS)
    assert_close("gate", gate.cpu(), plain, rtol=1e-5, atol=1e-6)
    gate = gate.masked_fill(is_image.to(device)[:, None], 0)
    assert torch.equal(kernels.add_gated.run(x, gate, value), got)


@pytest.mark.parametrize("tokens_at_once", [1, 4])
def test_update_does_not_depend_on_how_tokens_are_grouped(device, tokens_at_once):
    given = (*(x.to(device) for x in streams(T=6)), None)
    whole, _ = kernels.forward(given, EPS, tokens_at_once=2)
    assert torch.equal(kernels.forward(given, EPS, tokens_at_once=tokens_at_once)[0], whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients(device, dtype):
    """Against float64 autograd through the reference; an image row, and a dot near zero."""
    given = streams(T=5, dtype=dtype)
    is_image, grad = torch.arange(5) == 3, torch.randn(5, 3, 40).to(dtype)
    exact = [x.double().detach().requires_grad_() for x in given]
    reference.engram_update.reference(*exact, EPS, is_image).backward(grad.double())
    ours = [x.detach().to(device).requires_grad_() for x in given]
    kernels.engram_update.run(*ours, EPS, is_image.to(device)).backward(grad.to(device))
    names = "x", "key", "value", "q_weight", "k_weight"
    for name, a, b in zip(names, ours, exact, strict=True):
        assert a.grad.dtype == dtype
        error = (a.grad.cpu().double() - b.grad)[a.grad.cpu().isfinite()].norm() / b.grad.norm()
        assert error < (1e-2 if dtype.itemsize == 2 else 1e-5), name


def test_refusals_say_why():
    x, key, value, q_weight, k_weight = streams()
    refuse = kernels.engram_update.refuse
    assert refuse(x, key, value, q_weight, k_weight, EPS) is None
    assert "deterministic" in refuse(x, key, value, q_weight, k_weight, EPS, deterministic=True)
    assert "float64" in refuse(x.double(), key.double(), value, q_weight, k_weight, EPS)
    given, _, num = hashing(2)
    table = torch.randn(num, 33), torch.randn(num, 2)
    assert "33 numbers" in kernels.lookup_ngrams.refuse(*given, PAD, *table, torch.bfloat16)


@pytest.mark.gpu
def test_at_full_width(device):
    """5120 channels, 24 lookups; gradients repeat their bits."""
    given, rows, num = hashing(300, heads=8, vocab=1000)
    codes, scales = quantize_fp8_rows(torch.randn(num, 256))
    tables = [x.to(device) for x in (codes, scales)]
    with ops.kernels("required"):
        got = ops.lookup_ngrams(*(x.to(device) for x in given), PAD, *tables, torch.bfloat16)
    want = dequantize_fp8_rows(codes, scales, torch.bfloat16)[rows].flatten(1)
    assert torch.equal(got.cpu(), want)
    parts = [x.to(device) for x in streams(T=1030, N=4, D=5120, dtype=torch.bfloat16)]
    exact = [x.double().detach().requires_grad_() for x in parts]
    grad = torch.randn(1030, 4, 5120, device=device).bfloat16()
    out = reference.engram_update.reference(*exact, EPS)
    out.backward(grad.double())
    got = kernels.forward((*parts, None), EPS)[0]
    assert (got.double() - out).norm() / out.norm() < 4e-3
    first = kernels.backward((*parts, None), grad, EPS)
    for a, again, b in zip(first, kernels.backward((*parts, None), grad, EPS), exact, strict=True):
        assert torch.equal(a, again)
        assert a.isfinite().all()
        assert (a.double() - b.grad).norm() / b.grad.norm() < 1e-2
