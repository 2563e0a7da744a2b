"""Mixture of experts for one token: router, clamped SwiGLU, combination."""

import math

import numpy as np


def softplus(x):
    """log(1 + e^x) that neither overflows nor cancels."""
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def route(x, gate, bias, *, top_k, scale, normalize=True):
    """Ids by score + bias (lowest id on ties), weights from the raw scores."""
    raw = [math.sqrt(softplus(float(row @ x))) for row in gate]
    order = sorted(range(len(raw)), key=lambda e: (-(raw[e] + bias[e]), e))[:top_k]
    weights = [raw[e] for e in order]
    if normalize and top_k > 1:
        total = sum(weights) + 1e-20
        weights = [w / total for w in weights]
    return order, [w * scale for w in weights]


def balance(raw, chosen):
    """sum_i f_i P_i of one sequence; ``raw`` scores [T][E], ``chosen`` expert ids [T][A]."""
    tokens, num, top_k = len(raw), len(raw[0]), len(chosen[0])
    out = 0.0
    for i in range(num):
        hits = sum(1 for ids in chosen for e in ids if e == i)
        share = sum(row[i] / sum(row) for row in raw) / tokens
        out += num / (top_k * tokens) * hits * share
    return out


def swiglu(gate, up, limit):
    """silu(min(g, limit)) * clamp(u, -limit, limit)."""
    g = np.minimum(gate, limit)
    u = np.clip(up, -limit, limit)
    return g / (1 + np.exp(-g)) * u


def expert(x, parts, limit, weight=1.0):
    """w2 (weight * swiglu(w1 x, w3 x)): the weight comes before w2."""
    w1, w3, w2 = parts
    return w2 @ (weight * swiglu(w1 @ x, w3 @ x, limit))


def mixture(x, ids, weights, *, experts, shared, limit):
    """Routed experts plus the shared one; ``experts[e]`` and ``shared`` are (w1, w3, w2)."""
    out = expert(x, shared, limit)
    for e, weight in zip(ids, weights, strict=True):
        out = out + expert(x, experts[e], limit, weight)
    return out
