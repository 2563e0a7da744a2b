"""The vision encoder and the projector for one image, in float64 and in loops."""

import math

import numpy as np


def encode(patches, rows, cols, weights, *, layers, heads, theta, eps=1e-6):
    """Patches [n, 3, p, p] in reading order to features [n, dim]."""
    angles = [patch_angles(i // cols, i % cols, weights, heads, theta) for i in range(rows * cols)]
    embed, bias = weights["patch_embed.weight"], weights["patch_embed.bias"]
    x = [embed @ patch.reshape(-1) + bias for patch in patches]
    for layer in range(layers):
        own = {
            name.removeprefix(f"blocks.{layer}."): value
            for name, value in weights.items()
            if name.startswith(f"blocks.{layer}.")
        }
        x = block(x, own, angles, heads, eps)
    return np.array([rms_norm(row, weights["norm.weight"], eps) for row in x])


def patch_angles(row, col, weights, heads, theta):
    """Angles of a head's pairs: half of them turn with the row, the others with the column."""
    quarter = len(weights["norm.weight"]) // heads // 4
    return [
        place * theta ** (-2 * j / (2 * quarter)) for place in (row, col) for j in range(quarter)
    ]


def block(x, weights, angles, heads, eps):
    """One pre-norm block over the patches of one image."""
    normed = [rms_norm(row, weights["norm1.weight"], eps) for row in x]
    mixed = attend(normed, weights, angles, heads)
    x = [
        row + weights["attn.wo.weight"] @ new + weights["attn.wo.bias"]
        for row, new in zip(x, mixed, strict=True)
    ]
    out = []
    for row in x:
        both = weights["mlp.w1.weight"] @ rms_norm(row, weights["norm2.weight"], eps)
        half = len(both) // 2
        hidden = [g / (1 + math.exp(-g)) * u for g, u in zip(both[:half], both[half:], strict=True)]
        out.append(row + weights["mlp.w2.weight"] @ np.array(hidden))
    return out


def attend(x, weights, angles, heads):
    """Every patch to every patch; heads one after the other."""
    dim = len(x[0])
    width = dim // heads
    projected = [weights["attn.wqkv.weight"] @ row + weights["attn.wqkv.bias"] for row in x]
    mixed = [np.zeros(dim) for _ in x]
    for head in range(heads):
        part = slice(head * width, (head + 1) * width)
        turned = [
            (turn(p[:dim][part], a), turn(p[dim : 2 * dim][part], a), p[2 * dim :][part])
            for p, a in zip(projected, angles, strict=True)
        ]
        for i, (q, _, _) in enumerate(turned):
            scores = [math.exp(float(q @ k) / math.sqrt(width)) for _, k, _ in turned]
            for score, (_, _, v) in zip(scores, turned, strict=True):
                mixed[i][part] += score / sum(scores) * v
    return mixed


def turn(vector, angles):
    """Pairs (i, i + half) by angle i."""
    half, out = len(vector) // 2, np.zeros(len(vector))
    for i, angle in enumerate(angles):
        out[i] = vector[i] * math.cos(angle) - vector[i + half] * math.sin(angle)
        out[i + half] = vector[i + half] * math.cos(angle) + vector[i] * math.sin(angle)
    return out


def rms_norm(row, weight, eps):
    """Own norm, since eps is another here."""
    return row / math.sqrt(sum(v * v for v in row) / len(row) + eps) * weight


def project(features, rows, cols, weights, *, ratio):
    """Features of one image to its cells, in reading order."""
    channels, cells = features.shape[1], []
    for top in range(0, rows, ratio):
        for left in range(0, cols, ratio):
            merged = np.zeros(channels * ratio * ratio)
            for c in range(channels):
                for dy in range(ratio):
                    for dx in range(ratio):
                        row, col = top + dy, left + dx
                        if row < rows and col < cols:
                            place = c * ratio * ratio + dy * ratio + dx
                            merged[place] = features[row * cols + col, c]
            hidden = weights["w1.weight"] @ merged + weights["w1.bias"]
            hidden = [0.5 * h * (1 + math.erf(h / math.sqrt(2))) for h in hidden]
            cells.append(weights["w2.weight"] @ np.array(hidden) + weights["w2.bias"])
    return np.array(cells)
