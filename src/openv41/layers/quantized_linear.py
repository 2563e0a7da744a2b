"""Linear layers and tables whose weight may stay in its stored FP8 or FP4 form. Report §2.4.4."""

from typing import Literal, Unpack

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from openv41 import ops
from openv41.config import NumericsConfig
from openv41.layers.factory import Factory
from openv41.ops import quantize

WeightFormat = Literal["fp8", "fp4", "fp8_rows"]
DEQUANTIZE = {
    "fp8": quantize.dequantize_fp8_tiles,
    "fp4": quantize.dequantize_fp4_rows,
    "fp8_rows": quantize.dequantize_fp8_rows,
}


class QuantizedWeight(nn.Module):
    """A weight, either a float parameter or the codes and scales of a checkpoint."""

    codes: Tensor
    scales: Tensor

    def __init__(
        self,
        *shape: int,
        weight_format: WeightFormat,
        **made: Unpack[Factory],
    ) -> None:
        super().__init__()
        self.weight_format = weight_format
        self.weight: nn.Parameter | None = nn.Parameter(torch.empty(*shape, **made))
        self.update: nn.Module | None = None  # gives what is added to the weight: train/lora.py

    @property
    def is_stored(self) -> bool:
        """Whether the weight is kept as codes and scales."""
        return self.weight is None

    def store(self, codes: Tensor, scales: Tensor) -> None:
        """Keep these codes and scales instead of a float weight."""
        self.weight = None
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)

    def value(self, dtype: torch.dtype) -> Float[Tensor, "..."]:
        """The weight, dequantised exactly where it is stored as codes, with its update."""
        weight: Tensor | None = self.weight
        if weight is None:
            weight = DEQUANTIZE[self.weight_format](self.codes, self.scales, dtype)
        return weight if self.update is None else weight + self.update()

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        """Move codes and scales, but never cast them."""
        if self.is_stored:
            device = fn(torch.empty(0, device=self.codes.device)).device
            self.store(self.codes.to(device), self.scales.to(device))
            return self
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]


class QuantizedLinear(QuantizedWeight):
    """y = W x without bias; the input may be rounded to FP8, the weight be FP8 or FP4."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        numerics: NumericsConfig,
        *,
        weight_format: WeightFormat = "fp8",
        **made: Unpack[Factory],
    ) -> None:
        super().__init__(out_features, in_features, weight_format=weight_format, **made)
        self.numerics = numerics

    def forward(self, x: Float[Tensor, "rows inputs"]) -> Float[Tensor, "rows outputs"]:
        """Multiply, rounding the input as the numerics say."""
        return ops.quantized_linear(
            x,
            self.value(x.dtype),
            self.numerics.linear_input,
            deterministic=self.numerics.deterministic,
        )


class QuantizedTable(QuantizedWeight):
    """An embedding table that is read by rows."""

    def forward(
        self, rows: Int[Tensor, "T lookups"], dtype: torch.dtype
    ) -> Float[Tensor, "T lookups width"]:
        """Look rows up, as values of ``dtype``."""
        if self.weight is not None:
            return nn.functional.embedding(rows, self.weight).to(dtype)
        flat = rows.flatten()
        codes = self.codes.view(torch.uint8).index_select(0, flat).view(self.codes.dtype)
        scales = self.scales.view(torch.uint8).index_select(0, flat).view(self.scales.dtype)
        values = quantize.dequantize_fp8_rows(codes, scales, dtype)
        return values.view(*rows.shape, values.shape[-1])


class Linear(nn.Module):
    """y = W x, plus a bias if it has one; never quantised."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        numerics: NumericsConfig,
        *,
        bias: bool = False,
        **made: Unpack[Factory],
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, **made))
        self.bias = nn.Parameter(torch.empty(out_features, **made)) if bias else None
        self.update: nn.Module | None = None  # likewise
        self.numerics = numerics

    def value(self) -> Float[Tensor, "outputs inputs"]:
        """The weight with its update."""
        return self.weight if self.update is None else self.weight + self.update()

    def forward(self, x: Float[Tensor, "... inputs"]) -> Float[Tensor, "... outputs"]:
        """Multiply in the dtype of ``x``."""
        deterministic = self.numerics.deterministic
        return ops.linear(x, self.value(), self.bias, deterministic=deterministic)

    def wide(self, x: Float[Tensor, "T inputs"]) -> Float[Tensor, "T outputs"]:
        """Multiply in at least float32, without the bias."""
        return ops.wide_linear(x, self.value(), deterministic=self.numerics.deterministic)


class RMSNorm(nn.Module):
    """RMS normalisation with a weight, computed in float32. Report §2.3."""

    def __init__(
        self,
        dim: int,
        eps: float,
        **made: Unpack[Factory],
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim, **made))
        self.eps = eps

    def forward(self, x: Float[Tensor, "... width"]) -> Float[Tensor, "... width"]:
        """Normalise the last dim."""
        return ops.rms_norm(x, self.weight, self.eps)
