"""The feed-forward of a few tokens in three launches, which dominate it. Report §2.1.1.

The shared expert is one more expert, of all tokens: its tiles come first. Up: gate and up of a tile
of rows side by side, activated before they are stored. Down: the product with the third weight.
Then each token's rows are summed in the order of its choices, the shared one last. A product reads
each used weight once; 8 tokens of 384 experts of 5120 x 2304 are 3.5 GB, 0.8 ms.
"""

from typing import NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from openv41.config import Rounding
from openv41.ops._dispatch import kernel, wants_gradient
from openv41.ops.expert_mixture import Weights, composed_mixture
from openv41.ops.grouped_linear_triton import DTYPES, MOST_EXPERTS, _find
from openv41.ops.routed import Routed
from openv41.ops.swiglu_triton import _clamped

FEW = 32  # rows of an expert, on average, up to which tiles are of 16 rows
COLUMNS = 1024  # of a token, that a program sums


class Tiles(NamedTuple):
    """Sides of the tiles of a product, and how a program runs."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int


@triton.jit
@no_type_check
def _tile(counts, tokens, experts, own, across, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """Expert of a program's rows (-1: the shared one), the first and the last + 1."""
    tile = tl.program_id(0) // across
    expert, first, stop = _find(counts, experts, tl.maximum(tile - own, 0), EXPERTS, ROWS)
    is_own = tile < own
    expert = tl.where(is_own, -1, expert)
    return expert, tl.where(is_own, tile * ROWS, first), tl.where(is_own, tokens, stop)


@triton.jit
@no_type_check
def _up(
    x,
    order,
    weights,
    counts,
    gate,
    up,
    own_gate,
    own_up,
    hidden,
    tokens,
    experts,
    inner,
    columns,
    own,
    limit,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    WIDE: tl.constexpr,
):
    across = tl.cdiv(columns, COLUMNS)
    expert, first, stop = _tile(counts, tokens, experts, own, across, EXPERTS, ROWS)
    if expert >= experts:
        return
    row = first + tl.arange(0, ROWS)
    is_row = row < stop
    if expert < 0:
        left, right = own_gate, own_up
        token = row.to(tl.int64)
        into = token + tokens * TOP_K
        share = tl.full((ROWS,), 1.0, tl.float32)
    else:
        start = expert.to(tl.int64) * columns * inner
        left, right = gate + start, up + start
        pair = tl.load(order + row, mask=is_row, other=0)
        token = pair // TOP_K
        into = row.to(tl.int64)
        share = tl.load(weights + pair, mask=is_row, other=0.0).to(tl.float32)
    column = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < columns
    depth = tl.arange(0, INNER)
    rows = x + token[:, None] * inner + depth[None, :]
    place = column[None, :].to(tl.int64) * inner + depth[:, None]
    first_sum = tl.zeros((ROWS, COLUMNS), tl.float32)
    second_sum = tl.zeros((ROWS, COLUMNS), tl.float32)
    for begin in range(0, inner, INNER):
        is_inner = depth < inner - begin
        a = tl.load(rows + begin, mask=is_row[:, None] & is_inner[None, :], other=0.0)
        mask = is_inner[:, None] & is_column[None, :]
        b = tl.load(left + place + begin, mask=mask, other=0.0).to(a.dtype)
        c = tl.load(right + place + begin, mask=mask, other=0.0).to(a.dtype)
        if WIDE:
            a, b, c = a.to(tl.float32), b.to(tl.float32), c.to(tl.float32)
        first_sum = tl.dot(a, b, first_sum, input_precision="ieee")
        second_sum = tl.dot(a, c, second_sum, input_precision="ieee")
    kind = hidden.dtype.element_ty
    act, _, lin = _clamped(
        first_sum.to(kind).to(tl.float32), second_sum.to(kind).to(tl.float32), limit
    )
    found = act * lin * share[:, None]
    at = hidden + into[:, None] * columns + column[None, :]
    tl.store(at, found.to(kind), mask=is_row[:, None] & is_column[None, :])


@triton.jit
@no_type_check
def _down(
    hidden,
    counts,
    down,
    own_down,
    out,
    tokens,
    experts,
    inner,
    columns,
    own,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    WIDE: tl.constexpr,
):
    across = tl.cdiv(columns, COLUMNS)
    expert, first, stop = _tile(counts, tokens, experts, own, across, EXPERTS, ROWS)
    if expert >= experts:
        return
    row = first + tl.arange(0, ROWS)
    is_row = row < stop
    if expert < 0:
        weight = own_down
        row += tokens * TOP_K
    else:
        weight = down + expert.to(tl.int64) * columns * inner
    column = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < columns
    depth = tl.arange(0, INNER)
    wide = row.to(tl.int64)[:, None]
    rows = hidden + wide * inner + depth[None, :]
    place = column[None, :].to(tl.int64) * inner + depth[:, None]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for begin in range(0, inner, INNER):
        is_inner = depth < inner - begin
        a = tl.load(rows + begin, mask=is_row[:, None] & is_inner[None, :], other=0.0)
        mask = is_inner[:, None] & is_column[None, :]
        b = tl.load(weight + place + begin, mask=mask, other=0.0).to(a.dtype)
        if WIDE:
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, b, total, input_precision="ieee")
    at = out + wide * columns + column[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit
@no_type_check
def _sum(rows, places, out, tokens, width, TOP_K: tl.constexpr, COLUMNS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < width
    total = tl.zeros((COLUMNS,), tl.float32)
    for choice in tl.static_range(TOP_K):
        row = tl.load(places + token * TOP_K + choice)
        total += tl.load(rows + row * width + column, mask=mask, other=0.0).to(tl.float32)
    own = rows + (token + tokens * TOP_K) * width + column
    total += tl.load(own, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=mask)


def tiles(x: Tensor, pairs: int, experts: int) -> Tiles:
    """Tiles that an expert's share of the rows fills."""
    if x.element_size() == 4:
        return Tiles(16, 32, 32, 4, 2)
    return Tiles(16, 32, 128, 4, 4) if pairs <= FEW * experts else Tiles(64, 64, 64, 4, 3)


def mix(
    x: Tensor,
    routed: Routed,
    experts: Weights,
    shared: Weights,
    limit: float,
    shape: Tiles | None = None,
) -> Float[Tensor, "T D"]:
    """The three launches."""
    (tokens, width), (count, inner, _) = x.shape, experts[0].shape
    pairs, top_k = len(routed.order), routed.weights.shape[1]
    shape = shape or tiles(x, pairs, count)
    hidden, outputs = x.new_empty(pairs + tokens, inner), x.new_empty(pairs + tokens, width)
    out = torch.empty_like(x)
    own = triton.cdiv(tokens, shape.rows)
    most = own + min(pairs, count) + pairs // shape.rows
    same = {
        "TOP_K": top_k,
        "EXPERTS": triton.next_power_of_2(count),
        "ROWS": shape.rows,
        "COLUMNS": shape.columns,
        "INNER": shape.inner,
        "WIDE": not x.is_cuda,
        "num_warps": shape.warps,
        "num_stages": shape.stages,
    }
    _up[(most * triton.cdiv(inner, shape.columns),)](
        *(x, routed.order, routed.weights, routed.counts),
        *(*experts[:2], *shared[:2], hidden),
        *(tokens, count, width, inner, own, limit),
        **same,
    )
    _down[(most * triton.cdiv(width, shape.columns),)](
        *(hidden, routed.counts, experts[2], shared[2], outputs),
        *(tokens, count, inner, width, own),
        **same,
    )
    columns = min(COLUMNS, triton.next_power_of_2(width))
    _sum[tokens, triton.cdiv(width, columns)](
        outputs, routed.places, out, tokens, width, TOP_K=top_k, COLUMNS=columns
    )
    return out


def _refuse(
    x: Tensor,
    routed: Routed,
    experts: Weights,
    shared: Weights,
    limit: float,
    rounding: Rounding = "off",
) -> str | None:
    if x.dtype not in DTYPES:
        return f"tokens are {x.dtype}"
    if len(experts[0]) > MOST_EXPERTS:
        return f"there are {len(experts[0])} experts, more than {MOST_EXPERTS}"
    return None


@kernel(refuse=_refuse, has_backward=True)
def expert_mixture(
    x: Float[Tensor, "T D"],
    routed: Routed,
    experts: Weights,
    shared: Weights,
    limit: float,
    rounding: Rounding = "off",
) -> Float[Tensor, "T D"]:
    """In three launches; step by step where inputs are rounded or something wants a gradient."""
    given = x, routed.weights, *experts, *shared
    if rounding != "off" or not x.numel() or wants_gradient(*given):
        return composed_mixture(x, routed, experts, shared, limit, rounding)
    return mix(x.contiguous(), routed, _whole(experts), _whole(shared), limit)


def _whole(weights: Weights) -> Weights:
    gate, up, down = weights
    return gate.contiguous(), up.contiguous(), down.contiguous()
