"""The projector from patches to the language model's width. Report §2.1.1."""

from collections.abc import Sequence
from typing import Unpack

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from openv41 import ops
from openv41.config import NumericsConfig, VisionConfig
from openv41.image_grid import ImageGrid
from openv41.layers.factory import Factory
from openv41.layers.quantized_linear import Linear


class Projector(nn.Module):
    """3x3 pixel-unshuffle, then two layers with an exact GELU between them."""

    def __init__(
        self,
        vision: VisionConfig,
        hidden_size: int,
        numerics: NumericsConfig,
        **made: Unpack[Factory],
    ) -> None:
        super().__init__()
        merged = vision.hidden_size * vision.downsample_ratio**2
        self.w1 = Linear(merged, hidden_size, numerics, bias=True, **made)
        self.w2 = Linear(hidden_size, hidden_size, numerics, bias=True, **made)

    def forward(
        self, x: Float[Tensor, "patches width"], grids: Sequence[ImageGrid]
    ) -> Float[Tensor, "cells D"]:
        """Merge each image's patches into cells and project them."""
        images = x.split([grid.num_patches for grid in grids])
        cells = [
            ops.pixel_unshuffle(own, grid.rows, grid.cols, grid.ratio)
            for own, grid in zip(images, grids, strict=True)
        ]
        merged = torch.cat(cells) if cells else x.new_empty(0, self.w1.weight.shape[1])
        projected: Tensor = self.w2(F.gelu(self.w1(merged)))
        return projected
