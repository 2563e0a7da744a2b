"""One query's attention over window and selected entries, with a value-less sink."""

import math

import numpy as np


def attend(q, keys, sink, scale):
    """q [H, C], keys = values [n, C], sink [H]; one joint softmax per head."""
    out = np.zeros_like(q)
    for h in range(len(q)):
        logits = [scale * logit for logit in keys @ q[h]]
        largest = max([-1e30, *logits])
        exponent = sink[h] - largest
        if not logits or exponent > 700:
            continue  # the sink takes all
        weights = [math.exp(logit - largest) for logit in logits]
        total = sum(weights) + math.exp(exponent)
        out[h] = sum(weight / total * key for weight, key in zip(weights, keys, strict=True))
    return out


def mass(q, near, far, sink, scale):
    """Probability of each far key [n], summed over heads; joint softmax with near keys and sink."""
    out = [0.0] * len(far)
    for h in range(len(q)):
        logits = [scale * float(sum(a * b for a, b in zip(q[h], key, strict=True))) for key in near]
        listed = [scale * float(sum(a * b for a, b in zip(q[h], key, strict=True))) for key in far]
        largest = max([float(sink[h]), *logits, *listed])
        total = sum(math.exp(v - largest) for v in [float(sink[h]), *logits, *listed])
        for j, logit in enumerate(listed):
            out[j] += math.exp(logit - largest) / total
    return out


def window(position, size):
    """Positions a query sees through the window, itself included."""
    return range(max(0, position - size + 1), position + 1)


def project_output(heads, wo_a, wo_b, groups):
    """Grouped low-rank output projection; heads [H, C] already rotated back."""
    grouped = heads.reshape(groups, -1)
    rank = len(wo_a) // groups
    u = [wo_a[g * rank : (g + 1) * rank] @ grouped[g] for g in range(groups)]
    return wo_b @ np.concatenate(u)
