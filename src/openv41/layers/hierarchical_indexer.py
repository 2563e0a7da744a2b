"""The indexer: which main-KV entries a query reads. Report §2.3.1, §2.3.2.

The first Full decoder layer scores everything and keeps a pool of the best blocks; Reindex layers
choose from that pool.
"""

from dataclasses import dataclass
from typing import Unpack

import torch
from jaxtyping import Bool, Complex, Float, Int
from torch import Tensor, nn

from openv41 import ops
from openv41.config import ModelConfig, NumericsConfig
from openv41.layers.context import ForwardContext
from openv41.layers.factory import Factory
from openv41.layers.geometry import Segment
from openv41.layers.quantized_linear import Linear, QuantizedLinear, RMSNorm
from openv41.layers.rounding import round_index
from openv41.plan import LayerPlan


@dataclass
class _Found:
    """What an indexer writes for the tokens of a batch; scores only where a probe wants them."""

    selected: Int[Tensor, "T K"]
    pool: Bool[Tensor, "T M"]
    scores: Float[Tensor, "T M"] | None = None

    @classmethod
    def empty(cls, tokens: int, entries: int, width: int, device: torch.device) -> "_Found":
        return cls(
            torch.full((tokens, width), -1, device=device),
            torch.zeros(tokens, entries, dtype=torch.bool, device=device),
        )


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

    def keys(
        self, latent: Float[Tensor, "M C"], rope: Complex[Tensor, "M pairs"]
    ) -> Float[Tensor, "M J"]:
        """Index keys from the latents before rotation and rounding."""
        keys = self.k_norm(self.wk(latent))
        keys = ops.rotate(keys, rope, deterministic=self.numerics.deterministic)
        return round_index(keys, self.numerics)

    @torch.no_grad()
    def forward(
        self, x: Float[Tensor, "T D"], q_latent: Float[Tensor, "T rank"], ctx: ForwardContext
    ) -> Int[Tensor, "T K"]:
        """Choose entries for each token: ids within its request, ascending, then -1.

        The choice has no gradient, and neither have the indexer's parameters through it.
        """
        q, weights = self._queries(x, q_latent, ctx)
        most = max(ctx.entries(self.plan.ratio).totals, default=0)
        width = self.indexer.top_k  # of sums over the selection: always this if deterministic
        width = width if self.numerics.deterministic else min(width, most)
        found = _Found.empty(len(x), most, width, x.device)
        if ctx.is_wanted(self._name("index_scores")):
            wide = torch.promote_types(x.dtype, torch.float32)
            found.scores = torch.full((len(x), most), -torch.inf, device=x.device, dtype=wide)
        for segment in ctx.segments(self.plan.ratio):
            self._select_segment(segment, q, weights, ctx, found)
        if found.scores is not None:
            ctx.observe(self._name("index_scores"), found.scores)
        if self.plan.publishes_candidates:
            ctx.candidates = ctx.observe(self._name("candidate_mask"), found.pool)
        return ctx.observe(self._name("topk_indices"), found.selected)

    def _name(self, what: str) -> str:
        return f"layers.{self.plan.layer}.{what}"

    def _queries(
        self, x: Tensor, q_latent: Tensor, ctx: ForwardContext
    ) -> tuple[Float[Tensor, "T I J"], Float[Tensor, "T I"]]:
        heads, dim = self.indexer.num_heads, self.indexer.head_dim
        q = self.wq_b(q_latent).unflatten(-1, (heads, dim))
        rope = ctx.rope(self.plan.ratio)
        q = ops.rotate(q, rope, deterministic=self.numerics.deterministic)
        weights = self.weights_proj(x) * (dim**-0.5 * heads**-0.5)
        return round_index(q, self.numerics), weights

    def _select_segment(
        self,
        segment: Segment,
        q: Tensor,
        weights: Tensor,
        ctx: ForwardContext,
        found: _Found,
    ) -> None:
        """Score and choose for the requests of one segment."""
        rows = segment.token_rows  # [B, T]
        flat, num = rows.flatten(), segment.entry_rows.shape[1]
        visible = ctx.entries(self.plan.ratio).visible[flat]
        allowed = torch.arange(num, device=flat.device) < visible[:, None]  # [B*T, M]
        if self.plan.uses_candidates and ctx.candidates is not None:
            allowed &= ctx.candidates[flat, :num]
        everything = num <= self.indexer.top_k and not self.plan.publishes_candidates
        if everything and found.scores is None:
            found.selected[flat, :num] = ops.select_top_k(
                torch.zeros(allowed.shape, device=flat.device), allowed, num
            )
            return
        scores = self._scores(segment, q, weights, ctx).flatten(0, 1)  # [B*T, M]
        top = ops.select_top_k(scores, allowed, self.indexer.top_k)
        found.selected[flat, : top.shape[1]] = top
        if self.plan.publishes_candidates:
            found.pool[flat, :num] = ops.choose_candidates(
                scores, visible, self.indexer.candidate_blocks, self.indexer.block_size
            )
        if found.scores is not None:
            found.scores[flat, :num] = scores.to(found.scores.dtype)

    def _scores(
        self, segment: Segment, q: Tensor, weights: Tensor, ctx: ForwardContext
    ) -> Float[Tensor, "B T M"]:
        keys = ctx.index_keys[self.plan.kv_source]
        score_dtype = getattr(torch, self.numerics.score_dtype)
        rows = segment.token_rows
        return ops.index_scores(
            q[rows],
            weights[rows],
            keys[segment.entry_rows],
            score_dtype,
            deterministic=self.numerics.deterministic,
        )
