"""Rounding points of the forward, by the numerics' name. Report §2.4.4."""

from collections.abc import Callable

from torch import Tensor

from openv41.config import NumericsConfig, Rounding
from openv41.ops import quantize


def _round(
    x: Tensor,
    rounding: Rounding,
    fake: Callable[[Tensor], Tensor],
    exact: Callable[[Tensor], Tensor],
) -> Tensor:
    return x if rounding == "off" else fake(x) if rounding == "fake" else exact(x)


def round_window_kv(x: Tensor, numerics: NumericsConfig) -> Tensor:
    """FP8 in groups of 32, rotary channels included."""
    return _round(
        x,
        numerics.window_kv,
        quantize.fake_fp8,
        lambda v: quantize.dequantize_fp8(*quantize.quantize_fp8(v), dtype=v.dtype),
    )


def round_main_kv(x: Tensor, numerics: NumericsConfig) -> Tensor:
    """FP4 with an E4M3 scale per 16."""
    return _round(
        x,
        numerics.main_kv,
        quantize.fake_fp4_e4m3,
        lambda v: quantize.dequantize_fp4_e4m3(*quantize.quantize_fp4_e4m3(v), dtype=v.dtype),
    )


def round_expert_weight(w: Tensor, numerics: NumericsConfig) -> Tensor:
    """FP4 with a power-of-two scale per 32 columns, as the released checkpoint has it."""
    return _round(
        w,
        numerics.expert_weights,
        quantize.fake_fp4_rows,
        lambda v: quantize.dequantize_fp4_rows(*quantize.quantize_fp4_rows(v), dtype=v.dtype),
    )


def round_index(x: Tensor, numerics: NumericsConfig) -> Tensor:
    """MXFP4: FP4 with a power-of-two scale per 32."""
    return _round(
        x,
        numerics.index,
        quantize.fake_mxfp4,
        lambda v: quantize.dequantize_mxfp4(*quantize.quantize_mxfp4(v), dtype=v.dtype),
    )
