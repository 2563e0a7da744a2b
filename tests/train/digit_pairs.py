"""Handwritten digits beside words for them, and a contrastive model of a size that learns them."""

from dataclasses import replace

import torch
from sklearn.datasets import load_digits

from openv41.config import VisionConfig
from openv41.image_grid import ImageGrid
from openv41.train.contrastive import ContrastiveModel
from openv41.train.packed_batch import PackedBatch
from tests.layers.mini import mini_config

WORDS = [[7, i, 7 + i] if i % 2 else [9, i] for i in range(20, 30)]  # a text per digit
VISION = VisionConfig(
    num_layers=2, hidden_size=32, num_heads=2, intermediate_size=64, patch_size=2, min_pixels=1
)


def digit_model(dtype=torch.float32, seed=1):
    config = replace(mini_config(), vision=VISION)
    model = ContrastiveModel(config, dtype=dtype)
    model.init(seed)
    return model


def digits(numbers):
    """Digits of these numbers as one batch of documents, each of 16 patches and its word."""
    found = load_digits()
    values = torch.from_numpy(found.images[numbers] * (255 / 16)).to(torch.uint8)  # [n, 8, 8]
    patches = values.unfold(1, 2, 2).unfold(2, 2, 2).flatten(0, 2)  # [n * 16, 2, 2]
    texts = [WORDS[digit] for digit in found.target[numbers]]
    ids = torch.tensor([token for text in texts for token in text])
    return PackedBatch(
        ids,
        tuple(map(len, texts)),
        torch.ones(len(ids)),
        patches[:, None].expand(-1, 3, -1, -1).contiguous(),
        ((ImageGrid(4, 4, 2),),) * len(texts),
    )
