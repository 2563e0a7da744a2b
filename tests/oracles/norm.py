"""RMS norm of one vector."""

import numpy as np


def rms_norm(x, weight, eps=1e-20):
    """x / sqrt(mean(x^2) + eps) * weight."""
    return x / np.sqrt(np.mean(x * x) + eps) * weight
