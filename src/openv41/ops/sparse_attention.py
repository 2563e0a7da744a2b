"""Attention over a window and selected entries, one softmax with a sink. Report §2.3.1."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from openv41.ops._dispatch import op, wants_gradient
from openv41.ops.deterministic import TILE_ROWS, TILE_WIDTH, whole_tiles
from openv41.ops.precision import WIDE, cast, widened

QUERIES_AT_ONCE = 512  # queries whose gathered keys are held at one time
READERS_AT_ONCE = 2048  # queries whose gradients of listed rows the kernel holds at one time
BAND = 16  # neighbouring queries that may read one range of rows together
WIDEST_RANGE = 4  # times the rows that a query reads: above, gathering row by row is cheaper
NO_SINK = -1e30  # stands for a sink of -inf, so that a query without keys gives zero


class Plan(NamedTuple):
    """Rows that bands of neighbouring queries read together, and what each query sees of them.

    ``bias`` is added to a query's scores: 0 shows a row, -inf hides it. ``is_whole`` says that
    every query sees every row, so that neither bias nor absent rows need any work;
    ``is_in_order`` that a single query reads rows 0, 1, 2, ..., which needs no gathering either.
    """

    rows: Int[Tensor, "B S"]  # -1 is none
    bias: Float[Tensor, "B band S"]  # queries of a band; the last band may be padded
    is_whole: bool = False
    is_in_order: bool = False


@dataclass(frozen=True, eq=False)
class Keys:
    """Rows that each query lists; how to read them is worked out once, for who needs it.

    The kernel reads the lists as they are. ``plan`` serves the reference, ``readers`` the
    kernel's backward: layers that share the keys share both.
    """

    listed: Int[Tensor, "T K"]  # -1 is none
    deterministic: bool = False

    @cached_property
    def plan(self) -> Plan:
        """What the reference reads together."""
        return plan_bands(self.listed, deterministic=self.deterministic)

    @cached_property
    def readers(self) -> list[tuple[Int[Tensor, " n"], Int[Tensor, " n"]]]:
        """Places of each READERS_AT_ONCE lists, sorted by the row they name, and those rows."""
        found = []
        for lists in self.listed.split(READERS_AT_ONCE):
            rows, order = lists.flatten().int().sort(stable=True)
            found.append((order, rows))
        return found


def plan_keys(rows: Int[Tensor, "T K"], *, deterministic: bool = False) -> Keys:
    """Keys of queries from the rows that each lists; -1 is none.

    ``deterministic`` makes the sums of a query depend on nothing but its own rows.
    """
    return Keys(rows, deterministic)


def plan_bands(rows: Int[Tensor, "T K"], *, deterministic: bool = False) -> Plan:
    """Plan how the reference reads the rows that each query lists.

    Where neighbours list rows from one short range, as in a window or among few entries, a band
    of them reads the whole range. ``deterministic`` keeps queries apart.
    """
    if deterministic:
        rows = F.pad(rows, (0, -rows.shape[1] % TILE_WIDTH), value=-1)
    count, listed = rows.shape
    if not deterministic and count == 1 and _is_in_order(rows[0]):
        bias = torch.zeros(1, 1, listed, device=rows.device)
        return Plan(rows, bias, is_whole=True, is_in_order=True)
    alone = Plan(rows, torch.where(rows >= 0, 0.0, -torch.inf)[:, None])
    if not deterministic and count < BAND:
        return alone._replace(is_whole=not bool((rows < 0).any()))
    if deterministic or listed == 0:
        return alone
    bands = F.pad(rows, (0, 0, 0, -count % BAND), value=-1).unflatten(0, (-1, BAND))
    seen = bands >= 0  # [B, band, K]
    last = bands.amax(dim=(1, 2))
    first = torch.where(seen, bands, last[:, None, None]).amin(dim=(1, 2)).clamp(min=0)
    span = int((last - first).max()) + 1
    if span > WIDEST_RANGE * listed:
        return alone
    places = torch.where(seen, bands - first[:, None, None], span)
    counts = torch.zeros(*bands.shape[:2], span + 1, device=rows.device)
    counts = counts.scatter_add_(2, places, torch.ones_like(places, dtype=counts.dtype))
    if bool((counts[..., :span] > 1).any()):
        return alone  # a query lists a row twice, and each time counts
    together = first[:, None] + torch.arange(span, device=rows.device)
    together = together.masked_fill(together > last[:, None], -1)
    return Plan(together, torch.where(counts[..., :span] > 0, 0.0, -torch.inf))


def _is_in_order(rows: Int[Tensor, " K"]) -> bool:
    return torch.equal(rows, torch.arange(len(rows), dtype=rows.dtype, device=rows.device))


@op
def sparse_attention(  # noqa: PLR0917 -- two stores with their keys
    q: Float[Tensor, "T H C"],
    window_kv: Float[Tensor, "S C"],
    window_keys: Keys,
    main_kv: Float[Tensor, "M C"],
    main_keys: Keys,
    sink: Float[Tensor, " H"],
    scale: float,
    *,
    deterministic: bool = False,
) -> Float[Tensor, "T H C"]:
    """Attend to planned rows of both stores; keys are also the values.

    o = sum_k exp(s_k) v_k / (sum_k exp(s_k) + exp(sink)) with s_k = (q . k) * scale. An entry seen
    through the window and the selection counts twice. A query without keys gives zero. Scores and
    denominator are at least float32; exp(s_k - max s) is rounded to the dtype of ``q`` before it
    meets v.
    """
    heads, width = q.shape[1:]
    if deterministic:
        q, window_kv, main_kv = (
            whole_tiles(q, rows=TILE_ROWS),
            whole_tiles(window_kv),
            whole_tiles(main_kv),
        )
        sink = F.pad(sink, (0, -heads % TILE_ROWS))
    stores, near, far = (window_kv, main_kv), window_keys.plan, main_keys.plan
    result: Tensor = (
        _SparseAttention.apply(q, *stores, sink, *near[:2], *far[:2], scale)
        if wants_gradient(q, *stores, sink)
        else _attended(q, stores, sink, (near, far), scale)
    )
    return result[:, :heads, :width] if deterministic else result


@op
@torch.no_grad()
def attention_mass(  # noqa: PLR0917 -- two stores with their keys
    q: Float[Tensor, "T H C"],
    window_kv: Float[Tensor, "S C"],
    window_keys: Keys,
    main_kv: Float[Tensor, "M C"],
    main_rows: Int[Tensor, "T K"],
    sink: Float[Tensor, " H"],
    scale: float,
) -> Float[Tensor, "T K"]:
    """Probability of each listed main row, summed over the heads; 0 where the row is -1.

    The softmax is that of ``sparse_attention``: over window, listed rows and sink together. The
    result has no gradient.
    """
    alone = Plan(main_rows, torch.where(main_rows >= 0, 0.0, -torch.inf)[:, None])
    none = widened(q.new_zeros(0, main_rows.shape[1]))
    tiles = _tiles(q, (window_kv, main_kv), (window_keys.plan, alone))
    found = [tile.probabilities(sink.to(tile.q.dtype), scale)[1].sum(dim=1) for tile in tiles]
    return torch.cat([none, *found])[: len(q)]


class _Part(NamedTuple):
    """Queries of some bands with the keys that each band shares."""

    kv: Float[Tensor, "B S C"]
    rows: Int[Tensor, "B S"]
    bias: Float[Tensor, "B band S"]
    is_whole: bool

    def products(self, x: Float[Tensor, "T H C"]) -> Float[Tensor, "T H S"]:
        """Dot products with the keys."""
        return torch.bmm(self._banded(x), self.kv.mT).view(*x.shape[:2], self.kv.shape[1])

    def scores(self, q: Float[Tensor, "T H C"], scale: float, into: Float[Tensor, "T H S"]) -> None:
        """Write the scaled products, -inf where a row is hidden from a query."""
        if self.is_whole:
            torch.mul(self.products(q), scale, out=into)
        else:
            bias = self.bias.flatten(0, 1)[:, None].to(into.dtype)
            torch.add(bias, self.products(q), alpha=scale, out=into)

    def sums(self, weights: Float[Tensor, "T H S"]) -> Float[Tensor, "T H C"]:
        """Weighted sums of the values."""
        found = torch.bmm(self._banded(weights), self.kv)
        return found.view(*weights.shape[:2], self.kv.shape[2])

    def outer(self, weights: Float[Tensor, "T H S"], x: Float[Tensor, "T H C"]) -> Tensor:
        """Sum over queries and heads of weight times x: [B, S, C]."""
        return self._banded(weights).mT @ self._banded(x)

    def _banded(self, x: Tensor) -> Float[Tensor, "B rows _"]:
        """View the queries and heads of a band as its rows."""
        bands, band = self.bias.shape[:2]
        return x if band == 1 else x.reshape(bands, band * x.shape[1], x.shape[2])


class _Tile(NamedTuple):
    """A piece of queries: window part and main part."""

    q: Float[Tensor, "T H C"]
    parts: tuple[_Part, _Part]

    def probabilities(self, sink: Tensor, scale: float) -> list[Float[Tensor, "T H S"]]:
        """Softmax over the keys of both parts and the sink, as one tensor per part."""
        widths = [part.kv.shape[1] for part in self.parts]
        scores = self.q.new_empty(*self.q.shape[:2], sum(widths) + 1)
        scores[..., -1] = sink.clamp(NO_SINK, -NO_SINK)
        *places, _ = scores.split([*widths, 1], dim=-1)
        for part, into in zip(self.parts, places, strict=True):
            part.scores(self.q, scale, into)
        near, far, _ = scores.softmax(-1).split([*widths, 1], dim=-1)
        return [near, far]

    def sums(self, weights: list[Tensor]) -> Float[Tensor, "T H C"]:
        """Weighted sums of the values of both parts."""
        near, far = self.parts
        return near.sums(weights[0]) + far.sums(weights[1])


def _tiles(q: Tensor, stores: tuple[Tensor, Tensor], keys: tuple[Plan, Plan]) -> Iterator[_Tile]:
    """Cut into pieces of QUERIES_AT_ONCE queries, gathering keys piece by piece."""
    wide = torch.promote_types(q.dtype, torch.float32)
    padded = _whole_bands(q, keys)
    for start in range(0, len(padded), QUERIES_AT_ONCE):
        stop = min(start + QUERIES_AT_ONCE, len(padded))
        near, far = (
            _part(kv, plan, start, stop, wide) for kv, plan in zip(stores, keys, strict=True)
        )
        yield _Tile(padded[start:stop].to(wide), (near, far))


def _part(kv: Tensor, keys: Plan, start: int, stop: int, dtype: torch.dtype) -> _Part:
    band = keys.bias.shape[1]
    bands = slice(start // band, -(-stop // band))
    rows, bias, is_whole = keys[:3]
    if len(rows) * band > stop - start:
        rows, bias = rows[bands], bias[bands]
    if short := (stop - start) - len(rows) * band:  # the other part is banded, and padded
        rows = F.pad(rows, (0, 0, 0, short), value=-1)
        bias = F.pad(bias, (0, 0, 0, 0, 0, short), value=-torch.inf)
        is_whole = False
    return _Part(_gather(kv, rows, dtype, is_whole=is_whole), rows, bias, is_whole)


def _whole_bands(x: Tensor, keys: tuple[Plan, Plan]) -> Tensor:
    """Pad queries so that they fill the bands of both plans."""
    short = max(len(plan.rows) * plan.bias.shape[1] for plan in keys) - len(x)
    return F.pad(x, (0, 0) * (x.ndim - 1) + (0, short)) if short else x


def _gather(kv: Tensor, rows: Tensor, dtype: torch.dtype, *, is_whole: bool) -> Tensor:
    """Read the rows of each band, as [B, S, C]; row -1 reads zeros, whatever the store holds."""
    if not len(kv) or not rows.numel():
        return kv.new_zeros(*rows.shape, kv.shape[-1], dtype=dtype)
    if is_whole:
        return kv.index_select(0, rows.flatten()).to(dtype).view(*rows.shape, kv.shape[-1])
    if rows.numel() > len(kv):  # a copy of the store costs less than to fill what was read
        padded = F.pad(kv, (0, 0, 0, 1))
        picked = padded.index_select(0, torch.where(rows < 0, len(kv), rows).flatten()).to(dtype)
        return picked.view(*rows.shape, kv.shape[-1])
    picked = kv.index_select(0, rows.clamp(min=0).flatten()).to(dtype)
    picked = picked.view(*rows.shape, kv.shape[-1])
    absent = rows < 0
    return picked.masked_fill_(absent[..., None], 0) if bool(absent.any()) else picked


def _attended(
    q: Tensor, stores: tuple[Tensor, Tensor], sink: Tensor, keys: tuple[Plan, Plan], scale: float
) -> Float[Tensor, "T H C"]:
    if keys[0].is_in_order and keys[1].is_in_order and q.dtype in WIDE:
        return _attended_in_order(q, stores, sink, keys, scale)
    outputs = [
        _attend(tile, tile.probabilities(sink.to(tile.q.dtype), scale), q.dtype)
        for tile in _tiles(q, stores, keys)
    ]
    return torch.cat(outputs)[: len(q)] if outputs else torch.empty_like(q)


def _attended_in_order(
    q: Tensor, stores: tuple[Tensor, Tensor], sink: Tensor, keys: tuple[Plan, Plan], scale: float
) -> Float[Tensor, "T H C"]:
    """The same sums for one query with nothing to gather, hide or cut: half the calls."""
    near, far = (
        cast(kv.narrow(0, 0, plan.rows.shape[1]), q.dtype)[None]
        for kv, plan in zip(stores, keys, strict=True)
    )
    sinks = cast(sink, q.dtype).clamp(NO_SINK, -NO_SINK).view(1, -1, 1)
    scores = [torch.bmm(q, kv.mT) * scale for kv in (near, far)]
    probs = torch.cat([*scores, sinks], dim=-1).softmax(-1)
    shares = torch.split_with_sizes(probs, (near.shape[1], far.shape[1], 1), -1)
    return torch.bmm(shares[0], near) + torch.bmm(shares[1], far)


class _SparseAttention(torch.autograd.Function):
    """Computes probabilities again in the backward: neither they nor gathered keys are kept."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:  # noqa: ANN401
        q, window_kv, main_kv, sink, *planned, scale = inputs
        keys = Plan(*planned[:2]), Plan(*planned[2:])
        out = _attended(q, (window_kv, main_kv), sink, keys, scale)
        ctx.save_for_backward(*inputs[:-1], out)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        q, window_kv, main_kv, sink, *planned, out = ctx.saved_tensors
        keys = Plan(*planned[:2]), Plan(*planned[2:])
        wide = torch.promote_types(q.dtype, torch.float32)
        mean = _whole_bands((grad_out.to(wide) * out.to(wide)).sum(-1, keepdim=True), keys)
        grad_out = _whole_bands(grad_out.to(wide), keys)
        into = tuple(torch.zeros_like(kv, dtype=wide) for kv in (window_kv, main_kv))
        grads, sinks = [q.new_empty(0, *q.shape[1:])], torch.zeros_like(sink, dtype=wide)
        pieces = zip(
            _tiles(q, (window_kv, main_kv), keys),
            grad_out.split(QUERIES_AT_ONCE),
            mean.split(QUERIES_AT_ONCE),
            strict=False,
        )
        for tile, grad, part_mean in pieces:
            probs = tile.probabilities(sink.to(wide), ctx.scale)
            rest = 1 - probs[0].sum(-1) - probs[1].sum(-1)  # the sink's probability
            sinks -= (rest * part_mean[..., 0]).sum(0)
            grads.append(_tile_backward(tile, grad, part_mean, probs, into, ctx.scale).to(q.dtype))
        stores = (into[0].to(window_kv.dtype), into[1].to(main_kv.dtype))
        return torch.cat(grads)[: len(q)], *stores, sinks.to(sink.dtype), *[None] * 5


def _attend(tile: _Tile, probs: list[Tensor], dtype: torch.dtype) -> Float[Tensor, "T H C"]:
    """Weighted sums of the values; narrow dtypes round p / max p, which is exp(s - max s)."""
    if dtype == probs[0].dtype:
        return tile.sums(probs)
    tops = [p.amax(-1, keepdim=True) for p in probs if p.shape[-1]]
    top = torch.cat([torch.zeros_like(tile.q[..., :1]), *tops], dim=-1).amax(-1, keepdim=True)
    safe = torch.where(top > 0, top, 1)
    rounded = [(p / safe).to(dtype).to(p.dtype) for p in probs]
    return (tile.sums(rounded) * top).to(dtype)


def _tile_backward(  # noqa: PLR0917 -- what the loop over tiles holds
    tile: _Tile,
    grad: Float[Tensor, "T H C"],
    mean: Float[Tensor, "T H 1"],
    probs: list[Tensor],
    into: tuple[Tensor, ...],
    scale: float,
) -> Float[Tensor, "T H C"]:
    """Add the piece's key gradients to ``into`` and return its query gradients."""
    grad_scores = []
    for part, prob, total in zip(tile.parts, probs, into, strict=True):
        grad_score = part.products(grad).sub_(mean).mul_(prob).mul_(scale)
        grad_kv = part.outer(grad_score, tile.q) + part.outer(prob, grad)  # [B, S, C]
        if len(total) and part.rows.numel():  # what row -1 got is zero and goes nowhere
            total.index_add_(0, part.rows.clamp(min=0).flatten(), grad_kv.flatten(0, 1))
        grad_scores.append(grad_score)
    return tile.sums(grad_scores)
