"""Rows of MXFP4 numbers as a cache keeps them: codes, then scales. Report §2.4.4."""

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from openv41.ops.quantize import BLOCK, dequantize_mxfp4, quantize_mxfp4


def pack_rows(x: Float[Tensor, "*rows J"]) -> UInt8[Tensor, "*rows row"]:
    """MXFP4 codes of each row, then their scales."""
    codes, scales = quantize_mxfp4(x)
    return torch.cat([codes, scales.view(torch.uint8)], dim=-1)


def packed_width(width: int) -> int:
    """Bytes of a packed row of so many numbers."""
    return -(-width // 2) + -(-width // BLOCK)


def unpack_rows(packed: UInt8[Tensor, "*rows row"]) -> Float[Tensor, "*rows J"]:
    """Exact float32 values of packed MXFP4 rows, each of codes followed by scales."""
    blocks = -(-packed.shape[-1] // (BLOCK // 2 + 1))
    codes, scales = packed.split([packed.shape[-1] - blocks, blocks], dim=-1)
    return dequantize_mxfp4(codes, scales.contiguous().view(torch.float8_e8m0fnu))
