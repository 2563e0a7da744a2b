"""Attention over a window and selected entries, one softmax with a sink. Report §2.3.1."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from openv41.ops._dispatch import op

QUERY_TILE = 512  # queries whose gathered keys are held at one time


@op
def sparse_attention(
    q: Float[Tensor, "T H C"],
    window_kv: Float[Tensor, "S C"],
    window_rows: Int[Tensor, "T W"],
    main_kv: Float[Tensor, "M C"],
    main_rows: Int[Tensor, "T K"],
    sink: Float[Tensor, " H"],
    scale: float,
) -> Float[Tensor, "T H C"]:
    """Attend to the listed rows of both stores; keys are also the values; row -1 is none.

    o = sum_k exp(s_k) v_k / (sum_k exp(s_k) + exp(sink)) with s_k = (q . k) * scale. An entry seen
    through the window and the selection counts twice. A query without keys gives zero. Scores and
    denominator are at least float32; exp(s_k) is rounded to the dtype of ``q`` before it meets v.
    """
    result: Tensor = _SparseAttention.apply(
        q, window_kv, window_rows, main_kv, main_rows, sink, scale
    )
    return result


def _gather(kv: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Read rows [T, L] of kv [S, C] as [T, L, C]; row -1 reads zeros, whatever the store holds."""
    if not len(kv) or not rows.shape[1]:
        return kv.new_zeros(*rows.shape, kv.shape[-1], dtype=dtype)
    picked = kv.index_select(0, rows.clamp(min=0).flatten()).to(dtype)
    picked = picked.unflatten(0, tuple(rows.shape))
    absent = rows < 0
    return picked.masked_fill_(absent[..., None], 0) if bool(absent.any()) else picked


def _weights(scores: Tensor, rows: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Unnormalised exp(s - max) [T, H, L] and the denominator [T, H, 1] with the sink."""
    scores = scores.masked_fill_((rows < 0)[:, None], -torch.inf)
    top = scores.amax(dim=-1, keepdim=True).clamp(min=-1e30)
    weights = scores.sub_(top).exp_()
    return weights, weights.sum(-1, keepdim=True) + (sink[:, None] - top).exp()


class _SparseAttention(torch.autograd.Function):
    """Works in tiles of queries and gathers again in the backward: no [T, L, C] is kept."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:  # noqa: ANN401
        q, window_kv, window_rows, main_kv, main_rows, sink, scale = inputs
        ctx.save_for_backward(q, window_kv, window_rows, main_kv, main_rows, sink)
        ctx.scale = scale
        out = torch.empty_like(q)
        for tile in _tiles(len(q)):
            weights, total, kv, _ = _tile_weights(*inputs[:6], scale, tile)
            rounded = weights.to(q.dtype).to(weights.dtype)
            out[tile] = (rounded @ kv / total).to(q.dtype)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        q, window_kv, window_rows, main_kv, main_rows, sink = ctx.saved_tensors
        wide = torch.promote_types(q.dtype, torch.float32)
        grad_q = torch.empty_like(q)
        grad_window, grad_main = (torch.zeros_like(t, dtype=wide) for t in (window_kv, main_kv))
        grad_sink = torch.zeros_like(sink, dtype=wide)
        for tile in _tiles(len(q)):
            weights, total, kv, rows = _tile_weights(*ctx.saved_tensors, ctx.scale, tile)
            probs = weights / total
            grad = grad_out[tile].to(wide)
            grad_probs = grad @ kv.mT
            mean = (probs * grad_probs).sum(-1, keepdim=True)  # [T, H, 1]
            grad_sink -= ((1 - probs.sum(-1, keepdim=True)) * mean).sum((0, 2))
            grad_scores = (grad_probs - mean) * probs * ctx.scale
            grad_q[tile] = (grad_scores @ kv).to(q.dtype)
            grad_kv = grad_scores.mT @ q[tile].to(wide) + probs.mT @ grad  # [T, L, C]
            width = window_rows.shape[1]
            _scatter(grad_window, rows[:, :width], grad_kv[:, :width])
            _scatter(grad_main, rows[:, width:], grad_kv[:, width:])
        return (
            grad_q,
            grad_window.to(window_kv.dtype),
            None,
            grad_main.to(main_kv.dtype),
            None,
            grad_sink.to(sink.dtype),
            None,
        )


def _tiles(count: int) -> list[slice]:
    return [slice(i, min(i + QUERY_TILE, count)) for i in range(0, count, QUERY_TILE)]


def _tile_weights(
    q: Tensor,
    window_kv: Tensor,
    window_rows: Tensor,
    main_kv: Tensor,
    main_rows: Tensor,
    sink: Tensor,
    scale: float,
    tile: slice,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weights, denominators, gathered keys [T, W+K, C] and their rows for a tile of queries."""
    wide = torch.promote_types(q.dtype, torch.float32)
    near, far = window_rows[tile], main_rows[tile]
    kv = torch.cat([_gather(window_kv, near, wide), _gather(main_kv, far, wide)], dim=1)
    rows = torch.cat([near, far], dim=1)
    scores = (q[tile].to(wide) @ kv.mT).mul_(scale)  # [T, H, W+K]
    return *_weights(scores, rows, sink.to(wide)), kv, rows


def _scatter(into: Tensor, rows: Tensor, values: Tensor) -> None:
    """Add values [T, L, C] to the rows of ``into``; those of row -1 are zero and go nowhere."""
    if len(into) and rows.shape[1]:
        into.index_add_(0, rows.clamp(min=0).flatten(), values.flatten(0, 1))
