"""Main-KV compression: tokens of a group pooled per channel. Report §2.3, Eq. (1)."""

from jaxtyping import Float
from torch import Tensor

from openv41.ops._dispatch import op


@op
def pool_group(
    kv: Float[Tensor, "M ratio C"], gate: Float[Tensor, "M ratio C"]
) -> Float[Tensor, "M C"]:
    """Average the tokens of each group with a softmax over the tokens, channel by channel."""
    return (kv * gate.softmax(dim=1)).sum(dim=1)
