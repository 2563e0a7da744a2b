"""Kernel of the compression of a decode step, in one launch. Report §2.3, Eq. (1).

A program must not read a row of the ring that another one writes: it takes the numbers that the
other one stores. The floor is that of an empty launch.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from openv41.ops._dispatch import kernel

COLUMNS = 512  # of a program
MOST = 4096  # tokens, whose rows every program compares


@triton.jit
@no_type_check
def _pool(
    kv,
    gate,
    ring,
    own,
    previous,
    members,
    out,
    tokens,
    width,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    kind = ring.dtype.element_ty
    at = token * width + column
    into = ring + tl.load(own + token) * 2 * width + column
    tl.store(into, tl.load(kv + at, mask=inside, other=0.0).to(kind), mask=inside)
    tl.store(into + width, tl.load(gate + at, mask=inside, other=0.0).to(kind), mask=inside)

    other = tl.arange(0, TOKENS)
    first = tl.load(previous + tl.load(members + 2 * token))
    rows = tl.load(own + other, mask=other < tokens, other=-1)
    new = tl.max(tl.where((rows == first) & (rows >= 0), other, -1), 0).to(tl.int64)
    is_new, is_old = inside & (new >= 0), inside & (new < 0) & (first >= 0)
    at = new * width + column
    kv_new = tl.load(kv + at, mask=is_new, other=0.0).to(kind)
    gate_new = tl.load(gate + at, mask=is_new, other=0.0).to(kind)
    at = first * 2 * width + column
    kv_old = tl.load(ring + at, mask=is_old, other=0.0)
    gate_old = tl.load(ring + at + width, mask=is_old, other=0.0)
    kv_one = tl.where(new >= 0, kv_new, kv_old).to(tl.float32)
    gate_one = tl.where(new >= 0, gate_new, gate_old).to(tl.float32)

    at = (tl.load(members + 2 * token + 1) - tokens) * width + column
    kv_two = tl.load(kv + at, mask=inside, other=0.0)
    gate_two = tl.load(gate + at, mask=inside, other=0.0)
    top = tl.maximum(gate_one, gate_two)
    one, two = tl.exp(gate_one - top), tl.exp(gate_two - top)
    total = one + two
    pooled = kv_one * (one / total) + kv_two * (two / total)
    tl.store(out + token * width + column, pooled, mask=inside)


def _refuse(
    kv: Tensor, gate: Tensor, ring: Tensor, own: Tensor, previous: Tensor, members: Tensor
) -> str | None:
    if {kv.dtype, gate.dtype} != {torch.float32}:
        return f"rows are {kv.dtype} and {gate.dtype}"
    if not ring.is_contiguous():
        return "the ring is not contiguous"
    return f"there are {len(kv)} tokens, more than {MOST}" if len(kv) > MOST else None


@kernel(refuse=_refuse)
@torch.no_grad()
def pool_pending(
    kv: Float[Tensor, "T C"],
    gate: Float[Tensor, "T C"],
    ring: Float[Tensor, "S columns"],
    own: Int[Tensor, " T"],
    previous: Int[Tensor, " T"],
    members: Int[Tensor, "T 2"],
) -> Float[Tensor, "T C"]:
    """A token, or a part of its channels, in a program."""
    tokens, width = kv.shape
    out = torch.empty_like(kv, memory_format=torch.contiguous_format)
    if out.numel():
        columns = min(COLUMNS, triton.next_power_of_2(width))
        _pool[tokens, triton.cdiv(width, columns)](
            *(kv.contiguous(), gate.contiguous(), ring, own.contiguous()),
            *(previous.contiguous(), members.contiguous(), out, tokens, width),
            TOKENS=triton.next_power_of_2(tokens),
            COLUMNS=columns,
            num_warps=4,
        )
    return out
