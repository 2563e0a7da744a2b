"""The feed-forward of a few tokens: their experts and the shared one, summed. Report §2.1.1."""

from jaxtyping import Float
from torch import Tensor

from openv41.config import Rounding
from openv41.ops._dispatch import op
from openv41.ops.grouped_linear import grouped_linear
from openv41.ops.linear import quantized_linear, rounded_input
from openv41.ops.pairs import combine, take_pairs
from openv41.ops.precision import cast
from openv41.ops.routed import Routed
from openv41.ops.swiglu import clamped_swiglu

Weights = tuple[Tensor, Tensor, Tensor]  # gate, up, down; of experts stacked


def composed_mixture(  # noqa: PLR0917 -- those of expert_mixture
    x: Tensor,
    routed: Routed,
    experts: Weights,
    shared: Weights,
    limit: float,
    rounding: Rounding = "off",
) -> Tensor:
    """``expert_mixture``, step by step."""

    def product(inputs: Tensor, stack: Tensor) -> Tensor:
        rounded = rounded_input(inputs, rounding)
        return cast(grouped_linear(rounded, stack, routed.counts), x.dtype)

    rows = take_pairs(x, routed.order, routed.weights.shape[1])
    shares = routed.weights.flatten().index_select(0, routed.order)
    hidden = clamped_swiglu(product(rows, experts[0]), product(rows, experts[1]), limit, shares)
    out = combine(product(hidden, experts[2]), routed.order, routed.weights.shape[1])
    gate, up = (quantized_linear(x, weight, rounding) for weight in shared[:2])
    own = quantized_linear(clamped_swiglu(gate, up, limit), shared[2], rounding)
    return cast(out + own, x.dtype)


@op
def expert_mixture(  # noqa: PLR0917 -- tokens, their way, weights and two constants
    x: Float[Tensor, "T D"],
    routed: Routed,
    experts: Weights,
    shared: Weights,
    limit: float,
    rounding: Rounding = "off",
) -> Float[Tensor, "T D"]:
    """Sum of the chosen experts' weighted outputs and the shared expert's, rounded once.

    Each expert is down(silu(min(gate, limit)) * clamp(up, -limit, limit) * weight); products and
    what lies between them have the dtype of ``x``, the sum at least float32.
    """
    return composed_mixture(x, routed, experts, shared, limit, rounding)
