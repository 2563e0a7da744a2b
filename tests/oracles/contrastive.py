"""SigLIP's loss and its gradients as loops in float64; shares no code with the package."""

import math

import numpy as np


def sigmoid(x):
    return 1 / (1 + math.exp(-x)) if x > 0 else math.exp(x) / (1 + math.exp(x))


def contrastive(images, texts, log_temperature, bias, first=0):
    """Loss, and its gradients by images, texts, log temperature and bias."""
    scale, count = math.exp(log_temperature), len(images)
    loss, by_log, by_bias = 0.0, 0.0, 0.0
    by_images, by_texts = np.zeros_like(images), np.zeros_like(texts)
    for i, image in enumerate(images):
        for j, text in enumerate(texts):
            long, wide = math.sqrt(sum(image**2)), math.sqrt(sum(text**2))
            cosine = sum(a * b for a, b in zip(image, text, strict=True)) / (long * wide)
            sign = 1 if j == first + i else -1
            logit = scale * cosine + bias
            loss -= math.log(sigmoid(sign * logit)) / count
            slope = -sign * sigmoid(-sign * logit) / count
            by_log += slope * scale * cosine
            by_bias += slope
            for k in range(len(image)):
                direction = text[k] / wide - cosine * image[k] / long
                by_images[i, k] += slope * scale * direction / long
                direction = image[k] / long - cosine * text[k] / wide
                by_texts[j, k] += slope * scale * direction / wide
    return loss, by_images, by_texts, by_log, by_bias
