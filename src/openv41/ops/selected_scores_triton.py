"""Index scores of the rows that each query lists, and their gradients. Report §2.3.1.

Forward and query gradients gather the listed keys, K x 2 J bytes per query from the L2 cache. The
gradient of a key is a sum over the queries that list it: a program owns a tile of keys and goes
through all queries in order, with the scores' gradients laid out as a matrix, so it needs no
atomics and repeats its bits. Its work is 4 I J operations per pair of query and key whose tile
holds a listed one: 1.1 TF, 1.4 ms, for 8192 queries by 8192 keys.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from openv41.ops.index_scores_triton import dot_dtype

ROWS_AT_ONCE = 64
PAIRS_AT_ONCE = 1 << 25  # of query and key, as a matrix
SPLITS = 4  # parts of the queries whose key gradients are summed at the end


@triton.jit
@no_type_check
def _query(
    q,
    weights,
    token,
    I,  # noqa: E741
    J,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROUND: tl.constexpr,
    DOT: tl.constexpr,
):
    head = tl.arange(0, HEADS)
    column = tl.arange(0, WIDTH)
    at = token * I + head
    weight = tl.load(weights + at, mask=head < I, other=0.0).to(tl.float32)
    if ROUND:
        weight = weight.to(tl.bfloat16).to(tl.float32)
    mask = (head < I)[:, None] & (column < J)[None, :]
    return tl.load(q + at[:, None] * J + column[None, :], mask=mask, other=0.0).to(DOT), weight


@triton.jit
@no_type_check
def _listed(keys, rows, first, K, J, WIDTH: tl.constexpr, ROWS: tl.constexpr, DOT: tl.constexpr):
    place = first + tl.arange(0, ROWS)
    row = tl.load(rows + place, mask=place < K, other=-1).to(tl.int64)
    column = tl.arange(0, WIDTH)
    mask = (row >= 0)[:, None] & (column < J)[None, :]
    key = tl.load(keys + row[:, None] * J + column[None, :], mask=mask, other=0.0)
    return key.to(DOT), row, place


@triton.jit
@no_type_check
def _forward(
    q,
    weights,
    keys,
    rows,
    out,
    K,
    I,  # noqa: E741
    J,
    tiles,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    ROUND: tl.constexpr,
    DOT: tl.constexpr,
):
    token = (tl.program_id(0) // tiles).to(tl.int64)
    first = (tl.program_id(0) % tiles) * ROWS
    query, weight = _query(q, weights, token, I, J, HEADS, WIDTH, ROUND, DOT)
    key, row, place = _listed(keys, rows + token * K, first, K, J, WIDTH, ROWS, DOT)
    dots = tl.dot(key, tl.trans(query), input_precision="ieee")
    if ROUND:
        dots = dots.to(tl.bfloat16).to(tl.float32)
    parts = tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL) * weight[None, :]
    if ROUND:
        parts = parts.to(tl.bfloat16).to(tl.float32)
    score = tl.sum(parts, 1)
    if ROUND:
        score = score.to(tl.bfloat16).to(tl.float32)
    score = tl.where(row < 0, float("-inf"), score)
    tl.store(out + token * K + place, score, mask=place < K)


@triton.jit
@no_type_check
def _backward_queries(
    q,
    weights,
    keys,
    rows,
    grad,
    grad_q,
    grad_weights,
    K,
    I,  # noqa: E741
    J,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    ROUND: tl.constexpr,
    DOT: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    query, weight = _query(q, weights, token, I, J, HEADS, WIDTH, ROUND, DOT)
    to_query = tl.zeros((HEADS, WIDTH), tl.float32)
    to_weight = tl.zeros((HEADS,), tl.float32)
    for tile in range(TILES):
        first = tile * ROWS
        key, row, place = _listed(keys, rows + token * K, first, K, J, WIDTH, ROWS, DOT)
        given = tl.load(grad + token * K + place, mask=row >= 0, other=0.0).to(tl.float32)
        dots = tl.dot(query, tl.trans(key), input_precision="ieee")  # [heads, rows]
        if ROUND:
            dots = dots.to(tl.bfloat16).to(tl.float32)
        to_weight += tl.sum(tl.maximum(dots, 0.0) * given[None, :], 1)
        to_dots = tl.where(dots > 0, given[None, :] * weight[:, None], 0.0)
        to_query = tl.dot(to_dots.to(DOT), key, to_query, input_precision="ieee")
    head, column = tl.arange(0, HEADS), tl.arange(0, WIDTH)
    at = token * I + head
    tl.store(grad_weights + at, to_weight.to(grad_weights.dtype.element_ty), mask=head < I)
    mask = (head < I)[:, None] & (column < J)[None, :]
    to = grad_q + at[:, None] * J + column[None, :]
    tl.store(to, to_query.to(grad_q.dtype.element_ty), mask=mask)


@triton.jit
@no_type_check
def _spread(rows, grad, matrix, K, M, TILES: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    for tile in range(TILES):
        place = tile * BLOCK + tl.arange(0, BLOCK)
        row = tl.load(rows + token * K + place, mask=place < K, other=-1).to(tl.int64)
        given = tl.load(grad + token * K + place, mask=row >= 0, other=0.0).to(tl.float32)
        tl.store(matrix + token * M + row, given, mask=row >= 0)


@triton.jit
@no_type_check
def _backward_keys(
    q,
    weights,
    keys,
    matrix,
    partial,
    T,
    M,
    I,  # noqa: E741
    J,
    steps,
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    ROUND: tl.constexpr,
    DOT: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    column = tl.arange(0, WIDTH)
    at_row = row[:, None] * J + column[None, :]
    mask = (row < M)[:, None] & (column < J)[None, :]
    key = tl.load(keys + at_row, mask=mask, other=0.0).to(DOT)
    to = partial + tl.program_id(1).to(tl.int64) * M * J + at_row
    total = tl.load(to, mask=mask, other=0.0)
    lane = tl.arange(0, QUERIES * HEADS)
    own = tl.arange(0, QUERIES)
    step = 0
    while step < steps:
        first = (tl.program_id(1) * steps + step) * QUERIES
        token = (first + own).to(tl.int64)
        listed = (token < T)[None, :] & (row < M)[:, None]
        given = tl.load(matrix + token[None, :] * M + row[:, None], mask=listed, other=0.0)
        if tl.max(tl.max((given != 0).to(tl.int32), 1), 0) > 0:
            head = lane % HEADS
            at = (first + lane // HEADS).to(tl.int64) * I + head
            there = (head < I) & (first + lane // HEADS < T)
            weight = tl.load(weights + at, mask=there, other=0.0).to(tl.float32)
            if ROUND:
                weight = weight.to(tl.bfloat16).to(tl.float32)
            wide = there[:, None] & (column < J)[None, :]
            query = tl.load(q + at[:, None] * J + column[None, :], mask=wide, other=0.0).to(DOT)
            dots = tl.dot(key, tl.trans(query), input_precision="ieee")  # [rows, lanes]
            if ROUND:
                dots = dots.to(tl.bfloat16).to(tl.float32)
            spread = tl.broadcast_to(given[:, :, None], ROWS, QUERIES, HEADS)
            spread = tl.reshape(spread, ROWS, QUERIES * HEADS)
            to_dots = tl.where(dots > 0, spread * weight[None, :], 0.0)
            total = tl.dot(to_dots.to(DOT), query, total, input_precision="ieee")
        step += 1
    tl.store(to, total, mask=mask)


def _sizes(q: Tensor) -> dict[str, Any]:
    heads, width = q.shape[1:]
    return {
        "DOT": dot_dtype(q),
        "HEADS": max(16, triton.next_power_of_2(heads)),
        "WIDTH": max(16, triton.next_power_of_2(width)),
    }


def forward(
    q: Float[Tensor, "T I J"],
    weights: Float[Tensor, "T I"],
    keys: Float[Tensor, "M J"],
    rows: Int[Tensor, "T K"],
    *,
    rounded: bool,
    rows_at_once: int = ROWS_AT_ONCE,
) -> Float[Tensor, "T K"]:
    """Scores in float32; -inf where a row is -1."""
    tokens, num, dim = q.shape
    out = torch.empty(rows.shape, dtype=torch.float32, device=q.device)
    if not out.numel():
        return out
    tiles = triton.cdiv(rows.shape[1], rows_at_once)
    _forward[(tokens * tiles,)](
        *(q, weights, keys, rows, out, rows.shape[1], num, dim, tiles),
        ROWS=rows_at_once,
        ROUND=rounded,
        **_sizes(q),
    )
    return out


def backward(
    given: tuple[Tensor, Tensor, Tensor, Tensor],
    grad: Float[Tensor, "T K"],
    *,
    rounded: bool,
    rows_at_once: int = ROWS_AT_ONCE,
    pairs: int = PAIRS_AT_ONCE,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, weights and keys, each in its tensor's dtype."""
    q, weights, keys, rows = given
    (tokens, num, dim), (_, listed), width = q.shape, rows.shape, len(keys)
    grads = torch.empty_like(q), torch.empty_like(weights)
    sizes = {**_sizes(q), "ROWS": rows_at_once, "ROUND": rounded}
    _backward_queries[(tokens,)](
        *(q, weights, keys, rows, grad, *grads, listed, num, dim),
        **sizes,
        TILES=triton.cdiv(listed, rows_at_once),
        num_stages=2,
    )
    partial = torch.zeros(SPLITS, width, dim, dtype=torch.float32, device=q.device)
    piece = max(1, pairs // width)
    queries = max(1, 128 // sizes["HEADS"])
    for first in range(0, tokens, piece):
        part = slice(first, min(tokens, first + piece))
        count = part.stop - first
        matrix = torch.zeros(count, width, dtype=torch.float32, device=q.device)
        _spread[(count,)](
            *(rows[part], grad[part], matrix, listed, width),
            TILES=triton.cdiv(listed, 512),
            BLOCK=512,
        )
        steps = triton.cdiv(triton.cdiv(count, queries), SPLITS)
        grid = triton.cdiv(width, rows_at_once), SPLITS
        _backward_keys[grid](
            *(q[part], weights[part], keys, matrix, partial, count, width, num, dim, steps),
            QUERIES=queries,
            **sizes,
            num_warps=8,
            num_stages=2,
        )
    return (*grads, partial.sum(dim=0).to(keys.dtype))


class SelectedScores(torch.autograd.Function):
    """Keeps its inputs alone for the backward, which gathers again."""

    @staticmethod
    def forward(ctx: Any, q, weights, keys, rows, rounded) -> Tensor:
        """Scores of the listed rows."""
        ctx.save_for_backward(q, weights, keys, rows)
        ctx.rounded = rounded
        return forward(q, weights, keys, rows, rounded=rounded)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad) -> tuple[Tensor | None, ...]:
        """Gradients of queries, weights and keys."""
        grads = backward(ctx.saved_tensors, grad.contiguous(), rounded=ctx.rounded)
        return (*grads, None, None)
