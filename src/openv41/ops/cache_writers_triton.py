"""One kernel for norm, rotation, rounding and storing of latents. Report §2.4.4.

Floor per row: C values in, C values and the packed row out, 8 bytes per rotated pair; 2.7 kB of
window KV in bfloat16, 5.2 us for 8192 rows at 4.3 TB/s. Each program takes a few rows; a row is
read once and stays in registers.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from openv41.ops._dispatch import kernel

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton's interpreter wants what a kernel calls to be defined before it.

BLOCK = {"fp8": 32, "fp4_e4m3": 16, "mxfp4": 32}
FORMS = {"fp8": 0, "fp4_e4m3": 1, "mxfp4": 2}
ELEMENTS = 2048  # of a program
ROUND = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding it rounds to an integer, ties to even


def _refuse(stored, places, latents, weight, eps, table, form, *, deterministic=False):
    width = latents.shape[-1]
    if deterministic:
        return "deterministic rotation rounds each product"
    if latents.dtype not in (torch.float32, torch.bfloat16):
        return f"latents are {latents.dtype}, the kernel takes float32 and bfloat16"
    if table.dtype != torch.complex64:
        return f"the table is {table.dtype}, the kernel takes complex64"
    if width & (width - 1) or width < 2 * BLOCK[form]:
        return f"rows of {width}, the kernel takes powers of two from {2 * BLOCK[form]}"
    if stored.stride(-1) != 1:
        return "bytes of a stored row are not adjacent"
    return None


@kernel(refuse=_refuse)
def write_latents(
    stored: Tensor,
    places: Tensor,
    latents: Tensor,
    weight: Tensor | None,
    eps: float,
    table: Tensor,
    form: str,
    *,
    deterministic: bool = False,
) -> Tensor:
    """Read each row once, write its bytes and its rounded values."""
    T, C = latents.shape
    latents = latents if latents.stride(-1) == 1 else latents.contiguous()
    values = torch.empty(T, C, dtype=latents.dtype, device=latents.device)
    if T == 0:
        return values
    turns = torch.view_as_real(table.resolve_conj()).contiguous()  # [T, pairs, 2]
    rows = max(1, ELEMENTS // C)
    _write_latents[(triton.cdiv(T, rows),)](
        stored,
        places.contiguous(),
        latents,
        latents if weight is None else weight.contiguous(),
        turns,
        values,
        T,
        stored.stride(0),
        latents.stride(0),
        eps,
        IS_BF16=latents.dtype == torch.bfloat16,
        HAS_NORM=weight is not None,
        PAIRS=table.shape[-1],
        FORM=FORMS[form],
        ROWS=rows,
        BLOCKS=C // BLOCK[form],
        HALF=BLOCK[form] // 2,
        num_warps=4,
    )
    return values


@triton.jit
@no_type_check
def _is_nan(x):
    return x != x  # noqa: PLR0124


@triton.jit
@no_type_check
def _as(x, IS_BF16: tl.constexpr):
    """Round to the dtype of the latents and go on in float32; by bits, as the interpreter can."""
    if IS_BF16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = tl.where(_is_nan(x), x, bits.to(tl.float32, bitcast=True))
    return x


@triton.jit
@no_type_check
def _exp2(exponent):
    """A power of two from its exponent, exactly."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
@no_type_check
def _inverse_root(x):
    """1 / sqrt(x), correctly rounded twice."""
    return tl.div_rn(1.0, tl.sqrt_rn(x))


@triton.jit
@no_type_check
def _round_e4m3(size):
    """Nearest E4M3 number of values from 0 to 448, ties to even."""
    exponent = tl.maximum(size.to(tl.int32, bitcast=True) >> 23, 121) - 127  # at least -6
    eighths = (size * _exp2(3 - exponent) + ROUND) - ROUND
    return (exponent + 6) * 8 + eighths.to(tl.int32), eighths * _exp2(exponent - 3)


@triton.jit
@no_type_check
def _round_e2m1(size):
    """Nearest E2M1 number of values from 0 to 6, ties to even."""
    exponent = tl.maximum(size.to(tl.int32, bitcast=True) >> 23, 127) - 127  # at least 0
    halves = (size * _exp2(1 - exponent) + ROUND) - ROUND
    return exponent * 2 + halves.to(tl.int32), halves * _exp2(exponent - 1)


@triton.jit
@no_type_check
def _power_of_two(amax, has_nan, IS_FP4: tl.constexpr):
    """Byte, value and inverse of the smallest E8M0 scale that fits; NaN if amax is not finite."""
    if IS_FP4:
        amax = tl.maximum(amax, 7.052966104933725e-38)  # 6 * 2**-126
        bits = amax.to(tl.int32, bitcast=True) + 0x3FFFFF
        byte = (bits >> 23) - 2
    else:
        amax = tl.maximum(amax, 1e-4)
        bits = amax.to(tl.int32, bitcast=True) + 0x1FFFFF
        byte = (bits >> 23) - 8
    byte = tl.where(has_nan | ~(amax < float("inf")), 255, tl.maximum(byte, 0))
    value = tl.where(byte == 0, 0x400000, byte << 23).to(tl.float32, bitcast=True)  # 2**-127
    inverse = ((254 - byte) << 23).to(tl.float32, bitcast=True)  # a byte is 252 at most, or NaN's
    has_nan = byte == 255
    return byte, tl.where(has_nan, float("nan"), value), tl.where(has_nan, float("nan"), inverse)


@triton.jit
@no_type_check
def _main_kv_scale(amax, has_nan):
    """Byte and value of the E4M3 scale nearest to amax / 6."""
    wanted = tl.minimum(tl.div_rn(tl.maximum(amax, 0.01171875), 6.0), 448.0)  # 6 * 2**-9
    byte, value = _round_e4m3(wanted)
    return tl.where(has_nan, 0x7F, byte), tl.where(has_nan, float("nan"), value)


@triton.jit
@no_type_check
def _round(quotient, FORM: tl.constexpr):
    """Code and value of elements over the scale of their block."""
    size = tl.abs(quotient)
    if FORM == 0:
        code, value = _round_e4m3(size)
        code = tl.where(_is_nan(size), 0x7F, code)
    else:
        if FORM == 1:
            size = tl.minimum(size, 6.0)
        code, value = _round_e2m1(size)
        code = tl.where(_is_nan(size), 0, code)
    sign_bit: tl.constexpr = 128 if FORM == 0 else 8
    is_negative = quotient.to(tl.int32, bitcast=True) < 0
    value = tl.where(_is_nan(size), size, value)
    # Not -value, which is 0 - value and loses the sign of zero.
    return code | tl.where(is_negative, sign_bit, 0), value * tl.where(is_negative, -1.0, 1.0)


@triton.jit
@no_type_check
def _rotated(even, odd, angle, turned, IS_BF16: tl.constexpr):
    """Turn the pairs that have an angle."""
    real = tl.load(angle, mask=turned, other=1.0)
    imaginary = tl.load(angle + 1, mask=turned, other=0.0)
    turned_even = _as(even * real - odd * imaginary, IS_BF16)
    turned_odd = _as(even * imaginary + odd * real, IS_BF16)
    return tl.where(turned, turned_even, even), tl.where(turned, turned_odd, odd)


@triton.jit
@no_type_check
def _write_latents(
    stored,
    places,
    latents,
    weight,
    turns,
    values,
    T,
    stored_stride,
    latent_stride,
    eps,
    IS_BF16: tl.constexpr,
    HAS_NORM: tl.constexpr,
    PAIRS: tl.constexpr,
    FORM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    HALF: tl.constexpr,
):
    """Rows as [rows, blocks, pairs of a block], the two channels of a pair apart."""
    C: tl.constexpr = BLOCKS * HALF * 2
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    pair = tl.arange(0, BLOCKS)[:, None] * HALF + tl.arange(0, HALF)[None, :]  # [BLOCKS, HALF]
    column = tl.arange(0, C)
    inside = (t < T)[:, None]  # [ROWS, 1]

    at = latents + t[:, None] * latent_stride + column[None]
    loaded = tl.load(at, mask=inside, other=0.0).to(tl.float32)  # [ROWS, C]
    even, odd = tl.split(tl.reshape(loaded, (ROWS, BLOCKS, HALF, 2)))  # [ROWS, BLOCKS, HALF]
    if HAS_NORM:
        squares = tl.sum(tl.sum(even * even + odd * odd, axis=2), axis=1)  # [ROWS]
        inverse = _inverse_root(squares * (1.0 / C) + eps)[:, None, None]
        scales = tl.load(weight + column).to(tl.float32)
        scale_even, scale_odd = tl.split(tl.reshape(scales, (BLOCKS, HALF, 2)))
        even = _as(even * inverse * scale_even[None], IS_BF16)
        odd = _as(odd * inverse * scale_odd[None], IS_BF16)

    turn = pair[None] - (C // 2 - PAIRS)  # [1, BLOCKS, HALF]
    turned = (t < T)[:, None, None] & (turn >= 0)
    angle = turns + (t[:, None, None] * PAIRS + turn) * 2
    even, odd = _rotated(even, odd, angle, turned, IS_BF16)

    amax = tl.maximum(tl.max(tl.abs(even), axis=2), tl.max(tl.abs(odd), axis=2))  # [ROWS, BLOCKS]
    has_nan = tl.max((_is_nan(even) | _is_nan(odd)).to(tl.int32), axis=2) > 0
    if FORM == 1:
        scale_byte, scale = _main_kv_scale(amax, has_nan)
        wide = scale[:, :, None]
        even, odd = tl.div_rn(even, wide), tl.div_rn(odd, wide)
    else:
        scale_byte, scale, inverse_scale = _power_of_two(amax, has_nan, FORM == 2)
        wide = scale[:, :, None]
        even, odd = even * inverse_scale[:, :, None], odd * inverse_scale[:, :, None]
    even_code, even_value = _round(even, FORM)
    odd_code, odd_value = _round(odd, FORM)

    CODES: tl.constexpr = C if FORM == 0 else C // 2
    place = tl.load(places + t, mask=t < T, other=-1).to(tl.int64)
    kept = (place >= 0)[:, None]
    row = stored + place[:, None] * stored_stride
    if FORM == 0:
        codes = tl.reshape(tl.join(even_code, odd_code), (ROWS, CODES))
    else:
        codes = tl.reshape(even_code | (odd_code << 4), (ROWS, CODES))
    tl.store(row + tl.arange(0, CODES)[None], codes.to(tl.uint8), mask=kept)
    tl.store(row + CODES + tl.arange(0, BLOCKS)[None], scale_byte.to(tl.uint8), mask=kept)
    both = tl.reshape(tl.join(even_value * wide, odd_value * wide), (ROWS, C))
    out = values + t[:, None] * C + column[None]
    tl.store(out, both.to(values.dtype.element_ty), mask=inside)
