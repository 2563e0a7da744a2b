"""Latents on their way into the cache: norm, rotation, rounding and storing. Report §2.4.4.

A stored row is its codes followed by its scales. Released widths: window KV 512 channels in 528
bytes (``fp8``), main KV 512 in 288 (``fp4_e4m3``), index keys 128 in 68 (``mxfp4``).
"""

from typing import Literal

import torch
from jaxtyping import Complex, Float, Int, UInt8
from torch import Tensor

from openv41.ops import quantize
from openv41.ops._dispatch import op
from openv41.ops.norm import rms_norm
from openv41.ops.rope import rotate

Format = Literal["fp8", "fp4_e4m3", "mxfp4"]

QUANTIZERS = {
    "fp8": (quantize.quantize_fp8, quantize.dequantize_fp8),
    "fp4_e4m3": (quantize.quantize_fp4_e4m3, quantize.dequantize_fp4_e4m3),
    "mxfp4": (quantize.quantize_mxfp4, quantize.dequantize_mxfp4),
}


@op
def write_latents(  # noqa: PLR0917 -- where it goes, what goes, and how
    stored: UInt8[Tensor, "S columns"],
    places: Int[Tensor, " T"],
    latents: Float[Tensor, "T C"],
    weight: Float[Tensor, " C"] | None,
    eps: float,
    table: Complex[Tensor, "T pairs"],
    form: Format,
    *,
    deterministic: bool = False,
) -> Float[Tensor, "T C"]:
    """Write row t of ``latents`` into ``stored[places[t]]``; a negative place writes nothing.

    Each row is normed (not where ``weight`` is None), its last channels are rotated, and it is
    packed. Places that are not negative differ from each other. Returns the values that the packed
    rows give back, of every row, in the dtype of ``latents``.
    """
    normed = latents if weight is None else rms_norm(latents, weight, eps)
    exact = rotate(normed, table, deterministic=deterministic)
    pack, unpack = QUANTIZERS[form]
    codes, scales = pack(exact)
    packed = torch.cat([codes.view(torch.uint8), scales.view(torch.uint8)], dim=-1)
    kept = places >= 0
    stored[places[kept]] = packed[kept]
    return unpack(codes, scales, latents.dtype)
