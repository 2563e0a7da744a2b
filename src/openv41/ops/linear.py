"""Matrix products of the linear layers. Report §2.4.4."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from openv41.config import Rounding
from openv41.ops._dispatch import op
from openv41.ops.quantize import dequantize_fp8, fake_fp8, quantize_fp8

TILE_ROWS = 16


@op
def linear(
    x: Float[Tensor, "... D"], weight: Float[Tensor, "F D"], *, deterministic: bool = False
) -> Float[Tensor, "... F"]:
    """Multiply in the dtype of ``x``: x @ weight^T.

    Stock matrix products change their summation with the number of rows. ``deterministic`` runs on
    tiles of a fixed number of rows, so that a row's result depends on that row alone.
    """
    if not deterministic:
        return F.linear(x, weight.to(x.dtype))
    return fixed_rows(x, lambda tile: F.linear(tile, weight.to(x.dtype)))


def fixed_rows(x: Float[Tensor, "... D"], product: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a row-wise product to tiles of exactly TILE_ROWS rows, padded with zeros."""
    rows = x.flatten(0, -2)
    padded = F.pad(rows, (0, 0, 0, -len(rows) % TILE_ROWS))
    tiles = [product(tile) for tile in padded.split(TILE_ROWS)]
    out = torch.cat(tiles)[: len(rows)] if tiles else product(padded)
    return out.view(*x.shape[:-1], out.shape[-1])


@op
def quantized_linear(
    x: Float[Tensor, "... D"],
    weight: Float[Tensor, "F D"],
    rounding: Rounding,
    *,
    deterministic: bool = False,
) -> Float[Tensor, "... F"]:
    """Linear map whose input is rounded to FP8 in groups of 32, and the output to ``x.dtype``.

    "fake" passes the gradient straight through; "exact" goes through the stored codes and sums in
    float32. ``weight`` holds the dequantised values.
    """
    if rounding == "off":
        return linear(x, weight, deterministic=deterministic)
    if rounding == "fake":
        return linear(fake_fp8(x), weight, deterministic=deterministic)
    codes, scales = quantize_fp8(x)
    wide = dequantize_fp8(codes, scales, torch.float32)
    return linear(wide, weight, deterministic=deterministic).to(x.dtype)
