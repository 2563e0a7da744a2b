"""Muon and the Sinkhorn-balanced update in float64, from the formulas: loops over numpy rows."""

import numpy as np


def polar(matrix):
    """U V^T from a singular value decomposition; directions without energy stay zero."""
    u, s, v = np.linalg.svd(matrix, full_matrices=False)
    live = s > 1e-9 * s[0]
    return (u[:, live]) @ v[live]


def muon(weight, gradients, *, lr, mu, decay, gamma, heads=1):
    """Weight after the gradients, head by head."""
    weight = np.array(weight, dtype=np.float64)
    momentum = np.zeros_like(weight)
    for gradient in np.array(gradients, dtype=np.float64):
        momentum = mu * momentum + gradient
        nesterov = mu * momentum + gradient
        rows = weight.shape[0] // heads
        for head in range(heads):
            own = slice(head * rows, (head + 1) * rows)
            scale = np.sqrt(max(rows, weight.shape[1])) * gamma
            weight[own] = weight[own] * (1 - lr * decay) - lr * polar(nesterov[own]) * scale
    return weight


def sinkhorn(weight, gradients, *, lr, beta, gamma, steps, tau, eps=1e-20):
    """Weight after the gradients: Algorithm 1 as it is printed."""
    weight = np.array(weight, dtype=np.float64)
    m, n = weight.shape
    momentum = np.zeros_like(weight)
    for gradient in np.array(gradients, dtype=np.float64):
        momentum = beta * momentum + (1 - beta) * gradient
        u = beta * momentum + (1 - beta) * gradient
        rho = np.array([np.sqrt((row**2).sum()) for row in u])
        for i in range(m):
            if rho[i] <= tau * rho.mean():
                u[i] = 0
        for k in range(1, steps + 1):
            if k % 2:
                for i in range(m):
                    u[i] /= np.sqrt((u[i] ** 2).sum()) + eps
            else:
                for j in range(n):
                    u[:, j] /= np.sqrt((u[:, j] ** 2).sum()) + eps
        weight = weight - gamma * lr * np.sqrt(n) * u
    return weight
