"""Weights as they move between files and models: a few rows at a time, stored or plain.

A quantised weight travels as codes and scales until somebody needs numbers, and becomes codes again
only where it had none: stored codes pass from file to file unchanged. Report §2.4.4.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from openv41.errors import CheckpointError
from openv41.io.shard_index import ShardSet
from openv41.io.tensor_names import TensorSpec
from openv41.layers.quantized_linear import DEQUANTIZE
from openv41.ops import quantize

QUANTIZE = {
    "fp8": quantize.quantize_fp8_tiles,
    "fp4": quantize.quantize_fp4_rows,
    "fp8_rows": quantize.quantize_fp8_rows,
}
CHUNK_ELEMENTS = 1 << 18
_E8M0_NAN = 0xFF
_E4M3_NAN = 0x7F  # with either sign


class Rows(NamedTuple):
    """Plain numbers, or codes (FP4 as uint8) and their scales."""

    values: Tensor
    scales: Tensor | None


@dataclass(frozen=True, slots=True)
class Weight:
    """One weight of a checkpoint: a tensor of the table, with its scales where it has them."""

    spec: TensorSpec
    scale: TensorSpec | None

    @property
    def name(self) -> str:
        """Released name, the same in every variant."""
        return self.spec.released

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Row ranges of bounded size; a tile of scales never spans two."""
        rows, *rest = self.spec.shape
        step = CHUNK_ELEMENTS // max(1, torch.Size(rest).numel())
        step = max(quantize.BLOCK, step // quantize.BLOCK * quantize.BLOCK)
        for start in range(0, rows, step):
            yield start, min(rows, start + step)

    def scale_rows(self, start: int, stop: int) -> tuple[int, int]:
        """Rows of the scales that belong to rows of the codes."""
        if self.spec.weight_format == "fp8":
            return start // quantize.BLOCK, -(-stop // quantize.BLOCK)
        return start, stop


@runtime_checkable
class Source(Protocol):
    """Where weights come from."""

    def rows(self, weight: Weight, start: int, stop: int) -> Rows:
        """Rows of a weight in whatever form the source holds."""


def weights_of(table: Sequence[TensorSpec]) -> list[Weight]:
    """Join codes with their scales, which follow them in the table."""
    following = [*table[1:], None]
    return [
        Weight(spec, after if after and after.part == "scale" else None)
        for spec, after in zip(table, following, strict=True)
        if spec.part != "scale"
    ]


class FileSource:
    """Weights of a checkpoint on disk; its table has been checked against the files."""

    def __init__(self, files: ShardSet, table: Sequence[TensorSpec]) -> None:
        self.files = files
        self.weights = by_name(table)

    def rows(self, weight: Weight, start: int, stop: int) -> Rows:
        """Read rows; a NaN code or scale is an error."""
        stored = self.weights[weight.name]
        values = self.files.read_rows(stored.name, start, stop)
        if stored.scale is None:
            return Rows(values, None)
        scale = stored.scale.released
        first, last = stored.scale_rows(start, stop)
        scales = self.files.read_rows(scale, first, last)
        self._refuse_nan(scale, scales.view(torch.uint8) == _E8M0_NAN, first)
        if values.dtype == torch.float8_e4m3fn:
            is_nan = values.view(torch.uint8) & _E4M3_NAN == _E4M3_NAN
            self._refuse_nan(stored.name, is_nan, start)
        else:
            values = values.view(torch.uint8)
        return Rows(values, scales)

    def _refuse_nan(self, name: str, is_nan: Tensor, start: int) -> None:
        if not is_nan.any():
            return
        row, column = (int(i) for i in is_nan.nonzero()[0])
        raise CheckpointError(
            f"{self.files.folder / self.files.file_of[name]}: {name}: NaN at row {start + row}, "
            f"column {column}; the file is damaged"
        )


def as_plain(rows: Rows, weight: Weight, dtype: torch.dtype) -> Tensor:
    """The numbers, exact in float32; values beyond the dtype's range are an error."""
    if rows.scales is None:
        return rows.values.to(dtype)
    values = DEQUANTIZE[_format(weight)](rows.values, rows.scales, dtype)
    if not values.isfinite().all():
        raise CheckpointError(f"{weight.name}: values beyond the range of {dtype}")
    return values


def as_stored(rows: Rows, weight: Weight) -> tuple[Tensor, Tensor]:
    """Codes and scales; quantises where the source held plain numbers."""
    if rows.scales is not None:
        return rows.values, rows.scales
    codes, scales = QUANTIZE[_format(weight)](rows.values)
    if (scales.view(torch.uint8) == _E8M0_NAN).any():
        raise CheckpointError(f"{weight.name}: holds NaN or infinity and cannot be quantised")
    return codes, scales


def slice_rows(rows: Rows, weight: Weight, start: int, stop: int) -> Rows:
    """Rows of a weight that is in memory."""
    if rows.scales is None:
        return Rows(rows.values[start:stop], None)
    first, last = weight.scale_rows(start, stop)
    return Rows(rows.values[start:stop], rows.scales[first:last])


def by_name(table: Sequence[TensorSpec]) -> Mapping[str, Weight]:
    """Weights under their released name."""
    return {weight.name: weight for weight in weights_of(table)}


def _format(weight: Weight) -> str:
    assert weight.spec.weight_format is not None, f"{weight.name} is never quantised"
    return weight.spec.weight_format
