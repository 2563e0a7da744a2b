"""How a row of each cache is stored, and how many bytes it takes. Report §2.4.4.

This is the one place that knows the sizes: allocator, writer, reader and ``openv41 plan`` ask it.
A packed row is its codes followed by its scales: 528 bytes of window KV, 288 of main KV and 68 of
an index key as released. A kind that the numerics do not round is kept as floats.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from openv41.config import ModelConfig, NumericsConfig
from openv41.ops import quantize
from openv41.ops.cache_writers import QUANTIZERS, Format

Codes = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Packing:
    """A packed format: codes of some elements per byte, and a scale byte per block."""

    form: Format
    per_byte: int
    block: int
    code_dtype: torch.dtype
    scale_dtype: torch.dtype

    @property
    def quantize(self) -> Callable[[Tensor], Codes]:
        """Codes and scales of rows."""
        return QUANTIZERS[self.form][0]

    @property
    def dequantize(self) -> Callable[..., Tensor]:
        """Values of codes and scales."""
        return QUANTIZERS[self.form][1]

    def code_bytes(self, width: int) -> int:
        """Bytes of the codes of a row."""
        return width // self.per_byte

    def row_bytes(self, width: int) -> int:
        """Bytes of a whole row."""
        return self.code_bytes(width) + -(-width // self.block)


PACKINGS = {
    "window": Packing(
        form="fp8",
        per_byte=1,
        block=quantize.BLOCK,
        code_dtype=torch.float8_e4m3fn,
        scale_dtype=torch.float8_e8m0fnu,
    ),
    "main": Packing(
        form="fp4_e4m3",
        per_byte=2,
        block=quantize.MAIN_KV_BLOCK,
        code_dtype=torch.uint8,
        scale_dtype=torch.float8_e4m3fn,
    ),
    "index": Packing(
        form="mxfp4",
        per_byte=2,
        block=quantize.BLOCK,
        code_dtype=torch.uint8,
        scale_dtype=torch.float8_e8m0fnu,
    ),
}


@dataclass(frozen=True, kw_only=True)
class RowFormat:
    """Stored form of one row: ``columns`` elements of ``dtype``."""

    width: int  # elements of the row as numbers
    columns: int
    dtype: torch.dtype
    packing: Packing | None

    @property
    def row_bytes(self) -> int:
        """Bytes of a stored row."""
        return self.columns * self.dtype.itemsize

    def pack(self, rows: Tensor) -> Tensor:
        """Stored form of rows that were not rounded yet."""
        if self.packing is None:
            return rows.to(self.dtype)
        codes, scales = self.packing.quantize(rows)
        return torch.cat([codes.view(torch.uint8), scales.view(torch.uint8)], dim=-1)

    def unpack(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """Numbers of stored rows: what the fake quantiser gives, bit for bit."""
        if self.packing is None:
            return stored.to(dtype)
        cut = self.packing.code_bytes(self.width)
        codes = stored[..., :cut].contiguous().view(self.packing.code_dtype)
        scales = stored[..., cut:].contiguous().view(self.packing.scale_dtype)
        return self.packing.dequantize(codes, scales, dtype)


def row_width(config: ModelConfig, kind: str) -> int:
    """Elements of a row: of window KV, main KV, an index key, or a pending projection."""
    latent = config.attention.head_dim
    return {"index": config.indexer.head_dim, "pending": 2 * latent}.get(kind, latent)


def row_format(
    config: ModelConfig, kind: str, numerics: NumericsConfig, dtype: torch.dtype
) -> RowFormat:
    """Format of a kind of rows: packed where the numerics round it, else floats of ``dtype``."""
    width = row_width(config, kind)
    roundings = {"window": numerics.window_kv, "main": numerics.main_kv, "index": numerics.index}
    if roundings.get(kind, "off") == "off":
        wide = torch.promote_types(dtype, torch.float32) if kind == "pending" else dtype
        return RowFormat(width=width, columns=width, dtype=wide, packing=None)
    packing = PACKINGS[kind]
    return RowFormat(
        width=width, columns=packing.row_bytes(width), dtype=torch.uint8, packing=packing
    )


def packed_bytes(config: ModelConfig, kind: str) -> int:
    """Bytes of a packed row of window KV, main KV or an index key."""
    return PACKINGS[kind].row_bytes(row_width(config, kind))
