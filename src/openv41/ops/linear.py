"""Matrix products of the linear layers. Report §2.4.4."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from openv41.config import Rounding
from openv41.ops._dispatch import op, wants_gradient
from openv41.ops.deterministic import fixed_product
from openv41.ops.precision import WIDE, cast, widened
from openv41.ops.quantize import dequantize_fp8, fake_fp8, quantize_fp8


@op
def linear(
    x: Float[Tensor, "... D"],
    weight: Float[Tensor, "F D"],
    bias: Float[Tensor, " F"] | None = None,
    *,
    deterministic: bool = False,
) -> Float[Tensor, "... F"]:
    """Multiply in the dtype of ``x``: x @ weight^T + bias.

    Stock matrix products change their summation with the number of rows. ``deterministic`` runs on
    tiles of one shape, so that a row's result depends on that row alone.
    """
    if not deterministic:
        return F.linear(x, cast(weight, x.dtype), None if bias is None else cast(bias, x.dtype))
    out = fixed_product(x.flatten(0, -2), weight.to(x.dtype)).view(*x.shape[:-1], len(weight))
    return out if bias is None else out + bias.to(x.dtype)


def wide_linear(
    x: Float[Tensor, "... D"], weight: Float[Tensor, "F D"], *, deterministic: bool = False
) -> Float[Tensor, "... F"]:
    """X @ weight^T in at least float32.

    Numbers that are narrow on a GPU need no wide copy: their products are exact in float32.
    """
    narrow = x.dtype not in WIDE and x.dtype == weight.dtype and x.is_cuda and x.ndim == 2
    if narrow and not (deterministic or wants_gradient(x, weight)):
        return torch.mm(x, weight.mT, out_dtype=torch.float32)
    return linear(widened(x), weight, deterministic=deterministic)


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
    inputs = rounded_input(x, rounding)
    return cast(linear(inputs, weight, deterministic=deterministic), x.dtype)


def rounded_input(x: Float[Tensor, "... D"], rounding: Rounding) -> Float[Tensor, "... D"]:
    """What ``quantized_linear`` multiplies: in float32 where it goes through stored codes."""
    if rounding == "off":
        return x
    if rounding == "fake":
        return fake_fp8(x)
    codes, scales = quantize_fp8(x)
    return dequantize_fp8(codes, scales, torch.float32)
