"""The linear layers of all experts at once. Report §2.1.1."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from openv41.ops._dispatch import op
from openv41.ops.linear import linear


@op
def grouped_linear(
    rows: Float[Tensor, "pairs D"],
    weight: Float[Tensor, "E F D"],
    counts: Int[Tensor, " E"],
    *,
    deterministic: bool = False,
) -> Float[Tensor, "pairs F"]:
    """Multiply each expert's rows by its weight: rows @ weight^T, in the dtype of ``rows``.

    Rows are sorted by expert; ``counts`` says how many each has, and sums to all of them.
    """
    each = weight.unbind(0) if torch.is_grad_enabled() else weight  # one node for the stack
    sizes = counts.tolist()
    used = [expert for expert, size in enumerate(sizes) if size]
    parts = rows.split([sizes[expert] for expert in used])
    products = [
        linear(part, each[expert], deterministic=deterministic)
        for part, expert in zip(parts, used, strict=True)
    ]
    return torch.cat(products) if products else rows.new_empty(0, weight.shape[1])
