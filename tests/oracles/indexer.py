"""Indexer: scores, selection with ties to the lowest index, candidate pool."""

import math

import numpy as np


def scores(q, weights, keys):
    """score[j] = sum_h w[h] relu(q[h] . k[j]) for one query; q [I, J], keys [M, J]."""
    out = np.zeros(len(keys))
    for h in range(len(q)):
        out += weights[h] * np.maximum(keys @ q[h], 0.0)
    return out


def select(values, k):
    """Indices of the k highest values, lowest index first on ties, -inf dropped; ascending."""
    order = sorted(range(len(values)), key=lambda j: (-values[j], j))
    return sorted(j for j in order[:k] if values[j] != -math.inf)


def candidate_blocks(values, visible, block_size, top_blocks):
    """Blocks of the pool: by their best score, the newest visible entry's block always in."""
    best = [
        max(values[start : min(start + block_size, visible)])
        for start in range(0, visible, block_size)
    ]
    if visible > 0:
        best[(visible - 1) // block_size] = math.inf
    return select(best, top_blocks)


def candidate_mask(values, visible, block_size, top_blocks):
    """The pool expanded to entries [M]."""
    mask = np.zeros(len(values), dtype=bool)
    for block in candidate_blocks(values, visible, block_size, top_blocks):
        mask[block * block_size : (block + 1) * block_size] = True
    mask[visible:] = False
    return mask


def divergence(values, mass):
    """KL of the shares of ``mass`` from the softmax of the scores ``values``, for one query."""
    total = sum(mass)
    if total == 0:
        return 0.0
    largest = max(values)
    partition = sum(math.exp(v - largest) for v in values)
    out = 0.0
    for value, part in zip(values, mass, strict=True):
        teacher = part / total
        if teacher > 0:
            out += teacher * (math.log(teacher) - (value - largest - math.log(partition)))
    return out
