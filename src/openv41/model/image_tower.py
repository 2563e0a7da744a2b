"""From patches to the embeddings of image spans: encoder, projector, delimiters. Report §2.1.1."""

from collections.abc import Sequence
from typing import Unpack

import torch
from jaxtyping import Float
from torch import Tensor, nn

from openv41.config import NumericsConfig, VisionConfig
from openv41.image_grid import ImageGrid
from openv41.layers.factory import Factory
from openv41.layers.projector import Projector
from openv41.layers.vision_encoder import VisionEncoder


class ImageTower(nn.Module):
    """What the language model sees of images."""

    def __init__(
        self,
        vision: VisionConfig,
        hidden_size: int,
        numerics: NumericsConfig,
        **made: Unpack[Factory],
    ) -> None:
        super().__init__()
        self.deterministic = numerics.deterministic
        self.encoder = VisionEncoder(vision, numerics, **made)
        self.projector = Projector(vision, hidden_size, numerics, **made)
        self.start = nn.Parameter(torch.empty(hidden_size, **made))
        self.newline = nn.Parameter(torch.empty(hidden_size, **made))
        self.end = nn.Parameter(torch.empty(hidden_size, **made))

    def forward(
        self, patches: Float[Tensor, "patches 3 side side"], grids: Sequence[ImageGrid]
    ) -> Float[Tensor, "image_tokens D"]:
        """Embeddings of all span tokens of all images, in their order.

        An image's embeddings do not depend on its neighbours; to the last bit where the numerics
        are deterministic, which takes one pass per image.
        """
        if self.deterministic and len(grids) > 1:
            images = patches.split([grid.num_patches for grid in grids])
            each = [self(own, [grid]) for own, grid in zip(images, grids, strict=True)]
            return torch.cat(each)
        return self.spans(self.projector(self.encoder(patches, grids), grids), grids)

    def spans(
        self, cells: Float[Tensor, "cells D"], grids: Sequence[ImageGrid]
    ) -> Float[Tensor, "image_tokens D"]:
        """Put a newline behind each row of cells, and a start and an end around each image."""
        parts = []
        images = cells.split([grid.cell_rows * grid.cell_cols for grid in grids])
        for own, grid in zip(images, grids, strict=True):
            rows = own.unflatten(0, (grid.cell_rows, grid.cell_cols))
            newlines = self.newline.to(own.dtype).expand(grid.cell_rows, 1, -1)
            body = torch.cat([rows, newlines], dim=1).flatten(0, 1)
            parts += [self.start.to(own.dtype)[None], body, self.end.to(own.dtype)[None]]
        return torch.cat(parts) if parts else cells
