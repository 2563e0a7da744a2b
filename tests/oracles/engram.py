"""Engram: hash constants, n-gram rows, gate."""

import math

import numpy as np

from tests.oracles.mhc import sigmoid


def is_prime(n):
    """Trial division."""
    return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))


def primes(num_layers, max_ngram, num_heads, vocab_size):
    """[layer][order][head]: the next unused prime, every order starting at vocab_size - 1."""
    used, out = set(), []
    for _ in range(num_layers):
        layer = []
        for _ in range(2, max_ngram + 1):
            current, order = vocab_size - 1, []
            for _ in range(num_heads):
                current += 1
                while not is_prime(current) or current in used:
                    current += 1
                used.add(current)
                order.append(current)
            layer.append(order)
        out.append(layer)
    return out


def multipliers(layer_id, max_ngram, compressed_vocab_size):
    """Odd numbers that keep every product below 2^63."""
    bound = (2**63 - 1) // compressed_vocab_size // 2
    drawn = np.random.default_rng(10007 * layer_id).integers(0, bound, max_ngram, dtype=np.int64)
    return [int(value) * 2 + 1 for value in drawn]


def hash_rows(cids, position, factors, layer_primes, pad):
    """Row ids of one token, order-major. ``cids``: compressed ids, -1 = dead."""
    terms, blocked = [], False
    for shift in range(len(factors)):
        blocked = blocked or position - shift < 0 or cids[position - shift] == -1
        terms.append((pad if blocked else int(cids[position - shift])) * factors[shift])
    rows, offset, mixed = [], 0, terms[0]
    for order, moduli in enumerate(layer_primes):
        mixed ^= terms[order + 1]
        for prime in moduli:
            rows.append(mixed % prime + offset)
            offset += prime
    return rows


def gate(stream, key, q_weight, k_weight):
    """sigmoid of the signed square root of the normed dot; the sign bit decides at zero."""
    d = len(stream)
    dot = float(np.sum(stream * q_weight * k_weight * key))
    dot *= 1 / math.sqrt(np.mean(stream * stream) + 1e-20)
    dot *= 1 / math.sqrt(np.mean(key * key) + 1e-20)
    dot *= d**-0.5
    return sigmoid(math.copysign(math.sqrt(max(abs(dot), 1e-6)), dot))


def apply(streams, memory, wkv, q_weight, k_weight):
    """X_i += gate_i value; returns the streams and the gates. ``memory`` = the rows, joined."""
    n, d = streams.shape
    kv = wkv @ memory
    keys, value = kv[: n * d].reshape(n, d), kv[n * d :]
    gates = np.array([gate(streams[i], keys[i], q_weight[i], k_weight[i]) for i in range(n)])
    return streams + gates[:, None] * value, gates
