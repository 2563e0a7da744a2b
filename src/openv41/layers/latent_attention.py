"""What every attention sub-layer is made of: latent queries, one latent KV head. Report §2.3."""

from typing import ClassVar, Unpack

import torch
from jaxtyping import Complex, Float
from torch import Tensor, nn

from openv41 import ops
from openv41.config import ModelConfig, NumericsConfig
from openv41.layers.factory import Factory
from openv41.layers.islands import Float32Islands, island
from openv41.layers.quantized_linear import QuantizedLinear, RMSNorm
from openv41.ops._dispatch import wants_gradient
from openv41.ops.precision import cast


class LatentAttention(Float32Islands):
    """Projections and the sink; keys are also the values, of one head that all queries share."""

    islands: ClassVar[tuple[str, ...]] = ("sink",)

    def __init__(
        self, config: ModelConfig, numerics: NumericsConfig, **made: Unpack[Factory]
    ) -> None:
        super().__init__()
        attn, dim = config.attention, config.hidden_size
        self.attn, self.numerics = attn, numerics
        self.scale = attn.head_dim**-0.5
        width = attn.num_heads * attn.head_dim
        grouped = attn.o_groups * attn.o_rank
        self.wq_a = QuantizedLinear(dim, attn.q_rank, numerics, **made)
        self.q_norm = RMSNorm(attn.q_rank, config.norm_eps, **made)
        self.wq_b = QuantizedLinear(attn.q_rank, width, numerics, **made)
        self.wkv = QuantizedLinear(dim, attn.head_dim, numerics, **made)
        self.kv_norm = RMSNorm(attn.head_dim, config.norm_eps, **made)
        self.wo_a = QuantizedLinear(width // attn.o_groups, grouped, numerics, **made)
        self.wo_b = QuantizedLinear(grouped, dim, numerics, **made)
        self.sink = nn.Parameter(torch.empty(attn.num_heads, **island(made)))

    def projected(self, x: Float[Tensor, "T D"], *others: Tensor) -> tuple[Tensor, ...]:
        """Latents of the queries and of window KV, before their norms; products with others."""
        weights = self.wq_a.value(x.dtype), self.wkv.value(x.dtype), *others
        rounding, deterministic = self.numerics.linear_input, self.numerics.deterministic
        return ops.joint_linear(x, weights, rounding, deterministic=deterministic)

    def queries(
        self, latent: Float[Tensor, "T rank"], rope: Complex[Tensor, "T pairs"]
    ) -> tuple[Float[Tensor, "T rank"], Float[Tensor, "T H C"]]:
        """Normed latents of the queries, and the rotated queries of every head."""
        return ops.rotated_queries(
            latent,
            self.q_norm.weight,
            self.q_norm.eps,
            self.wq_b.value(latent.dtype),
            rope,
            self.attn.num_heads,
            self.numerics.linear_input,
            deterministic=self.numerics.deterministic,
        )

    def rotate(self, x: Tensor, rope: Complex[Tensor, "T pairs"]) -> Tensor:
        """Rotate the last channels by a table."""
        return ops.rotate(x, rope, deterministic=self.numerics.deterministic)

    def project_out(self, out: Float[Tensor, "T H C"]) -> Float[Tensor, "T D"]:
        """Two-step output projection; the first is grouped by heads and its input not rounded."""
        groups = self.attn.o_groups
        inputs = out.flatten(1).unflatten(1, (groups, -1))  # [T, G, H/G*C]
        weight = cast(self.wo_a.value(out.dtype), out.dtype).unflatten(0, (groups, -1))
        if (len(out) == 1 or out.is_cuda) and not self.numerics.deterministic:  # one call for all
            grouped = _products_of_groups(inputs, weight).flatten(1)
        else:
            parts = [
                ops.linear(inputs[:, g], weight[g], deterministic=self.numerics.deterministic)
                for g in range(groups)
            ]
            grouped = torch.cat(parts, dim=-1)
        projected: Tensor = self.wo_b(grouped)
        return projected


def _products_of_groups(
    inputs: Float[Tensor, "T G C"], weight: Float[Tensor, "G F C"]
) -> Float[Tensor, "T G F"]:
    """One product for each group; on a GPU they are written where they belong."""
    each = inputs.transpose(0, 1), weight.mT
    if not inputs.is_cuda or wants_gradient(inputs, weight):
        return torch.bmm(*each).transpose(0, 1)
    out = inputs.new_empty(*inputs.shape[:2], weight.shape[1])
    torch.bmm(*each, out=out.transpose(0, 1))
    return out
