"""Engram ops: n-gram hashes and the gate."""

import math

import numpy as np
import pytest
import torch

from openv41 import ops
from tests.close import assert_close
from tests.oracles import engram as oracle


def tables(num_heads=2, max_ngram=4, vocab=40, layer=0):
    primes = oracle.primes(2, max_ngram, num_heads, vocab)[layer]
    flat = np.array(primes).reshape(-1)
    offsets = (np.cumsum(flat) - flat).reshape(np.array(primes).shape)
    return primes, torch.tensor(primes), torch.from_numpy(offsets)


def recent(cids, reach):
    """Compressed ids of positions p, p - 1, ...; dead before the start."""
    padded = [ops.DEAD] * (reach - 1) + list(cids)
    rows = [padded[p : p + reach][::-1] for p in range(len(cids))]
    return torch.tensor(rows, dtype=torch.int64).view(-1, reach)


def hashed(cids, factors, primes, pad):
    _, table, offsets = primes
    return ops.hash_ngrams(recent(cids, len(factors)), torch.tensor(factors), table, offsets, pad)


@pytest.mark.parametrize("length", [0, 1, 2, 63, 129])
def test_hash_matches_oracle(length):
    cids = torch.randint(-1, 50, (length,)).tolist()
    primes, factors = tables(layer=1), oracle.multipliers(3, 4, 50)
    got = hashed(cids, factors, primes, 2)
    want = [oracle.hash_rows(cids, p, factors, primes[0], 2) for p in range(length)]
    assert got.tolist() == want


def test_released_multipliers_do_not_overflow():
    """Big-integer arithmetic, the largest legal id, rows inside their own prime's range."""
    factors = oracle.multipliers(1, 4, 99092)
    assert factors == [76632096046245, 4839876093313, 35959672319349, 73987337458391]
    cids = [99091, 99091, 99091, 99091, 0, 99090, 1, 2, 99091]
    primes = tables(vocab=16_000_000, num_heads=8)
    assert primes[0][0][:2] == [16000057, 16000079]
    got = hashed(cids, factors, primes, 2)
    assert got.tolist() == [
        oracle.hash_rows(cids, p, factors, primes[0], 2) for p in range(len(cids))
    ]
    low, size = primes[2].flatten(), primes[1].flatten()
    assert ((got >= low) & (got < low + size)).all()


def test_a_dead_token_blocks_everything_older():
    """A, IMG, B, C: at C the 2-gram is (B, C), the longer ones see padding behind B."""
    primes, factors, pad = tables(), oracle.multipliers(1, 4, 50), 2
    a, b, c = 10, 20, 30
    at_c = hashed([a, ops.DEAD, b, c], factors, primes, pad)[3]
    fresh = hashed([b, c], factors, primes, pad)[1]
    assert torch.equal(at_c, fresh)
    other = hashed([11, ops.DEAD, b, c], factors, primes, pad)[3]
    assert torch.equal(at_c, other)
    explicit = hashed([pad, pad, b, c], factors, primes, pad)[3]
    assert torch.equal(at_c, explicit)
    unblocked = hashed([a, 7, b, c], factors, primes, pad)[3]
    assert torch.equal(at_c[:2], unblocked[:2])
    assert not torch.equal(at_c[2:], unblocked[2:])


def test_a_dead_token_itself_hashes_as_padding():
    primes, factors = tables(), oracle.multipliers(1, 4, 50)
    assert torch.equal(
        hashed([5, ops.DEAD], factors, primes, 2)[1], hashed([2], factors, primes, 2)[0]
    )


def test_hash_on_paper():
    """ids 3 then 5, factors 7 and 11: 5 * 7 = 35, 3 * 11 = 33, 35 ^ 33 = 2."""
    got = ops.hash_ngrams(
        torch.tensor([[5, 3]]),
        torch.tensor([7, 11]),
        torch.tensor([[13, 17]]),
        torch.tensor([[0, 13]]),
        2,
    )
    assert got.tolist() == [[2, 15]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("T", "N", "D"), [(1, 1, 1), (63, 2, 5), (129, 4, 3)])
def test_gate_matches_oracle(T, N, D, dtype):
    x, key = torch.randn(T, N, D).to(dtype), torch.randn(T, N, D).to(dtype)
    q, k = (torch.rand(N, D) + 0.5).to(dtype), (torch.rand(N, D) + 0.5).to(dtype)
    got = ops.engram_gate(x, key, q, k, 1e-20)
    assert got.dtype == torch.promote_types(dtype, torch.float32)
    want = torch.zeros(T, N, dtype=torch.float64)
    for t in range(T):
        for i in range(N):
            parts = (x[t, i], key[t, i], q[i], k[i])
            want[t, i] = oracle.gate(*(p.double().numpy() for p in parts))
    assert_close("gate", got, want, rtol=0, atol=1e-12 if dtype == torch.float64 else 3e-4)


def test_gate_on_paper():
    """Equal vectors of ones: dot = D / sqrt(D) = 2 at D = 4; opposite ones: -2."""
    x = torch.ones(1, 2, 4)
    key = torch.stack([torch.ones(4), -torch.ones(4)])[None]
    got = ops.engram_gate(x, key, torch.ones(2, 4), torch.ones(2, 4), 1e-20)
    want = 1 / (1 + math.exp(-math.sqrt(2)))
    assert_close("gate", got, torch.tensor([[want, 1 - want]]), rtol=1e-6)


def test_the_sign_bit_decides_at_zero():
    """+0 from orthogonal rows; -0 from a negative dot that underflows in the last product."""
    x = torch.stack([torch.zeros(256), torch.tensor([1.0, -1.0] * 128), -torch.ones(256)])[None]
    q = torch.ones(3, 256)
    q[2] = 0
    q[2, 0] = 1.4e-45  # the smallest number of float32
    got = ops.engram_gate(x, torch.ones(1, 3, 256), q, torch.ones(3, 256), 1e-20)[0]
    above, below = 1 / (1 + math.exp(-1e-3)), 1 / (1 + math.exp(1e-3))
    assert_close("gate", got, torch.tensor([above, above, below]), rtol=0, atol=1e-7)


def test_every_stream_gets_the_same_value_through_its_own_gate():
    x, gate, value = torch.zeros(1, 2, 2), torch.tensor([[0.5, 2.0]]), torch.tensor([[4.0, 6.0]])
    assert ops.add_gated(x, gate, value).tolist() == [[[2.0, 3.0], [8.0, 12.0]]]


def test_a_zero_gate_passes_the_stream_untouched():
    x = torch.randn(3, 4, 5).bfloat16()
    assert torch.equal(ops.add_gated(x, torch.zeros(3, 4), torch.randn(3, 5).bfloat16()), x)


def test_empty():
    zeros = torch.zeros(0, 4, 3)
    gate = ops.engram_gate(zeros, zeros, torch.ones(4, 3), torch.ones(4, 3), 1e-20)
    assert gate.shape == (0, 4)
    assert ops.add_gated(zeros, gate, torch.zeros(0, 3)).shape == (0, 4, 3)


def test_gradcheck():
    x, key = (torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    q, k = (torch.rand(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    value = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)

    def run(x, key, q, k, value):
        return ops.add_gated(x, ops.engram_gate(x, key, q, k, 1e-20), value)

    assert torch.autograd.gradcheck(run, (x, key, q, k, value))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zero_rows_keep_gradients_finite(dtype):
    x = torch.zeros(1, 2, 4, dtype=dtype, requires_grad=True)
    key = torch.zeros(1, 2, 4, dtype=dtype, requires_grad=True)
    ones = torch.ones(2, 4, dtype=dtype)
    ops.engram_gate(x, key, ones, ones, 1e-20).sum().backward()
    assert x.grad.isfinite().all()
    assert key.grad.isfinite().all()
