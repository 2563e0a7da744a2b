"""Merging of neighbouring patches. Report §2.1.1."""

import torch
from jaxtyping import Float
from torch import Tensor

from openv41.ops._dispatch import op


@op
def pixel_unshuffle(
    x: Float[Tensor, "patches width"], rows: int, cols: int, ratio: int
) -> Float[Tensor, "cells wide"]:
    """Merge ratio x ratio patches of one image into a cell of width * ratio^2 features.

    The grid is padded with zeros at the right and at the bottom. Cells come in reading order; a
    cell's features are channel-major: index c * ratio^2 + dy * ratio + dx.
    """
    padding = (0, -cols % ratio, 0, -rows % ratio)
    grid = torch.nn.functional.pad(x.T.unflatten(1, (rows, cols)), padding)  # [width, rows, cols]
    blocks = grid.unflatten(2, (-1, ratio)).unflatten(1, (-1, ratio))  # [width, y, dy, x, dx]
    cells: Tensor = blocks.permute(1, 3, 0, 2, 4).flatten(2).flatten(0, 1)
    return cells
