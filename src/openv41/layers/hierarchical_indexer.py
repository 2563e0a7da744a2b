"""The indexer: which main-KV entries a query reads. Report §2.3.1, §2.3.2.

The first Full decoder layer scores everything and keeps a pool of the best blocks; Reindex layers
choose from that pool.
"""

import math
from dataclasses import dataclass
from typing import Unpack

import torch
from jaxtyping import Complex, Float, Int, UInt8
from torch import Tensor, nn

from openv41 import ops
from openv41.config import ModelConfig, NumericsConfig
from openv41.layers.context import ForwardContext
from openv41.layers.factory import Factory
from openv41.layers.geometry import Segment
from openv41.layers.latents import Latents
from openv41.layers.quantized_linear import Linear, QuantizedLinear, RMSNorm
from openv41.layers.rounding import round_index
from openv41.layers.store import PackedRows, Slot
from openv41.ops.deterministic import TILE_WIDTH
from openv41.plan import LayerPlan

PACKED_WIDTH = 128  # of keys that kernels read packed
MANY_TOKENS = 32  # of a request, from which on they choose before all are scored
PAIRS_LISTED = 1 << 24  # of a token and a candidate, listed at one time


@dataclass
class _Found:
    """What an indexer writes for the tokens of a batch; scores only where a probe wants them."""

    selected: Int[Tensor, "T K"]
    pool: Int[Tensor, "T blocks"]
    scores: Float[Tensor, "T M"] | None = None


def lists_candidates(q: Tensor, numerics: NumericsConfig) -> bool:
    """Whether each token's candidates are gathered apart, not those of neighbours once."""
    return q.is_cuda and not numerics.deterministic


def reads_packed_rows(q: Tensor, numerics: NumericsConfig) -> bool:
    """Whether scores come straight from the packed keys of a store."""
    exact = numerics.score_dtype == "float32" and not numerics.deterministic
    return q.is_cuda and exact and q.shape[-1] == PACKED_WIDTH


class HierarchicalIndexer(nn.Module):
    """Index queries and weights of a Full or Reindex layer; index keys of a Full layer."""

    def __init__(
        self,
        config: ModelConfig,
        plan: LayerPlan,
        numerics: NumericsConfig,
        **made: Unpack[Factory],
    ) -> None:
        super().__init__()
        self.indexer, self.plan, self.numerics = config.indexer, plan, numerics
        heads, dim = self.indexer.num_heads, self.indexer.head_dim
        self.wq_b = QuantizedLinear(config.attention.q_rank, heads * dim, numerics, **made)
        self.weights_proj = Linear(config.hidden_size, heads, numerics, **made)
        if plan.is_kv_source:
            self.wk = Linear(config.attention.head_dim, dim, numerics, **made)
            self.k_norm = RMSNorm(dim, config.norm_eps, **made)

    def keys(self, latent: Float[Tensor, "M C"], rope: Complex[Tensor, "M pairs"]) -> Latents:
        """Index keys from the latents before rotation and rounding."""
        return Latents("index", self.wk(latent), self.k_norm, rope, self.numerics)

    @torch.no_grad()
    def forward(
        self,
        x: Float[Tensor, "T D"],
        q_latent: Float[Tensor, "T rank"],
        ctx: ForwardContext,
        weights: Float[Tensor, "T I"] | None = None,
    ) -> Int[Tensor, "T K"]:
        """Choose entries for each token: ids within its request, ascending, then -1.

        ``weights`` are those of the heads, unscaled, where they are known. The choice has no
        gradient: ``selected_scores`` is what the indexer learns from.
        """
        q, weights = self._queries(q_latent), self.weights_proj(x) if weights is None else weights
        packed = self._packed_keys(q, ctx)
        if packed is not None and ctx.has_fixed_sizes:
            return self._select_at_once(packed, q, weights, ctx)
        found = self._empty(x, ctx)
        from_pool = self.plan.uses_candidates and ctx.candidates is not None
        if packed is None:
            q, weights = self._rounded(q, ctx), weights * self._factor
        apart = from_pool and (ctx.has_fixed_sizes or lists_candidates(q, self.numerics))
        if packed is not None:
            self._select_from_packed(packed, q, weights, ctx, found)
        elif apart:
            self._select_from_own_pools(q, weights, ctx, found)
        select = self._select_from_pool if from_pool else self._select_from_all
        for segment in ctx.segments(self.plan.ratio):
            if packed is None and not apart:
                select(segment, q, weights, ctx, found)
            if found.scores is not None:
                flat, num = segment.token_rows.flatten(), segment.entry_rows.shape[1]
                scores = self._scores(segment, q, weights, ctx).flatten(0, 1)
                found.scores[flat, :num] = scores.to(found.scores.dtype)
        if found.scores is not None:
            ctx.observe(self._name("index_scores"), found.scores)
        if self.plan.publishes_candidates:
            ctx.candidates = self._shown(found.pool, ctx)
        return ctx.observe(self._name("topk_indices"), found.selected)

    def selected_scores(
        self,
        x: Float[Tensor, "T D"],
        q_latent: Float[Tensor, "T rank"],
        rows: Int[Tensor, "T K"],
        ctx: ForwardContext,
    ) -> Float[Tensor, "T K"]:
        """Scores of the chosen rows of the index keys, with gradients for the indexer alone."""
        q = self._rounded(self._queries(q_latent.detach()), ctx)
        weights = self.weights_proj(x.detach()) * self._factor
        keys = ctx.entry_rows(self._keys, self.plan.ratio)
        score_dtype, deterministic = self._score_dtype, self.numerics.deterministic
        return ops.selected_scores(q, weights, keys, rows, score_dtype, deterministic=deterministic)

    def _empty(self, x: Tensor, ctx: ForwardContext) -> _Found:
        most = max(ctx.entries(self.plan.ratio).totals, default=0)
        width = self.indexer.top_k  # of sums over the selection: always this if deterministic
        width = width if self.numerics.deterministic else min(width, most)
        blocks = min(self.indexer.candidate_blocks, -(-most // self.indexer.block_size))
        selected, pool = (torch.full((len(x), n), -1, device=x.device) for n in (width, blocks))
        if not ctx.is_wanted(self._name("index_scores")):
            return _Found(selected, pool)
        wide = torch.promote_types(x.dtype, torch.float32)
        none = torch.full((len(x), most), -torch.inf, device=x.device, dtype=wide)
        return _Found(selected, pool, none)

    def _shown(self, pool: Int[Tensor, "T blocks"], ctx: ForwardContext) -> Int[Tensor, "T blocks"]:
        """The pool, by way of its mask where a probe wants that."""
        if not ctx.is_wanted(self._name("candidate_mask")):
            return pool
        most = max(ctx.entries(self.plan.ratio).totals, default=0)
        size = self.indexer.block_size
        mask = ops.pool_mask(pool, most, size)
        return ops.mask_pool(ctx.observe(self._name("candidate_mask"), mask), size)

    def _name(self, what: str) -> str:
        return f"layers.{self.plan.layer}.{what}"

    def _queries(self, q_latent: Tensor) -> Float[Tensor, "T I J"]:
        q: Tensor = self.wq_b(q_latent).unflatten(-1, (self.indexer.num_heads, -1))
        return q

    @property
    def _factor(self) -> float:
        """Of the weights of the heads."""
        return float(self.indexer.head_dim**-0.5 * self.indexer.num_heads**-0.5)

    def _rounded(self, q: Tensor, ctx: ForwardContext) -> Float[Tensor, "T I J"]:
        rope = ctx.rope(self.plan.ratio)
        q = ops.rotate(q, rope, deterministic=self.numerics.deterministic)
        return round_index(q, self.numerics)

    def _packed(
        self, q: Tensor, weights: Tensor, ctx: ForwardContext
    ) -> tuple[UInt8[Tensor, "T I row"], Float[Tensor, "T I"]]:
        """Rotate, round and pack the queries, as keys are on their way into a cache."""
        return ops.pack_index_queries(q, ctx.rope(self.plan.ratio), weights, self._factor)

    def _select_from_all(
        self,
        segment: Segment,
        q: Tensor,
        weights: Tensor,
        ctx: ForwardContext,
        found: _Found,
    ) -> None:
        """Choose from all visible entries; the candidate source also chooses the pool."""
        flat, num = segment.token_rows.flatten(), segment.entry_rows.shape[1]
        visible = ctx.entries(self.plan.ratio).visible[flat]
        if num <= self.indexer.top_k and not self.plan.publishes_candidates:
            scores = torch.zeros(len(flat), num, device=flat.device)
        else:
            scores = self._scores(segment, q, weights, ctx).flatten(0, 1)
            self._count(scores.numel(), ctx)
        top = ops.select_top_k(scores, None, self.indexer.top_k, visible)
        found.selected[flat, : top.shape[1]] = top
        if self.plan.publishes_candidates:
            pool = ops.choose_candidates(
                scores, visible, self.indexer.candidate_blocks, self.indexer.block_size
            )
            found.pool[flat, : pool.shape[1]] = pool

    def _select_from_pool(
        self,
        segment: Segment,
        q: Tensor,
        weights: Tensor,
        ctx: ForwardContext,
        found: _Found,
    ) -> None:
        """Choose from the candidates, the only entries whose keys are read."""
        assert ctx.candidates is not None, f"{self._name('indexer')}: no pool was published"
        rows, totals = segment.token_rows, segment.exists.sum(1)
        size, group = self.indexer.block_size, 1
        if self.numerics.deterministic:  # an entry keeps its place in a tile of scores
            group = math.lcm(size, TILE_WIDTH) // size
        pools = ctx.candidates[rows]
        entries, own = ops.merge_pools(pools, segment.entry_rows.shape[1], size, group)
        own &= (entries < totals[:, None])[:, None]  # [B, T, union]
        read = own.any(dim=1)  # [B, union]
        picked = ctx.pick_entries(
            self._keys, self.plan.ratio, (segment.entry_rows[:, :1] + entries)[read]
        )
        keys = picked.new_zeros(*entries.shape, picked.shape[-1])
        keys[read] = picked
        scores = self._score(q[rows], weights[rows], keys)  # [B, T, union]
        self._count(scores.numel(), ctx)
        visible = ctx.entries(self.plan.ratio).visible[rows]  # [B, T]
        allowed = own & (entries[:, None] < visible[..., None])
        places = ops.select_top_k(scores.flatten(0, 1), allowed.flatten(0, 1), self.indexer.top_k)
        entries = entries[:, None].expand(scores.shape).flatten(0, 1)
        top = torch.where(places < 0, -1, entries.gather(1, places.clamp(min=0)))
        width = min(top.shape[1], found.selected.shape[1])  # behind it are only -1
        found.selected[rows.flatten(), :width] = top[:, :width]

    def _packed_keys(self, q: Tensor, ctx: ForwardContext) -> PackedRows | None:
        """The store's own rows, where scores come from them and nobody asks for all scores."""
        if ctx.is_wanted(self._name("index_scores")) or not reads_packed_rows(q, self.numerics):
            return None
        return ctx.packed_rows(self._keys)

    def _select_from_packed(
        self, keys: PackedRows, q: Tensor, weights: Tensor, ctx: ForwardContext, found: _Found
    ) -> None:
        """Choose from packed keys; a long run of tokens without all of its scores at a time."""
        every, (q, weights) = tuple(range(len(ctx.batch.requests))), self._packed(q, weights, ctx)
        visible, size = ctx.entries(self.plan.ratio).visible, self.indexer.block_size
        blocks = self.indexer.candidate_blocks if self.plan.publishes_candidates else 0
        pools = ctx.candidates if self.plan.uses_candidates else None
        for segment in ctx.segments(self.plan.ratio):
            rows, num = segment.token_rows, segment.entry_rows.shape[1]
            flat, table = rows.flatten(), keys.table
            if segment.requests != every:
                table = table[torch.tensor(segment.requests, device=table.device)]
            if pools is None and len(rows) == 1 and rows.shape[1] >= MANY_TOKENS:
                given = q[flat], weights[flat], keys.stored, table[0], visible[flat]
                where = keys.per_page, num, self.indexer.top_k
                top, pool = ops.packed_index_choice(*given, *where, blocks, size)
            else:
                each = q, weights, visible, visible if pools is None else pools
                parts = [x[rows] for x in each]
                given = parts[0], parts[1], keys.stored, table, parts[2]
                own = None if pools is None else parts[3]
                scores = ops.packed_index_scores(*given, keys.per_page, num, own, size)
                scores = scores.flatten(0, 1)
                top = ops.select_top_k(scores, None, self.indexer.top_k)
                pool = ops.choose_candidates(scores, visible[flat], blocks, size) if blocks else top
            if pools is not None:
                top = ops.pool_entries(top, pools[flat], size)
            self._count(rows.numel() * (num if pools is None else pools.shape[1] * size), ctx)
            width = min(top.shape[1], found.selected.shape[1])  # behind it are only -1
            found.selected[flat, :width] = top[:, :width]
            if blocks:
                found.pool[flat, : pool.shape[1]] = pool

    def _select_at_once(
        self, keys: PackedRows, q: Tensor, weights: Tensor, ctx: ForwardContext
    ) -> Int[Tensor, "T K"]:
        """Choose for all tokens from packed keys, each token a request of its own."""
        q, weights = self._packed(q, weights, ctx)
        entries, size = ctx.entries(self.plan.ratio), self.indexer.block_size
        pools = ctx.candidates if self.plan.uses_candidates else None
        own = None if pools is None else pools[:, None]
        given = q[:, None], weights[:, None], keys.stored, keys.table, entries.visible[:, None]
        where = keys.per_page, entries.totals[0], own, size
        scores = ops.packed_index_scores(*given, *where)[:, 0]
        self._count(scores.numel(), ctx)
        top = ops.select_top_k(scores, None, self.indexer.top_k)
        if self.plan.publishes_candidates:
            most = self.indexer.candidate_blocks
            ctx.candidates = ops.choose_candidates(scores, entries.visible, most, size)
        return top if pools is None else ops.pool_entries(top, pools, size)

    def _within(self, like: Tensor) -> Int[Tensor, " size"]:
        return torch.arange(self.indexer.block_size, device=like.device)

    def _select_from_own_pools(
        self, q: Tensor, weights: Tensor, ctx: ForwardContext, found: _Found
    ) -> None:
        """Choose from the candidates of each token alone: no size depends on what they are."""
        assert ctx.candidates is not None, f"{self._name('indexer')}: no pool was published"
        size, known = self.indexer.block_size, ctx.entries(self.plan.ratio)
        keys = ctx.entry_rows(self._keys, self.plan.ratio)
        within = self._within(q)
        tokens = torch.arange(len(q), device=q.device)
        for part in tokens.split(max(1, PAIRS_LISTED // max(1, ctx.candidates.shape[1] * size))):
            pool = ctx.candidates[part, :, None]
            entries = torch.where(pool < 0, -1, pool * size + within).flatten(1)  # [T, listed]
            entries = torch.where(entries < known.visible[part, None], entries, -1)
            rows = torch.where(entries < 0, -1, entries + known.first_rows[part, None])
            scores = ops.selected_scores(q[part], weights[part], keys, rows, self._score_dtype)
            self._count(scores.numel(), ctx)
            places = ops.select_top_k(scores, None, self.indexer.top_k)
            top = torch.where(places < 0, -1, entries.gather(1, places.clamp(min=0)))
            width = min(top.shape[1], found.selected.shape[1])  # behind it are only -1
            found.selected[part, :width] = top[:, :width]

    def _count(self, pairs: int, ctx: ForwardContext) -> None:
        done = ctx.work.entries_scored
        done[self.plan.layer] = done.get(self.plan.layer, 0) + pairs

    @property
    def _keys(self) -> Slot:
        return Slot("index", self.plan.kv_source)

    def _scores(
        self, segment: Segment, q: Tensor, weights: Tensor, ctx: ForwardContext
    ) -> Float[Tensor, "B T M"]:
        rows, keys = segment.token_rows, ctx.segment_rows(self._keys, self.plan.ratio, segment)
        return self._score(q[rows], weights[rows], keys)

    def _score(
        self,
        q: Float[Tensor, "B T I J"],
        weights: Float[Tensor, "B T I"],
        keys: Float[Tensor, "B M J"],
    ) -> Float[Tensor, "B T M"]:
        score_dtype, deterministic = self._score_dtype, self.numerics.deterministic
        return ops.index_scores(q, weights, keys, score_dtype, deterministic=deterministic)

    @property
    def _score_dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.numerics.score_dtype)
        return found
