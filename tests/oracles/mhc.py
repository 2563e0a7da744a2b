"""Single-Pass mHC for one token: coefficients, collapse, update."""

import math

import numpy as np


def sigmoid(x):
    """Logistic function that does not overflow."""
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def project(streams, fn):
    """m = fn z / rms(z), z the streams one after the other; [N (N + 2)]."""
    z = streams.reshape(-1)
    return (fn @ z) / math.sqrt(np.mean(z * z) + 1e-20)


def coefficients(m, base, scale, *, num_streams, iterations=20, eps=1e-6):
    """Split m into pre (A), post (C) and comb; comb is softmax then Sinkhorn, ends on columns."""
    n = num_streams
    pre = np.array([sigmoid(m[i] * scale[0] + base[i]) + eps for i in range(n)])
    post = np.array([2 * sigmoid(m[n + i] * scale[1] + base[n + i]) for i in range(n)])
    comb = np.zeros((n, n))
    for i in range(n):
        at = 2 * n + n * i
        logits = [m[at + j] * scale[2] + base[at + j] for j in range(n)]
        largest = max(logits)
        total = sum(math.exp(value - largest) for value in logits)
        for j in range(n):
            comb[i, j] = math.exp(logits[j] - largest) / total + eps
    _divide_columns(comb, eps)
    for _ in range(iterations - 1):
        _divide_rows(comb, eps)
        _divide_columns(comb, eps)
    return pre, post, comb


def _divide_columns(comb, eps):
    for j in range(comb.shape[1]):
        comb[:, j] /= sum(comb[i, j] for i in range(comb.shape[0])) + eps


def _divide_rows(comb, eps):
    for i in range(comb.shape[0]):
        comb[i, :] /= sum(comb[i, j] for j in range(comb.shape[1])) + eps


def mix_streams(streams, pre):
    """x = sum_i A[i] X[i]."""
    return sum(pre[i] * streams[i] for i in range(len(pre)))


def update_streams(streams, y, post, comb):
    """X'[j] = C[j] y + sum_i comb[i][j] X[i]: the sum runs over comb's FIRST index."""
    out = np.zeros_like(streams)
    for j in range(len(post)):
        out[j] = post[j] * y
        for i in range(len(post)):
            out[j] += comb[i, j] * streams[i]
    return out
