"""Rotary position embedding on the last channels, with YaRN for compressed layers. Report §2.3."""

import math

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor

from openv41.ops._dispatch import op, wants_gradient
from openv41.ops.precision import WIDE, widened


def rope_frequencies(rope_dim: int, theta: float) -> Float[Tensor, " pairs"]:
    """Angle per position of each channel pair: theta^(-2k / R), in float32."""
    exponents = torch.arange(0, rope_dim, 2, dtype=torch.float32) / rope_dim
    return 1.0 / theta**exponents


def yarn_frequencies(
    rope_dim: int,
    theta: float,
    *,
    factor: float,
    beta_fast: float,
    beta_slow: float,
    original_max_position: int,
) -> Float[Tensor, " pairs"]:
    """Divide slow frequencies by ``factor``, keep fast ones, blend linearly between them.

    Applied at every length and without an attention factor.
    """

    def correction(rotations: float) -> float:
        span = original_max_position / (rotations * 2 * math.pi)
        return rope_dim * math.log(span) / (2 * math.log(theta))

    low = max(math.floor(correction(beta_fast)), 0)
    high = min(math.ceil(correction(beta_slow)), rope_dim - 1)
    steps = torch.arange(rope_dim // 2, dtype=torch.float32)
    ramp = ((steps - low) / max(high - low, 1e-3)).clamp(0, 1)
    plain = rope_frequencies(rope_dim, theta)
    return plain / factor * ramp + plain * (1 - ramp)


def rope_table(
    positions: Int[Tensor, " T"], frequencies: Float[Tensor, " pairs"]
) -> Complex[Tensor, "T pairs"]:
    """Unit complex number of each position and pair; angles are float32 products."""
    angles = torch.outer(positions.to(torch.float32), frequencies)
    return torch.polar(torch.ones_like(angles), angles)


def inverse_table(table: Complex[Tensor, "T pairs"]) -> Complex[Tensor, "T pairs"]:
    """The table that rotates back."""
    return table.conj().resolve_conj()


@op
def rotate(
    x: Float[Tensor, "T ... C"],
    table: Complex[Tensor, "T pairs"],
    *,
    deterministic: bool = False,
) -> Float[Tensor, "T ... C"]:
    """Rotate the last R channels of each row, as adjacent pairs.

    Computed in at least float32, rounded once to the dtype of ``x``. Stock complex products fuse
    roundings depending on the place in the array; ``deterministic`` rounds each real product.
    """
    width = 2 * table.shape[-1]
    is_inference = not (deterministic or wants_gradient(x))
    if is_inference and x.dtype in WIDE and x.shape[-1] % 2 == 0:
        return _rotated_copy(x, table)
    head, tail = x.split([x.shape[-1] - width, width], dim=-1)
    tail = widened(tail).contiguous()
    pairs = torch.view_as_complex(tail.unflatten(-1, (-1, 2)))  # [T, ..., R/2]
    turn = table.to(pairs.dtype)
    turn = turn.reshape(len(x), *[1] * (x.ndim - 2), turn.shape[-1])
    turned = _real_product(pairs, turn) if deterministic else pairs * turn
    return torch.cat([head, torch.view_as_real(turned).flatten(-2).to(x.dtype)], dim=-1)


def _rotated_copy(
    x: Float[Tensor, "T ... C"], turn: Complex[Tensor, "T pairs"]
) -> Float[Tensor, "T ... C"]:
    """Rotate inside one copy: half the calls, which is what few tokens cost."""
    out = x.clone(memory_format=torch.contiguous_format)
    pairs = torch.view_as_complex(out.view(*x.shape[:-1], x.shape[-1] // 2, 2))
    num = turn.shape[-1]
    if num < pairs.shape[-1]:
        pairs = pairs.narrow(-1, pairs.shape[-1] - num, num)
    pairs.mul_(turn if x.ndim == 2 else turn.view(turn.shape[0], *[1] * (x.ndim - 2), num))
    return out


def _real_product(a: Complex[Tensor, "..."], b: Complex[Tensor, "..."]) -> Complex[Tensor, "..."]:
    return torch.complex(a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real)
