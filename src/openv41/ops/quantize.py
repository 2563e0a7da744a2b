"""Quantisers of caches, linear inputs and weights. Report §2.4.4.

Every format stores codes and one scale per block, ``value = code * scale``. Elements are E4M3 or
E2M1, rounded to nearest even, saturating, with the sign of zero kept. Scales are powers of two
(E8M0), rounded UP so that nothing saturates, except in the main KV, whose scale is an E4M3 number.

- linear inputs and window KV: E4M3, blocks of 32, E8M0 (``fp8``)
- index queries and keys:      E2M1, blocks of 32, E8M0 (``mxfp4``)
- main KV:                     E2M1, blocks of 16, E4M3 (``fp4_e4m3``)
- weights: E4M3 in 32 x 32 tiles, E2M1 in rows of 32 (experts), E4M3 in rows of 32 (Engram table)

``fake_*`` return the value that unpacking the packed form gives, bit for bit, with a
straight-through gradient. A last block may be short. Two E2M1 codes share a byte, the even column
in the low nibble.

A block that holds NaN has a NaN scale, so all of it reads back as NaN. So does a block with an
infinity under an E8M0 scale; the main KV saturates at 6 * 448 = 2688, infinities included. Finite
input never gives a NaN scale.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from jaxtyping import Float, Shaped, UInt8
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 32
MAIN_KV_BLOCK = 16
E4M3_MAX = 448.0
E2M1_MAX = 6.0
MAIN_KV_MAX = E2M1_MAX * E4M3_MAX
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E8M0_NAN = 255
# code of a non-negative E2M1 value v at index 2 v
_E2M1_CODES = (0, 1, 2, 3, 4, 0, 5, 0, 6, 0, 0, 0, 7)
_EXPONENT_BITS = {
    torch.float32: (torch.int32, 0x7F800000),
    torch.float64: (torch.int64, 0x7FF0000000000000),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Element:
    """An element format and the rule that finds its power-of-two scale."""

    mantissa_bits: int
    min_normal: float
    max_exponent: int  # of the largest value
    max_mantissa: int  # of the largest value, as float32 bits
    floor: float  # smallest block maximum of an activation


_FP8 = _Element(
    mantissa_bits=3,
    min_normal=2.0**-6,
    max_exponent=8,
    max_mantissa=0x600000,
    floor=1e-4,
)
_FP4 = _Element(
    mantissa_bits=1,
    min_normal=1.0,
    max_exponent=2,
    max_mantissa=0x400000,
    floor=E2M1_MAX * 2.0**-126,
)


def quantize_fp8(
    x: Float[Tensor, "*rows D"],
) -> tuple[Float[Tensor, "*rows D"], Shaped[Tensor, "*rows blocks"]]:
    """Round blocks of 32 to E4M3 codes and E8M0 scales: linear inputs, window KV."""
    r, scales = _round_activation(x, _FP8)
    return _unblock(r, x.shape[-1]).float().to(torch.float8_e4m3fn), scales


def dequantize_fp8(
    codes: Float[Tensor, "*rows D"],
    scales: Shaped[Tensor, "*rows blocks"],
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "*rows D"]:
    """Exact values of ``quantize_fp8``."""
    return _rescale(codes, scales, BLOCK, dtype)


def fake_fp8(x: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows D"]:
    """Value of ``x`` after ``quantize_fp8``, straight-through."""
    return _straight_through(x, lambda v: _fake_power_of_two(v, _FP8))


def quantize_mxfp4(
    x: Float[Tensor, "*rows D"],
) -> tuple[UInt8[Tensor, "*rows packed"], Shaped[Tensor, "*rows blocks"]]:
    """Round blocks of 32 to packed E2M1 codes and E8M0 scales: index queries and keys."""
    r, scales = _round_activation(x, _FP4)
    return pack_e2m1(_unblock(r, x.shape[-1])), scales


def dequantize_mxfp4(
    packed: UInt8[Tensor, "*rows packed"],
    scales: Shaped[Tensor, "*rows blocks"],
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "*rows D"]:
    """Exact values of ``quantize_mxfp4``."""
    return _rescale(unpack_e2m1(packed), scales, BLOCK, dtype)


def fake_mxfp4(x: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows D"]:
    """Value of ``x`` after ``quantize_mxfp4``, straight-through."""
    return _straight_through(x, lambda v: _fake_power_of_two(v, _FP4))


def quantize_fp4_e4m3(
    x: Float[Tensor, "*rows D"],
) -> tuple[UInt8[Tensor, "*rows packed"], Shaped[Tensor, "*rows blocks"]]:
    """Round blocks of 16 to packed E2M1 codes and E4M3 scales: main KV."""
    r, scales = _round_main_kv(x)
    return pack_e2m1(_unblock(r, x.shape[-1])), scales


def dequantize_fp4_e4m3(
    packed: UInt8[Tensor, "*rows packed"],
    scales: Shaped[Tensor, "*rows blocks"],
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "*rows D"]:
    """Exact values of ``quantize_fp4_e4m3``."""
    return _rescale(unpack_e2m1(packed), scales, MAIN_KV_BLOCK, dtype)


def fake_fp4_e4m3(x: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows D"]:
    """Value of ``x`` after ``quantize_fp4_e4m3``, straight-through, no gradient past 2688."""
    return _straight_through(x.clamp(-MAIN_KV_MAX, MAIN_KV_MAX), _fake_main_kv)


def quantize_fp8_tiles(
    w: Float[Tensor, "*rows D"],
) -> tuple[Float[Tensor, "*rows D"], Shaped[Tensor, "*tiles blocks"]]:
    """Round 32 x 32 tiles of a weight [..., out, in] to E4M3 codes and E8M0 scales.

    Weights take the smallest power of two that fits, without the floor of activations: values that
    came out of this format go back in unchanged.
    """
    out, width = w.shape[-2:]
    columns = _blocked(_wide(w), BLOCK)  # [.., out, in/32, 32]
    tiles = _blocked(columns.transpose(-3, -1), BLOCK)  # [.., 32, in/32, out/32, 32]
    amax = tiles.abs().amax((-4, -1), keepdim=True)
    scales = _weight_scales(amax, _FP8)
    r = _round_element(tiles / scales.to(tiles.dtype), _FP8)
    codes = _unblock(_unblock(r, out).transpose(-3, -1), width)
    scales = scales.squeeze(-1).squeeze(-3).transpose(-1, -2).contiguous()
    return codes.float().to(torch.float8_e4m3fn), scales


def dequantize_fp8_tiles(
    codes: Float[Tensor, "*rows D"],
    scales: Shaped[Tensor, "*tiles blocks"],
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "*rows D"]:
    """Exact values of ``quantize_fp8_tiles``."""
    rows = torch.arange(codes.shape[-2], device=codes.device) // BLOCK
    scales = scales.view(torch.uint8).index_select(-2, rows).view(scales.dtype)
    return _rescale(codes, scales, BLOCK, dtype)


def quantize_fp4_rows(
    w: Float[Tensor, "*rows D"],
) -> tuple[UInt8[Tensor, "*rows packed"], Shaped[Tensor, "*rows blocks"]]:
    """Round rows of 32 columns to packed E2M1 codes and E8M0 scales: expert weights."""
    r, scales = _round_weight(w, _FP4)
    return pack_e2m1(_unblock(r, w.shape[-1])), scales


def dequantize_fp4_rows(
    packed: UInt8[Tensor, "*rows packed"],
    scales: Shaped[Tensor, "*rows blocks"],
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "*rows D"]:
    """Exact values of ``quantize_fp4_rows``."""
    return dequantize_mxfp4(packed, scales, dtype)


def fake_fp4_rows(w: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows D"]:
    """Value of ``w`` after ``quantize_fp4_rows``, straight-through."""
    return _straight_through(w, _fake_fp4_weight)


def quantize_fp8_rows(
    w: Float[Tensor, "*rows D"],
) -> tuple[Float[Tensor, "*rows D"], Shaped[Tensor, "*rows blocks"]]:
    """Round rows of 32 columns to E4M3 codes and E8M0 scales: Engram table."""
    r, scales = _round_weight(w, _FP8)
    return _unblock(r, w.shape[-1]).float().to(torch.float8_e4m3fn), scales


def dequantize_fp8_rows(
    codes: Float[Tensor, "*rows D"],
    scales: Shaped[Tensor, "*rows blocks"],
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "*rows D"]:
    """Exact values of ``quantize_fp8_rows``."""
    return _rescale(codes, scales, BLOCK, dtype)


def pack_e2m1(values: Float[Tensor, "*rows D"]) -> UInt8[Tensor, "*rows packed"]:
    """Pack values that are E2M1 numbers, two a byte; NaN becomes 0 (its scale is NaN)."""
    assert values.shape[-1] % 2 == 0, f"E2M1 packs pairs, the last dim is {values.shape[-1]}"
    table = _table(_E2M1_CODES, torch.uint8, values.device)
    code = table[(values.abs() * 2).nan_to_num(0.0).int()]
    code |= torch.signbit(values).to(torch.uint8) << 3
    return code[..., 0::2] | code[..., 1::2] << 4


def unpack_e2m1(packed: UInt8[Tensor, "*rows packed"]) -> Float[Tensor, "*rows D"]:
    """Float32 values of packed E2M1 codes."""
    table = _table((*_E2M1, *(-v for v in _E2M1)), torch.float32, packed.device)
    code = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    return table[code.int()]


@cache
def _table(values: tuple[float | int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Constants that are copied to a device once: a CUDA graph cannot hold the copy."""
    with torch.inference_mode(mode=False):
        return torch.tensor(values, dtype=dtype, device=device)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _blocked(x: Tensor, size: int) -> Tensor:
    """Split the last dim into blocks, filling the last one with zeros."""
    if short := -x.shape[-1] % size:
        x = pad(x, (0, short))
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)


def _unblock(x: Tensor, width: int) -> Tensor:
    return x.flatten(-2)[..., :width]


def _round_element(v: Tensor, element: _Element) -> Tensor:
    """Nearest element value, ties to even, NaN stays; overwrites ``v``, which is within range."""
    integers, mask = _EXPONENT_BITS[v.dtype]
    step = (v.view(integers) & mask).view(v.dtype)  # power of two at or below |v|
    step = step.clamp_(min=element.min_normal).mul_(0.5**element.mantissa_bits)
    return v.div_(step).round_().mul_(step)


def _power_of_two(amax: Tensor, element: _Element) -> Tensor:
    """Smallest E8M0 scale with ``amax <= max * scale``; NaN where ``amax`` is not finite.

    Reads the exponent off the float32 bits; adding to the mantissa carries into the exponent where
    ``amax`` lies above ``max`` in its binade.
    """
    bits = amax.float().view(torch.int32) + (0x7FFFFF - element.max_mantissa)
    byte = ((bits >> 23) - element.max_exponent).clamp_(min=0)
    byte = byte.masked_fill_(~(amax < torch.inf), _E8M0_NAN)
    return byte.to(torch.uint8).view(torch.float8_e8m0fnu)


def _weight_scales(amax: Tensor, element: _Element) -> Tensor:
    return _power_of_two(amax.masked_fill(amax == 0, element.floor), element)


def _round_activation(x: Tensor, element: _Element) -> tuple[Tensor, Tensor]:
    blocks = _blocked(_wide(x), BLOCK)
    amax = blocks.abs().amax(-1, keepdim=True).clamp_(min=element.floor)
    scales = _power_of_two(amax, element)
    return _round_element(blocks / scales.to(blocks.dtype), element), scales.squeeze(-1)


def _round_weight(w: Tensor, element: _Element) -> tuple[Tensor, Tensor]:
    blocks = _blocked(_wide(w), BLOCK)
    scales = _weight_scales(blocks.abs().amax(-1, keepdim=True), element)
    return _round_element(blocks / scales.to(blocks.dtype), element), scales.squeeze(-1)


def _round_main_kv(x: Tensor) -> tuple[Tensor, Tensor]:
    blocks = _blocked(_wide(x), MAIN_KV_BLOCK)
    amax = blocks.abs().amax(-1, keepdim=True).clamp_(min=E2M1_MAX * 2.0**-9)
    scales = (amax.float() / E2M1_MAX).clamp_(max=E4M3_MAX).to(torch.float8_e4m3fn)
    v = (blocks / scales.to(blocks.dtype)).clamp_(-E2M1_MAX, E2M1_MAX)
    return _round_element(v, _FP4), scales.squeeze(-1)


def _rescale(elements: Tensor, scales: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """Multiply elements by their block's scale in at least float32."""
    wide = torch.promote_types(dtype, torch.float32)
    blocks = _blocked(elements.to(wide), size)
    return _unblock(blocks * scales.to(wide).unsqueeze(-1), elements.shape[-1]).to(dtype)


def _fake_power_of_two(x: Tensor, element: _Element) -> Tensor:
    r, scales = _round_activation(x, element)
    return _unblock(r.mul_(scales.to(r.dtype).unsqueeze(-1)), x.shape[-1]).to(x.dtype)


def _fake_fp4_weight(w: Tensor) -> Tensor:
    r, scales = _round_weight(w, _FP4)
    return _unblock(r.mul_(scales.to(r.dtype).unsqueeze(-1)), w.shape[-1]).to(w.dtype)


def _fake_main_kv(x: Tensor) -> Tensor:
    r, scales = _round_main_kv(x)
    return _unblock(r.mul_(scales.to(r.dtype).unsqueeze(-1)), x.shape[-1]).to(x.dtype)


class _StraightThrough(torch.autograd.Function):
    """Forward ``fake(x)``, backward the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fake: Callable[[Tensor], Tensor]) -> Tensor:  # noqa: ANN401
        return fake(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        return grad, None


def _straight_through(x: Tensor, fake: Callable[[Tensor], Tensor]) -> Tensor:
    result: Tensor = _StraightThrough.apply(x, fake)
    return result
