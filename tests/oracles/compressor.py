"""CSA2 compressor: groups of tokens to latents, before RoPE and before rounding."""

import numpy as np

from tests.oracles.norm import rms_norm


def pool(kv, gate):
    """Per channel: softmax of the gate over the tokens of the group, then the weighted sum."""
    out = np.zeros(kv.shape[1])
    for c in range(kv.shape[1]):
        largest = max(gate[:, c])
        weights = [np.exp(g - largest) for g in gate[:, c]]
        out[c] = sum(w * value for w, value in zip(weights, kv[:, c], strict=True)) / sum(weights)
    return out


def compress(x, ratio, wkv, norm, wgate=None):
    """Latents of the complete groups of x [T, D] that starts at position 0."""
    kv = x @ wkv.T
    if ratio == 1:
        return np.array([rms_norm(row, norm) for row in kv]).reshape(-1, len(norm))
    gate = x @ wgate.T
    latents = []
    for j in range(len(x) // ratio):
        group = slice(j * ratio, (j + 1) * ratio)
        latents.append(rms_norm(pool(kv[group], gate[group]), norm))
    return np.array(latents).reshape(-1, len(norm))


def num_visible(position, ratio):
    """Entry j is visible iff the last token of its group is not after the query."""
    return sum((j + 1) * ratio <= position + 1 for j in range(position + 1))
