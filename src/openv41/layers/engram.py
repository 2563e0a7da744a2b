"""Engram: a gated n-gram memory added to every residual stream. Report §2.4.2."""

from typing import Protocol, Unpack, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from openv41 import ops
from openv41.config import EngramConfig, ModelConfig, NumericsConfig
from openv41.layers.context import ForwardContext
from openv41.layers.factory import Factory
from openv41.layers.quantized_linear import QuantizedLinear, QuantizedTable
from openv41.ngram_hash_constants import hash_constants


@runtime_checkable
class PrefetchingTable(Protocol):
    """A table outside the model, in the place of the layer's own: its rows take time to come."""

    reads_on_host: bool  # so that the host must know the rows

    def prefetch(self, rows: Int[Tensor, "T lookups"]) -> None:
        """Start reading the rows that the next lookup asks for."""


class Engram(nn.Module):
    """Memory of one layer, applied at its very start, before mixing coefficients are predicted."""

    multipliers: Tensor
    primes: Tensor
    offsets: Tensor

    def __init__(
        self,
        layer: int,
        config: ModelConfig,
        engram: EngramConfig,
        numerics: NumericsConfig,
        **made: Unpack[Factory],
    ) -> None:
        super().__init__()
        self.layer, self.norm_eps, self.numerics = layer, config.norm_eps, numerics
        streams, dim = config.mhc.num_streams, config.hidden_size
        place = engram.layer_ids.index(layer)
        self.table = QuantizedTable(
            engram.num_embeddings[place], engram.head_dim, weight_format="fp8_rows", **made
        )
        width = engram.num_lookups * engram.head_dim
        self.wkv = QuantizedLinear(width, (streams + 1) * dim, numerics, **made)
        self.q_weight = nn.Parameter(torch.empty(streams, dim, **made))
        self.k_weight = nn.Parameter(torch.empty(streams, dim, **made))
        constants = hash_constants(engram)[place]
        device = made.get("device") or "cpu"
        if torch.device(device).type == "meta":
            device = "cpu"  # the constants are derived, not loaded: always real
        for name in ("multipliers", "primes", "offsets"):
            values = torch.tensor(getattr(constants, name), dtype=torch.int64, device=device)
            self.register_buffer(name, values, persistent=False)

    def prefetch(self, ctx: ForwardContext) -> None:
        """Let a table outside the model start reading, long before its layer's turn comes."""
        if isinstance(self.table, PrefetchingTable) and self.layer not in ctx.engram_rows:
            rows = ctx.engram_rows[self.layer] = self._hash(ctx)
            self.table.prefetch(rows)

    def forward(self, x: Float[Tensor, "T N D"], ctx: ForwardContext) -> Float[Tensor, "T N D"]:
        """Look up the n-grams that end at each token and add them; image rows pass unchanged."""
        found = self._found(x.dtype, ctx)
        keys, value = self.wkv(found).split([x.shape[1] * x.shape[2], x.shape[2]], dim=-1)
        keys = keys.unflatten(-1, x.shape[1:])
        weights = self.q_weight, self.k_weight, self.norm_eps
        deterministic = self.numerics.deterministic
        if not ctx.is_wanted(f"layers.{self.layer}.engram_gate"):
            return ops.engram_update(
                x, keys, value, *weights, ctx.is_image, deterministic=deterministic
            )
        gate = ops.engram_gate(x, keys, *weights, deterministic=deterministic)
        if ctx.is_image is not None:
            gate = gate.masked_fill(ctx.is_image[:, None], 0)
        gate = ctx.observe(f"layers.{self.layer}.engram_gate", gate)
        return ops.add_gated(x, gate, value)

    def _found(self, dtype: torch.dtype, ctx: ForwardContext) -> Float[Tensor, "T memory"]:
        """Values of each token's rows, in one step where nobody asks for the rows."""
        name, rows = f"layers.{self.layer}.engram_hash_ids", ctx.engram_rows.get(self.layer)
        own = isinstance(self.table, QuantizedTable) and self.table.weight is None
        if own and rows is None and not ctx.is_wanted(name):
            assert ctx.recent_ids is not None, "the model must set recent_ids before its layers"
            constants = self.multipliers, self.primes, self.offsets, ctx.pad_id
            table = self.table.codes, self.table.scales
            return ops.lookup_ngrams(ctx.recent_ids, *constants, *table, dtype)
        rows = ctx.observe(name, self._hash(ctx) if rows is None else rows)
        values: Tensor = self.table(rows, dtype)
        return values.flatten(1)

    def _hash(self, ctx: ForwardContext) -> Int[Tensor, "T lookups"]:
        assert ctx.recent_ids is not None, "the model must set recent_ids before its layers"
        return ops.hash_ngrams(
            ctx.recent_ids, self.multipliers, self.primes, self.offsets, ctx.pad_id
        )
