"""CSA2: compressed sparse attention whose KV and selections are shared by layers. Report §2.3.1.

Full layers compress their input into main KV, Reindex layers choose entries anew, Reuse layers
take the latest choice; every layer has its own sliding window.
"""

from typing import Unpack

import torch
from jaxtyping import Complex, Float, Shaped
from torch import Tensor, nn

from openv41 import ops
from openv41.config import ModelConfig, NumericsConfig
from openv41.layers.context import ForwardContext
from openv41.layers.factory import Factory
from openv41.layers.hierarchical_indexer import HierarchicalIndexer
from openv41.layers.latent_attention import LatentAttention
from openv41.layers.latents import Latents
from openv41.layers.objectives import LayerLosses
from openv41.layers.quantized_linear import Linear, RMSNorm
from openv41.layers.store import Slot
from openv41.plan import LayerPlan

Rows = tuple[Shaped[Tensor, "_ _"], ops.Keys]


class Compressor(nn.Module):
    """Normed latents of complete groups of tokens. Report §2.2, Eq. (1).

    Ratio 2 pools two tokens channel by channel, in float32; ratio 1 has no gate and no pooling.
    """

    def __init__(
        self,
        config: ModelConfig,
        plan: LayerPlan,
        numerics: NumericsConfig,
        **made: Unpack[Factory],
    ) -> None:
        super().__init__()
        dim, width = config.hidden_size, config.attention.head_dim
        self.plan, self.numerics = plan, numerics
        self.wkv = Linear(dim, width, numerics, **made)
        if plan.ratio > 1:
            self.wgate = Linear(dim, width, numerics, **made)
        self.norm = RMSNorm(width, config.norm_eps, **made)

    def forward(
        self, x: Float[Tensor, "T D"], ctx: ForwardContext, product: Tensor | None = None
    ) -> Float[Tensor, "M C"]:
        """Compress the groups that this batch completes; the rest waits in the store.

        ``product`` is what ratio 1 compresses to, where it is known.
        """
        if product is None:
            product = self.wkv(x) if self.plan.ratio == 1 else self._pool(x, ctx)
        normed: Tensor = self.norm(product)
        return normed

    def _pool(self, x: Float[Tensor, "T D"], ctx: ForwardContext) -> Float[Tensor, "M C"]:
        slot, projected = Slot("pending", self.plan.layer), (self.wkv.wide(x), self.wgate.wide(x))
        return ctx.pool_with_pending(slot, self.plan.ratio, *projected).to(x.dtype)


class CSA2Attention(LatentAttention):
    """One attention sub-layer: queries over window KV, selected main KV and the sink."""

    def __init__(
        self,
        config: ModelConfig,
        plan: LayerPlan,
        numerics: NumericsConfig,
        **made: Unpack[Factory],
    ) -> None:
        super().__init__(config, numerics, **made)
        self.plan = plan
        if plan.is_kv_source:
            self.compressor = Compressor(config, plan, numerics, **made)
        if plan.is_index_source:
            self.indexer = HierarchicalIndexer(config, plan, numerics, **made)

    def forward(self, x: Float[Tensor, "T D"], ctx: ForwardContext) -> Float[Tensor, "T D"]:
        """Attend for every token of the batch."""
        plan, rope = self.plan, ctx.rope(self.plan.ratio)
        others = self._others(ctx)
        latent, kv, *products = self.projected(x, *others.values())
        known = dict(zip(others, products, strict=True))
        q_latent, q = self.queries(latent, rope)
        near = ctx.window(*self._window_kv(kv, ctx))
        if plan.is_kv_source:
            self._publish_main_kv(x, ctx, known.get("main"))
        if plan.is_index_source:
            self._select(x, q_latent, ctx, known.get("index"))
        far = self._main_kv(ctx, near[0])
        if ctx.losses is not None and ctx.losses.teaches(plan):
            self._teach(ctx.losses, q, near, ctx)
        return self.project_out(self._attended(q, near, far, ctx.inverse_rope(plan.ratio)))

    def write_kv(self, x: Float[Tensor, "T D"], ctx: ForwardContext, *, window: bool) -> None:
        """Leave the KV of tokens that do nothing else in this layer."""
        if window:
            ctx.window(*self._window_kv(self.wkv(x), ctx))
        if self.plan.is_kv_source:
            self._publish_main_kv(x, ctx)

    def _attended(
        self,
        q: Float[Tensor, "T H C"],
        near: Rows,
        far: Rows,
        turn: Complex[Tensor, "T pairs"],
    ) -> Float[Tensor, "T H C"]:
        """Attend to rows of numbers, or to packed ones where they are stored; rotate the sums."""
        (window, window_keys), (main, main_keys) = near, far
        rest, deterministic = (self.sink, self.scale), self.numerics.deterministic
        if window.dtype == torch.uint8:
            listed = window_keys.listed, main_keys.listed
            return ops.packed_sparse_attention(
                q, window, listed[0], main, listed[1], *rest, turn, deterministic=deterministic
            )
        out = ops.sparse_attention(
            q, window, window_keys, main, main_keys, *rest, deterministic=deterministic
        )
        return self.rotate(out, turn)

    def _others(self, ctx: ForwardContext) -> dict[str, Tensor]:
        """Weights of what else a few tokens are multiplied with, in one call."""
        plan, found = self.plan, dict[str, Tensor]()
        if not ctx.has_fixed_sizes or self.numerics.linear_input != "off":
            return found
        if plan.is_index_source:
            found["index"] = self.indexer.weights_proj.value()
        if plan.is_kv_source and plan.ratio == 1:
            found["main"] = self.compressor.wkv.value()
        return found

    def _select(
        self, x: Tensor, q_latent: Tensor, ctx: ForwardContext, weights: Tensor | None
    ) -> None:
        """Choose entries, for the layers up to the next index source too."""
        layer, main = self.plan.layer, Slot("main", self.plan.kv_source)
        given = x, q_latent, ctx, weights
        chosen = ctx.once(f"layers.{layer}.entries", lambda: self.indexer(*given))
        ctx.publish_selection(layer, main, self.plan.ratio, chosen)
        if ctx.losses is not None and ctx.losses.wanted.indexer:
            rows = ctx.selections[layer].rows
            ctx.losses.scores[layer] = self.indexer.selected_scores(x, q_latent, rows, ctx)
            ctx.losses.rows[layer] = ctx.counted_rows(layer)

    def _teach(
        self,
        losses: LayerLosses,
        q: Float[Tensor, "T H C"],
        window: Rows,
        ctx: ForwardContext,
    ) -> None:
        """Hand in how much this layer attends to each selected entry."""
        source = self.plan.index_source
        handed_in = losses.masses.setdefault(source, {})
        if self.plan.layer in handed_in:  # by the first run of a layer that runs twice
            return
        chosen = ctx.selections[source]
        mass = ops.attention_mass(q, *window, chosen.kv, chosen.rows, self.sink, self.scale)
        handed_in[self.plan.layer] = mass

    def _main_kv(self, ctx: ForwardContext, window: Tensor) -> Rows:
        if not self.plan.ratio:
            return ctx.no_main(window)
        chosen = ctx.selections[self.plan.index_source]
        ctx.work.entries_read[self.plan.layer] = chosen.read
        return chosen.kv, chosen.keys

    def _window_kv(self, kv: Float[Tensor, "T C"], ctx: ForwardContext) -> tuple[Slot, Latents]:
        rope = ctx.rope(self.plan.ratio)
        latents = Latents("window", kv, self.kv_norm, rope, self.numerics)
        return Slot("window", self.plan.layer), latents

    def _publish_main_kv(
        self, x: Tensor, ctx: ForwardContext, product: Tensor | None = None
    ) -> None:
        """Compress, then make index keys (before rotation and rounding) and main KV."""
        layer, ratio = self.plan.layer, self.plan.ratio
        rope = ctx.rope(ratio, of_entries=True)
        latent = self.compressor(x, ctx, product)
        entries = Latents("main", latent, None, rope, self.numerics)
        ctx.publish_entries(Slot("main", layer), ratio, entries)
        keys = self.indexer.keys(latent.detach(), rope)  # the indexer alone learns from them
        ctx.publish_entries(Slot("index", layer), ratio, keys)
