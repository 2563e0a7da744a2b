"""Main-KV compression: tokens of a group pooled per channel. Report §2.3, Eq. (1)."""

import torch
from jaxtyping import Float
from torch import Tensor

from openv41.ops._dispatch import op
from openv41.ops.deterministic import elementwise


@op
def pool_group(
    kv: Float[Tensor, "M ratio C"],
    gate: Float[Tensor, "M ratio C"],
    *,
    deterministic: bool = False,
) -> Float[Tensor, "M C"]:
    """Average the tokens of each group with a softmax over the tokens, channel by channel."""
    if deterministic:
        powers = elementwise(gate - gate.amax(dim=1, keepdim=True), torch.exp)
        share = powers / powers.sum(dim=1, keepdim=True)
    else:
        share = gate.softmax(dim=1)
    return (kv * share).sum(dim=1)
