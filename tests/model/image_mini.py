"""The mini model with eyes: a text with two images, and their patches."""

from dataclasses import replace

import torch

from openv41.config import NUMERICS, VisionConfig
from openv41.image_grid import ImageGrid
from openv41.layers.batch import Batch
from tests.layers.mini import IMAGE_TOKEN, mini_config, mini_model, random_ids

VISION = VisionConfig(
    num_layers=2,
    hidden_size=16,
    num_heads=2,
    intermediate_size=12,
    patch_size=2,
    rope_theta=50.0,
    downsample_ratio=2,
    max_image_tokens=60,
    min_pixels=16,
)
GRIDS = [ImageGrid(3, 4, 2), ImageGrid(2, 3, 2)]  # 2 x 2 and 1 x 2 cells, 8 and 5 tokens
STARTS = (5, 17)  # neither even nor a multiple of the window, with 4 text tokens between


def seeing_model(seed, dtype=torch.float64, numerics=NUMERICS["f32"]):
    """Norms away from one, biases and delimiters away from zero."""
    return mini_model(seed, dtype, numerics, replace(mini_config(), vision=VISION))


def image_ids(grids=GRIDS, starts=STARTS, length=30):
    """Text with the span of each image."""
    ids = random_ids(length, 8)
    for grid, start in zip(grids, starts, strict=True):
        ids[start : start + grid.span_length] = [IMAGE_TOKEN] * grid.span_length
    assert len(ids) == length
    return ids


def patches(grids=GRIDS, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (sum(grid.num_patches for grid in grids), 3, 2, 2)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def image_batch(model, given=None, grids=GRIDS, ids=None):
    """One document with its images' embeddings."""
    given = patches(grids, model.norm.weight.dtype) if given is None else given
    ids = image_ids(grids) if ids is None else ids
    return Batch.from_documents([ids], image_embeds=model.vision(given, grids))
