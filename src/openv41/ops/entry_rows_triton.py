"""Kernels that look up blocks or pages of what was chosen, in one launch each. Report §2.3.2.

Floors are those of an empty launch: a decode step looks up 512 entries of each token.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Int
from torch import Tensor

from openv41.ops._dispatch import kernel

COLUMNS = 512  # of a program


@triton.jit
@no_type_check
def _look_up(chosen, table, out, width, size, chosen_stride, table_stride, COLUMNS: tl.constexpr):
    """``table[chosen // size] * size + chosen % size`` of each token; -1 stays."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    at = tl.load(chosen + token * chosen_stride + column, mask=inside, other=-1).to(tl.int64)
    known = inside & (at >= 0)
    part = tl.load(table + token * table_stride + at // size, mask=known, other=0).to(tl.int64)
    found = tl.where(known, part * size + at % size, -1)
    tl.store(out + token * width + column, found, mask=inside)


def look_up(chosen: Tensor, table: Tensor, size: int) -> Int[Tensor, "T K"]:
    """All tokens."""
    tokens, width = chosen.shape
    chosen = chosen if chosen.stride(1) == 1 else chosen.contiguous()
    table = table if table.stride(1) == 1 else table.contiguous()
    out = torch.empty(tokens, width, dtype=torch.int64, device=chosen.device)
    if out.numel():
        columns = min(COLUMNS, max(32, triton.next_power_of_2(width)))
        _look_up[tokens, triton.cdiv(width, columns)](
            *(chosen, table, out, width, size, chosen.stride(0), table.stride(0)),
            COLUMNS=columns,
            num_warps=4,
        )
    return out


@kernel(refuse=lambda *_: None)
def pool_entries(
    places: Int[Tensor, "T K"], pools: Int[Tensor, "T blocks"], block_size: int
) -> Int[Tensor, "T K"]:
    """A token's places in a program."""
    return look_up(places, pools, block_size)


@kernel(refuse=lambda *_: None)
def page_rows(
    entries: Int[Tensor, "T K"], table: Int[Tensor, "T pages"], per_page: int
) -> Int[Tensor, "T K"]:
    """A token's entries in a program."""
    return look_up(entries, table, per_page)
