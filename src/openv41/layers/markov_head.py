"""First-order dependence of a drafted token on the one before it. Report §2.4.3."""

from typing import Unpack

from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from openv41.config import NumericsConfig
from openv41.layers.embedding import Embedding
from openv41.layers.factory import Factory
from openv41.layers.quantized_linear import Linear
from openv41.ops.precision import widened


class MarkovHead(nn.Module):
    """Low-rank bias of the draft logits: B(a, .) = W2 W1[a], in at least float32."""

    def __init__(
        self, vocab_size: int, rank: int, numerics: NumericsConfig, **made: Unpack[Factory]
    ) -> None:
        super().__init__()
        self.embed = Embedding(vocab_size, rank, **made)  # W1
        self.head = Linear(rank, vocab_size, numerics, **made)  # W2

    def features(self, previous: Int[Tensor, "..."]) -> Float[Tensor, "... rank"]:
        """W1 of the previous tokens."""
        return widened(F.embedding(previous, self.embed.weight))

    def forward(self, features: Float[Tensor, "... rank"]) -> Float[Tensor, "... V"]:
        """Bias of every token after the previous ones."""
        bias: Tensor = self.head(features)
        return bias
