"""Kernels of the tables of a decode step, in one launch each. Report §2.3.1.

Floors are those of an empty launch.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Int
from torch import Tensor

from openv41.ops._dispatch import kernel
from openv41.ops.decode_rows import Groups

BLOCK = 256  # rows of a program


@triton.jit
@no_type_check
def _ring_rows(places, positions, own, rows, reach, size, REACH: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    step = tl.arange(0, REACH)
    position = tl.load(positions + token)
    first = tl.load(places + token) * size
    at = position + 1 - reach + step
    row = tl.where(at < 0, -1, first + (at + (at < 0).to(tl.int64) * reach) % size)
    tl.store(rows + token * reach + step, row, mask=step < reach)
    tl.store(own + token, first + position % size)


@triton.jit
@no_type_check
def _group_rows(
    places,
    positions,
    visible,
    first_rows,
    first_positions,
    members,
    tokens,
    width,
    RATIO: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    inside, has_next = token < tokens, token + 1 < tokens
    position = tl.load(positions + token, mask=inside, other=0)
    place = tl.load(places + token, mask=inside, other=0)
    follows = tl.load(positions + token + 1, mask=has_next, other=-1) == position + 1
    follows = follows & (tl.load(places + token + 1, mask=has_next, other=-1) == place)
    last = token
    if RATIO > 1:
        last = token + (follows & (position % RATIO == 0)).to(tl.int64)
    tl.store(visible + token, (position + 1) // RATIO, mask=inside)
    tl.store(first_rows + token, token * width, mask=inside)
    tl.store(first_positions + token, position // RATIO * RATIO, mask=inside)
    for part in tl.static_range(RATIO):
        tl.store(members + token * RATIO + part, last + (2 - RATIO + part) * tokens, mask=inside)


def _refuse(places: Tensor, positions: Tensor, *_: int) -> str | None:
    wrong = {t.dtype for t in (places, positions)} - {torch.int64}
    return f"rows are described by {wrong.pop()}, not int64" if wrong else None


@kernel(refuse=_refuse)
def ring_rows(
    places: Int[Tensor, " T"], positions: Int[Tensor, " T"], reach: int, size: int
) -> tuple[Int[Tensor, " T"], Int[Tensor, "T reach"]]:
    """A row in a program."""
    own, rows = torch.empty_like(places), places.new_empty(len(places), reach)
    if len(places):
        _ring_rows[(len(places),)](
            *(places.contiguous(), positions.contiguous(), own, rows, reach, size),
            REACH=triton.next_power_of_2(reach),
            num_warps=1 if reach <= 32 else 4,
        )
    return own, rows


@kernel(refuse=_refuse)
def group_rows(
    places: Int[Tensor, " T"], positions: Int[Tensor, " T"], ratio: int, width: int
) -> Groups:
    """Many rows in a program."""
    tokens = len(places)
    visible, rows, first = (torch.empty_like(places) for _ in range(3))
    found = Groups(visible, rows, first, places.new_empty(tokens, ratio))
    if tokens:
        _group_rows[(triton.cdiv(tokens, BLOCK),)](
            *(places.contiguous(), positions.contiguous(), *found, tokens, width),
            RATIO=ratio,
            BLOCK=BLOCK,
            num_warps=4,
        )
    return found
