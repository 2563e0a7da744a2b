"""Row-wise functions whose bits do not depend on the other rows: the deterministic mode.

Stock kernels treat the edges of an array by other code: matrix products change with the number of
rows and columns, vectorised functions with the place in the flat array. Here everything runs on
whole tiles of one shape, so a row's result depends on that row alone.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

TILE_ROWS = 16  # rows of one matrix product
TILE_WIDTH = 32  # its other sides are multiples of this
VECTOR_ROWS = 64  # a multiple of all vector widths, in elements
PIECE = 8192  # elements: below what torch spreads over threads


def fixed_rows(
    x: Float[Tensor, "T ... C"], function: Callable[[Tensor], Tensor], rows: int
) -> Tensor:
    """Apply a row-wise function to tiles of exactly ``rows`` rows, padded with zeros."""
    padded = F.pad(x, (0, 0) * (x.ndim - 1) + (0, -len(x) % rows or (0 if len(x) else rows)))
    return torch.cat([function(tile) for tile in padded.split(rows)])[: len(x)]


def whole_tiles(x: Float[Tensor, "... D"], *, rows: int = 1) -> Tensor:
    """Pad the last dim with zeros to whole tiles, and the one before to a multiple of ``rows``."""
    return F.pad(x, (0, -x.shape[-1] % TILE_WIDTH, 0, -x.shape[-2] % rows))


def fixed_product(x: Float[Tensor, "T D"], weight: Float[Tensor, "F D"]) -> Float[Tensor, "T F"]:
    """Multiply on tiles of TILE_ROWS rows, all sides whole: x @ weight^T."""
    wide = whole_tiles(weight, rows=TILE_WIDTH)
    out = fixed_rows(whole_tiles(x), lambda tile: F.linear(tile, wide), TILE_ROWS)
    return out[:, : len(weight)]


def elementwise(
    x: Float[Tensor, "..."], function: Callable[[Tensor], Tensor]
) -> Float[Tensor, "..."]:
    """Apply an elementwise function on whole vectors in a single thread."""
    flat = x.flatten()
    padded = F.pad(flat, (0, -len(flat) % VECTOR_ROWS))
    pieces = [function(piece) for piece in padded.split(PIECE)]
    return torch.cat(pieces)[: len(flat)].view(x.shape)
