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
ELEMENTS, WARPS = 512, 1  # of a program: the fastest of those in the benchmark
WIDEST = 4096
ROUND = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding it rounds to an integer, ties to even
ROUND_HALF = tl.constexpr(6291456.0)  # 1.5 * 2**22: to a multiple of 1/2
INFINITY = tl.constexpr(0x7F800000)  # bits; those of NaN are larger


def _refuse(stored, places, latents, weight, eps, table, form, *, deterministic=False):
    width = latents.shape[-1]
    if deterministic:
        return "deterministic rotation rounds each product"
    if latents.dtype not in (torch.float32, torch.bfloat16):
        return f"latents are {latents.dtype}, the kernel takes float32 and bfloat16"
    if table.dtype != torch.complex64:
        return f"the table is {table.dtype}, the kernel takes complex64"
    if width & (width - 1) or not 16 <= width <= WIDEST:
        return f"rows of {width}, the kernel takes powers of two from 16 to {WIDEST}"
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
    return launch(stored, places, latents, weight, eps, table, form)


def launch(
    stored: Tensor,
    places: Tensor,
    latents: Tensor,
    weight: Tensor | None,
    eps: float,
    table: Tensor,
    form: str,
    *,
    elements: int = ELEMENTS,
    warps: int = WARPS,
) -> Tensor:
    """Start the kernel with so many elements and warps per program."""
    T, C = latents.shape
    latents = latents if latents.stride(-1) == 1 else latents.contiguous()
    values = torch.empty(T, C, dtype=latents.dtype, device=latents.device)
    if T == 0:
        return values
    rows, block = max(1, elements // C), min(BLOCK[form], C)
    _write_latents[(triton.cdiv(T, rows),)](
        stored,
        places.contiguous(),
        latents,
        latents if weight is None else weight.contiguous(),
        torch.view_as_real(table.resolve_conj()).contiguous(),  # [T, pairs, 2]
        values,
        T,
        stored.stride(0),
        latents.stride(0),
        eps,
        ON_GPU=latents.is_cuda,
        IS_BF16=latents.dtype == torch.bfloat16,
        HAS_NORM=weight is not None,
        PAIRS=table.shape[-1],
        FORM=FORMS[form],
        ROWS=rows,
        BLOCKS=C // block,
        HALF=block // 2,
        num_warps=warps,
    )
    return values


@triton.jit
@no_type_check
def _bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
@no_type_check
def _value(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
@no_type_check
def _as(x, IS_BF16: tl.constexpr, ON_GPU: tl.constexpr):
    """Round to the dtype of the latents and go on in float32; by bits where the cast truncates."""
    if IS_BF16:
        if ON_GPU:
            x = x.to(tl.bfloat16).to(tl.float32)
        else:
            bits = x.to(tl.uint32, bitcast=True)
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
            is_nan = (_bits(x) & 0x7FFFFFFF) > INFINITY
            x = tl.where(is_nan, x, _value(bits))
    return x


@triton.jit
@no_type_check
def _e4m3(x, ON_GPU: tl.constexpr):
    """Code and value of the nearest E4M3 number, ties to even; of a NaN the value is NaN."""
    if ON_GPU:
        rounded = x.to(tl.float8e4nv)
        code, value = rounded.to(tl.uint8, bitcast=True).to(tl.int32), rounded.to(tl.float32)
    else:
        size = tl.abs(x)
        exponent = tl.maximum(_bits(size) >> 23, 121) - 127  # at least -6
        eighths = (size * _value((130 - exponent) << 23) + ROUND) - ROUND
        code = (exponent + 6) * 8 + eighths.to(tl.int32)
        value = eighths * _value((124 + exponent) << 23)
        is_nan = _bits(size) > INFINITY
        code = tl.where(is_nan, 0x7F, code) | ((_bits(x) >> 24) & 128)
        value = _value(_bits(tl.where(is_nan, size, value)) | (_bits(x) & -0x80000000))
    return code, value


@triton.jit
@no_type_check
def _e2m1(size, sign):
    """Code and value of the nearest E2M1 number, ties to even; ``sign`` is a bit 31."""
    power = tl.maximum(_value(_bits(size) & INFINITY), 1.0)  # of two, at or below the size
    add = power * ROUND_HALF
    value = (size + add) - add
    code = tl.maximum((_bits(value) >> 22) - 252, (value > 0).to(tl.int32))
    return (code & 7) | ((sign >> 28) & 8), _value(_bits(value) | sign)


@triton.jit
@no_type_check
def _power_of_two(amax, IS_FP4: tl.constexpr):
    """Byte, value and inverse of the smallest E8M0 scale; NaN where amax (bits) is not finite."""
    is_finite = amax < INFINITY
    if IS_FP4:
        bits = tl.maximum(amax, 0x01C00000) + 0x3FFFFF  # 6 * 2**-126
        byte = (bits >> 23) - 2
    else:
        bits = tl.maximum(amax, 0x38D1B717) + 0x1FFFFF  # 1e-4
        byte = (bits >> 23) - 8
    byte = tl.maximum(byte, 0)
    value = _value(tl.where(byte == 0, 0x400000, byte << 23))  # the first is 2**-127
    nan = float("nan")
    inverse = _value((254 - byte) << 23)
    return (
        tl.where(is_finite, byte, 255),
        tl.where(is_finite, value, nan),
        tl.where(is_finite, inverse, nan),
    )


@triton.jit
@no_type_check
def _main_kv_scale(amax, ON_GPU: tl.constexpr):
    """Byte and value of the E4M3 scale nearest to amax (bits) / 6."""
    is_nan = amax > INFINITY
    size = _value(tl.minimum(tl.maximum(amax, 0x3C400000), INFINITY))  # 6 * 2**-9
    byte, value = _e4m3(tl.minimum(tl.div_rn(size, 6.0), 448.0), ON_GPU)
    return tl.where(is_nan, 0x7F, byte), tl.where(is_nan, float("nan"), value)


@triton.jit
@no_type_check
def _quotient(size, scale, inverse, ON_GPU: tl.constexpr):
    """The quotient, correctly rounded, as the inverse of the scale is."""
    if ON_GPU:  # one correction; neither operand is near the ends of the range
        guess = size * inverse
        quotient = tl.fma(tl.fma(-guess, scale, size), inverse, guess)
    else:
        quotient = tl.div_rn(size, scale)
    return quotient


@triton.jit
@no_type_check
def _main_kv(x, scale, inverse, ON_GPU: tl.constexpr):
    """Code and value of elements of main KV, which saturates."""
    bits = _bits(x)
    size = tl.minimum(_value(bits & 0x7FFFFFFF), 3.0e38)
    quotient = tl.minimum(_quotient(size, scale, inverse, ON_GPU), 6.0)
    return _e2m1(quotient, bits & -0x80000000)


@triton.jit
@no_type_check
def _index_key(x, inverse):
    """Code and value of elements of an index key."""
    bits = _bits(x)
    return _e2m1(_value(bits & 0x7FFFFFFF) * inverse, bits & -0x80000000)


@triton.jit
@no_type_check
def _packed(even, odd, FORM: tl.constexpr, ON_GPU: tl.constexpr):
    """Scale byte and scale of each block, codes and unscaled values of both channels of a pair."""
    size = tl.maximum(_bits(even) & 0x7FFFFFFF, _bits(odd) & 0x7FFFFFFF)
    amax = tl.max(size, axis=2)  # bits [ROWS, BLOCKS]: sizes in their order, NaN largest
    if FORM == 1:
        byte, scale = _main_kv_scale(amax, ON_GPU)
        inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)[:, :, None]
        even_code, even_value = _main_kv(even, scale[:, :, None], inverse, ON_GPU)
        odd_code, odd_value = _main_kv(odd, scale[:, :, None], inverse, ON_GPU)
    else:
        byte, scale, inverse = _power_of_two(amax, FORM == 2)
        inverse = inverse[:, :, None]
        if FORM == 0:
            even_code, even_value = _e4m3(even * inverse, ON_GPU)
            odd_code, odd_value = _e4m3(odd * inverse, ON_GPU)
        else:
            even_code, even_value = _index_key(even, inverse)
            odd_code, odd_value = _index_key(odd, inverse)
    wide = scale[:, :, None]
    return byte, even_code, odd_code, even_value * wide, odd_value * wide


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
    ON_GPU: tl.constexpr,
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
    CODES: tl.constexpr = C if FORM == 0 else C // 2
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, C)
    inside = (t < T)[:, None]
    at = latents + t[:, None] * latent_stride + column[None]
    loaded = tl.load(at, mask=inside, other=0.0)
    place = tl.load(places + t, mask=t < T, other=-1).to(tl.int64)
    pair = tl.arange(0, BLOCKS)[:, None] * HALF + tl.arange(0, HALF)[None, :]
    turn = pair[None] - (C // 2 - PAIRS)
    turned = (t < T)[:, None, None] & (turn >= 0)
    angle = turns + (t[:, None, None] * PAIRS + turn) * 2
    real = tl.load(angle, mask=turned, other=1.0)
    imaginary = tl.load(angle + 1, mask=turned, other=0.0)

    wide = tl.reshape(loaded.to(tl.float32), (ROWS, BLOCKS, HALF, 2))
    even, odd = tl.split(wide)
    if HAS_NORM:
        scales = tl.load(weight + column).to(tl.float32)
        scale_even, scale_odd = tl.split(tl.reshape(scales, (BLOCKS, HALF, 2)))
        squares = tl.sum(tl.sum(even * even + odd * odd, axis=2), axis=1)
        inverse = tl.div_rn(1.0, tl.sqrt_rn(squares * (1.0 / C) + eps))[:, None, None]
        even = _as(even * inverse * scale_even[None], IS_BF16, ON_GPU)
        odd = _as(odd * inverse * scale_odd[None], IS_BF16, ON_GPU)
    turned_even = _as(even * real - odd * imaginary, IS_BF16, ON_GPU)
    turned_odd = _as(even * imaginary + odd * real, IS_BF16, ON_GPU)
    even = tl.where(turned, turned_even, even)
    odd = tl.where(turned, turned_odd, odd)

    byte, even_code, odd_code, even_value, odd_value = _packed(even, odd, FORM, ON_GPU)
    kept = (place >= 0)[:, None]
    row = stored + place[:, None] * stored_stride
    codes = tl.join(even_code, odd_code) if FORM == 0 else even_code | (odd_code << 4)
    codes = tl.reshape(codes.to(tl.uint8), (ROWS, CODES))
    tl.store(row + tl.arange(0, CODES)[None], codes, mask=kept)
    tl.store(row + CODES + tl.arange(0, BLOCKS)[None], byte.to(tl.uint8), mask=kept)
    both = tl.join(even_value, odd_value).to(values.dtype.element_ty)
    out = values + t[:, None] * C + column[None]
    tl.store(out, tl.reshape(both, (ROWS, C)), mask=inside)
