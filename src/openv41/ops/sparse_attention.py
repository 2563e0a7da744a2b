"""Attention over a window and selected entries, one softmax with a sink. Report §2.3.1."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from openv41.ops._dispatch import op

QUERIES_AT_ONCE = 512  # queries whose gathered keys are held at one time
BAND = 16  # neighbouring queries that read the union of their windows together
NO_SINK = -1e30  # stands for a sink of -inf, so that a query without keys gives zero


class Window(NamedTuple):
    """Rows that each query sees of the window store, and the bands that read them together.

    ``band_rows`` are the rows of a band of neighbouring queries, ``band_bias`` is 0 where a query
    sees a row of its band and -inf where not.
    """

    rows: Int[Tensor, "T W"]
    band_rows: Int[Tensor, "B S"]
    band_bias: Float[Tensor, "B X S"]

    @property
    def band(self) -> int:
        """Queries per band."""
        return self.band_bias.shape[1]


def plan_window(rows: Int[Tensor, "T W"], *, deterministic: bool = False) -> Window:
    """Group queries into bands where their windows are neighbouring ranges; else bands of one.

    Row -1 is none. ``deterministic`` always makes bands of one, so that the sums of a query depend
    on nothing else.
    """
    if deterministic or not _is_banded(rows):
        return Window(rows, rows, _bias(rows[:, None] >= 0))
    width = rows.shape[1]
    padded = F.pad(rows, (0, 0, 0, -len(rows) % BAND), value=-1)
    seen = F.pad((padded >= 0).unflatten(0, (-1, BAND)), (0, BAND))  # [B, BAND, W+BAND]
    skewed = seen.flatten(1)[:, :-BAND].unflatten(1, (BAND, width + BAND - 1))
    steps = torch.arange(1 - width, BAND, device=rows.device)
    band_rows = (rows[::BAND, -1:] + steps).masked_fill_(~skewed.any(dim=1), -1)
    return Window(rows, band_rows, _bias(skewed))


def _bias(seen: Tensor) -> Tensor:
    return torch.where(seen, 0.0, -torch.inf)


def _is_banded(rows: Tensor) -> bool:
    """Whether windows end at their own row, and own rows are consecutive within each band."""
    count, width = rows.shape
    if count < BAND or width == 0:
        return False
    own = rows[:, -1]
    steps = torch.arange(1 - width, 1, device=own.device)
    straight = (rows == own[:, None] + steps) | (rows < 0)
    places = torch.arange(count, device=own.device)
    follows = own == own[places - places % BAND] + places % BAND
    return bool((straight.all(dim=1) & follows & (own >= 0)).all())


@op
def sparse_attention(
    q: Float[Tensor, "T H C"],
    window_kv: Float[Tensor, "S C"],
    window: Window,
    main_kv: Float[Tensor, "M C"],
    main_rows: Int[Tensor, "T K"],
    sink: Float[Tensor, " H"],
    scale: float,
) -> Float[Tensor, "T H C"]:
    """Attend to the listed rows of both stores; keys are also the values; row -1 is none.

    o = sum_k exp(s_k) v_k / (sum_k exp(s_k) + exp(sink)) with s_k = (q . k) * scale. An entry seen
    through the window and the selection counts twice. A query without keys gives zero. Scores and
    denominator are at least float32; exp(s_k - max s) is rounded to the dtype of ``q`` before it
    meets v.
    """
    result: Tensor = _SparseAttention.apply(
        q, window_kv, main_kv, sink, window.band_rows, window.band_bias, main_rows, scale
    )
    return result


class _Tile(NamedTuple):
    """Some bands of queries with their keys: near ones shared by a band, far ones by nobody."""

    q: Float[Tensor, "B Q C"]  # Q = band * heads
    near: Float[Tensor, "B S C"]
    far: Float[Tensor, "T K C"]
    near_rows: Int[Tensor, "B S"]
    near_bias: Float[Tensor, "B X S"]
    far_rows: Int[Tensor, "T K"]
    heads: int

    def probabilities(self, sink: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Softmax over near keys, far keys and the sink: [B, Q, S], [T, H, K]."""
        near, far = self.products(self.q * scale)
        scores = near.new_empty(*self.split(near).shape[:2], near.shape[-1] + far.shape[-1] + 1)
        shape = (len(self.near), -1, self.heads, scores.shape[-1])
        near_part = scores.view(shape)[..., : near.shape[-1]]
        torch.add(near.view_as(near_part), self.near_bias[:, :, None], out=near_part)
        bias = _bias(self.far_rows >= 0)[:, None].to(far.dtype)
        torch.add(far, bias, out=scores[..., near.shape[-1] : -1])
        scores[..., -1] = sink.clamp(NO_SINK, -NO_SINK)
        probs = scores.softmax(-1)
        near = probs.view(*near.shape[:2], -1)[..., : near.shape[-1]]
        return near, probs[..., near.shape[-1] : -1]

    def products(self, x: Float[Tensor, "B Q C"]) -> tuple[Tensor, Tensor]:
        """Dot products with the near and the far keys: [B, Q, S], [T, H, K]."""
        return x @ self.near.mT, self.split(x) @ self.far.mT

    def sums(self, near: Float[Tensor, "B Q S"], far: Float[Tensor, "T H K"]) -> Tensor:
        """Sums of values with these weights: [T, H, C]."""
        return self.split(near @ self.near) + far @ self.far

    def split(self, x: Float[Tensor, "B Q C"]) -> Float[Tensor, "T H C"]:
        """View a band's queries one by one."""
        return x.reshape(len(self.far_rows), self.heads, x.shape[-1])


def _tiles(
    q: Tensor, window_kv: Tensor, main_kv: Tensor, band_rows: Tensor, bias: Tensor, far_rows: Tensor
) -> Iterator[_Tile]:
    """Cut into pieces of about QUERIES_AT_ONCE queries, gathering keys piece by piece."""
    wide = torch.promote_types(q.dtype, torch.float32)
    heads, band = q.shape[1], bias.shape[1]
    step = QUERIES_AT_ONCE // band
    queries = _whole_bands(q.flatten(1).to(wide), band).view(-1, band * heads, q.shape[-1])
    far_rows = _whole_bands(far_rows, band, value=-1)
    for i in range(0, len(band_rows), step):
        near, far = band_rows[i : i + step], far_rows[i * band : (i + step) * band]
        yield _Tile(
            queries[i : i + step],
            _gather(window_kv, near, wide),
            _gather(main_kv, far, wide),
            near,
            bias[i : i + step].to(wide),
            far,
            heads,
        )


def _whole_bands(x: Tensor, band: int, value: int = 0) -> Tensor:
    short = -len(x) % band
    return F.pad(x, (0, 0, 0, short), value=value) if short else x


def _gather(kv: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Read rows [B, L] of kv [S, C] as [B, L, C]; row -1 reads zeros, whatever the store holds."""
    if not len(kv) or not rows.numel():
        return kv.new_zeros(*rows.shape, kv.shape[-1], dtype=dtype)
    picked = kv.index_select(0, rows.clamp(min=0).flatten()).to(dtype)
    picked = picked.unflatten(0, tuple(rows.shape))
    absent = rows < 0
    return picked.masked_fill_(absent[..., None], 0) if bool(absent.any()) else picked


class _SparseAttention(torch.autograd.Function):
    """Computes probabilities again in the backward: neither they nor gathered keys are kept."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:  # noqa: ANN401
        q, window_kv, main_kv, sink, band_rows, band_bias, main_rows, scale = inputs
        outputs = [q.new_empty(0, *q.shape[1:])]
        for tile in _tiles(q, window_kv, main_kv, band_rows, band_bias, main_rows):
            near, far = tile.probabilities(sink.to(tile.q.dtype), scale)
            outputs.append(_attend(tile, near, far, q.dtype))
        out = torch.cat(outputs)[: len(q)]
        ctx.save_for_backward(*inputs[:7], out)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        q, window_kv, main_kv, sink, band_rows, band_bias, main_rows, out = ctx.saved_tensors
        wide = torch.promote_types(q.dtype, torch.float32)
        band, grad_out = band_bias.shape[1], grad_out.to(wide)
        mean = _whole_bands((grad_out * out.to(wide)).sum(-1), band)  # [T, H]
        grad_out = _whole_bands(grad_out.flatten(1), band).view(-1, *q.shape[1:])
        into = _Gradients(*(torch.zeros_like(t, dtype=wide) for t in (window_kv, main_kv, sink)))
        grads, taken = [q.new_empty(0, *q.shape[1:])], 0
        for tile in _tiles(q, window_kv, main_kv, band_rows, band_bias, main_rows):
            piece = slice(taken, taken + len(tile.far_rows))
            taken = piece.stop
            near, far = tile.probabilities(sink.to(wide), ctx.scale)
            rest = 1 - tile.split(near).sum(-1) - far.sum(-1)
            into.sink.sub_((rest * mean[piece]).sum(0))
            grad = _tile_backward(tile, grad_out[piece], mean[piece], near, far, into, ctx.scale)
            grads.append(grad.to(q.dtype))
        grad_q = torch.cat(grads)[: len(q)]
        stores = (into.window.to(window_kv.dtype), into.main.to(main_kv.dtype))
        return grad_q, *stores, into.sink.to(sink.dtype), None, None, None, None


class _Gradients(NamedTuple):
    window: Float[Tensor, "S C"]
    main: Float[Tensor, "M C"]
    sink: Float[Tensor, " H"]


def _attend(tile: _Tile, near: Tensor, far: Tensor, dtype: torch.dtype) -> Float[Tensor, "T H C"]:
    """Weighted sums of the values; narrow dtypes round p / max p, which is exp(s - max s)."""
    if dtype == near.dtype:
        return tile.sums(near, far)
    top = torch.cat([tile.split(near), far], dim=-1).amax(-1, keepdim=True)
    safe = torch.where(top > 0, top, 1)
    far = (far / safe).to(dtype).to(far.dtype)
    near = (near / safe.view(*near.shape[:2], 1)).to(dtype).to(near.dtype)
    return (tile.sums(near, far) * top).to(dtype)


def _tile_backward(
    tile: _Tile,
    grad: Float[Tensor, "T H C"],
    mean: Float[Tensor, "T H"],
    near: Tensor,
    far: Tensor,
    into: _Gradients,
    scale: float,
) -> Float[Tensor, "T H C"]:
    """Add the tile's key gradients to ``into`` and return its query gradients."""
    flat = grad.reshape(tile.q.shape)
    grad_near, grad_far = tile.products(flat)
    grad_near = grad_near.sub_(mean.reshape(*near.shape[:2], 1)).mul_(near).mul_(scale)
    grad_far = grad_far.sub_(mean[..., None]).mul_(far).mul_(scale)
    near_kv = torch.baddbmm(near.mT @ flat, grad_near.mT, tile.q)  # [B, S, C]
    far_kv = torch.baddbmm(far.mT @ grad, grad_far.mT, tile.split(tile.q))  # [T, K, C]
    _scatter(into.window, tile.near_rows, near_kv)
    _scatter(into.main, tile.far_rows, far_kv)
    return tile.sums(grad_near, grad_far)


def _scatter(into: Tensor, rows: Tensor, values: Tensor) -> None:
    """Add values [B, L, C] to the rows of ``into``; those of row -1 are zero and go nowhere."""
    if len(into) and rows.numel():
        into.index_add_(0, rows.clamp(min=0).flatten(), values.flatten(0, 1))
