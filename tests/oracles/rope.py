"""Rotary positions: adjacent pairs of the last channels, YaRN frequencies."""

import math

import numpy as np


def frequencies(rope_dim, theta, yarn=None):
    """f_k in float32. ``yarn``: factor, beta_fast, beta_slow, original_max_position_embeddings."""
    exponents = np.arange(0, rope_dim, 2, dtype=np.float32) / np.float32(rope_dim)
    freqs = np.float32(1.0) / np.float32(theta) ** exponents
    if yarn is None:
        return freqs

    def correction(rotations):
        original = yarn["original_max_position_embeddings"]
        return rope_dim * math.log(original / (2 * math.pi * rotations)) / (2 * math.log(theta))

    low = max(math.floor(correction(yarn["beta_fast"])), 0)
    high = min(math.ceil(correction(yarn["beta_slow"])), rope_dim - 1)
    out = []
    for k, freq in enumerate(freqs):
        ramp = np.float32(min(max((k - low) / max(high - low, 1e-3), 0.0), 1.0))
        out.append(freq / np.float32(yarn["factor"]) * ramp + freq * (np.float32(1.0) - ramp))
    return np.array(out, dtype=np.float32)


def rotate(vector, position, freqs, inverse=False):
    """Rotate the pairs (2k, 2k+1) of the last 2 len(freqs) channels by position * f_k."""
    out = np.array(vector, dtype=np.float64)
    angles = (np.float32(position) * freqs).astype(np.float64)
    if inverse:
        angles = -angles
    rotated = out[len(out) - 2 * len(freqs) :]
    real, imaginary = rotated[0::2].copy(), rotated[1::2].copy()
    rotated[0::2] = real * np.cos(angles) - imaginary * np.sin(angles)
    rotated[1::2] = real * np.sin(angles) + imaginary * np.cos(angles)
    return out
