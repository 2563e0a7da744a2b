"""Products of one input, and what stands around them, that few rows need not pay for apart.

Report §2.3.
"""

from jaxtyping import Complex, Float
from torch import Tensor

from openv41.config import Rounding
from openv41.ops._dispatch import op
from openv41.ops.linear import quantized_linear
from openv41.ops.norm import rms_norm
from openv41.ops.rope import rotate


def separate_products(
    x: Tensor, weights: tuple[Tensor, ...], rounding: Rounding, *, deterministic: bool = False
) -> tuple[Tensor, ...]:
    """``joint_linear``, one after the other."""
    return tuple(quantized_linear(x, w, rounding, deterministic=deterministic) for w in weights)


def composed_queries(  # noqa: PLR0917 -- those of rotated_queries
    latent: Tensor,
    norm: Tensor,
    eps: float,
    weight: Tensor,
    table: Tensor,
    num_heads: int,
    rounding: Rounding,
    *,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor]:
    """``rotated_queries``, step by step."""
    normed = rms_norm(latent, norm, eps)
    product = quantized_linear(normed, weight, rounding, deterministic=deterministic)
    heads = product.unflatten(-1, (num_heads, -1))
    return normed, rotate(heads, table, deterministic=deterministic)


@op
def joint_linear(
    x: Float[Tensor, "T D"],
    weights: tuple[Tensor, ...],
    rounding: Rounding = "off",
    *,
    deterministic: bool = False,
) -> tuple[Tensor, ...]:
    """``quantized_linear`` of one input with several weights [F, D], of any F each."""
    return separate_products(x, weights, rounding, deterministic=deterministic)


@op
def rotated_queries(  # noqa: PLR0917 -- the parts in their order
    latent: Float[Tensor, "T rank"],
    norm: Float[Tensor, " rank"],
    eps: float,
    weight: Float[Tensor, "columns rank"],
    table: Complex[Tensor, "T pairs"],
    num_heads: int,
    rounding: Rounding = "off",
    *,
    deterministic: bool = False,
) -> tuple[Float[Tensor, "T rank"], Float[Tensor, "T H C"]]:
    """Normed latents, and their product with a weight whose heads are rotated.

    ``rms_norm``, ``quantized_linear`` and ``rotate``, each rounded to the dtype of ``latent``.
    """
    given = latent, norm, eps, weight, table, num_heads, rounding
    return composed_queries(*given, deterministic=deterministic)
