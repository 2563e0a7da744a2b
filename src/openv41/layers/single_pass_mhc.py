"""Single-Pass mHC: residual streams mixed with coefficients one block old. Report §2.4.1."""

from collections.abc import Callable
from typing import ClassVar, Unpack

import torch
from jaxtyping import Float
from torch import Tensor, nn

from openv41 import ops
from openv41.config import MhcConfig, NumericsConfig
from openv41.layers.factory import Factory
from openv41.layers.islands import Float32Islands, island


class SinglePassMHC(Float32Islands):
    """N residual streams around one block, which is an attention or a feed-forward sub-layer.

    X' = B X + C F(A_prev X)   with   (A, B, C) = H(X)                     Report §2.4.1, Eq. (6).
    """

    islands: ClassVar[tuple[str, ...]] = ("fn", "base", "scale")

    def __init__(
        self,
        dim: int,
        mhc: MhcConfig,
        norm_eps: float,
        numerics: NumericsConfig,
        **made: Unpack[Factory],
    ) -> None:
        super().__init__()
        num, wide = mhc.num_streams, island(made)
        size = num * (num + 2)
        self.fn = nn.Parameter(torch.empty(size, num * dim, **wide))
        self.base = nn.Parameter(torch.empty(size, **wide))
        self.scale = nn.Parameter(torch.empty(3, **wide))
        self.mhc, self.norm_eps, self.numerics = mhc, norm_eps, numerics

    def forward(
        self,
        x: Float[Tensor, "T N D"],
        a_prev: Float[Tensor, "T N"],
        block: Callable[[Tensor], Tensor],
    ) -> tuple[Float[Tensor, "T N D"], Float[Tensor, "T N"]]:
        """Apply ``block`` F; return the new streams and A for the next block."""
        a, b, c = self.predict(x)  # [T, N], [T, N, N], [T, N]
        y = block(ops.mix_streams(x, a_prev))  # [T, D]
        deterministic = self.numerics.deterministic
        return ops.update_streams(x, y, b, c, deterministic=deterministic), a

    def predict(
        self, x: Float[Tensor, "T N D"]
    ) -> tuple[Float[Tensor, "T N"], Float[Tensor, "T N N"], Float[Tensor, "T N"]]:
        """Predict the coefficients A, B, C from the streams: H of Eq. (6)."""
        return ops.predict_mix(
            x,
            self.fn,
            self.base,
            self.scale,
            steps=self.mhc.sinkhorn_steps,
            eps=self.mhc.eps,
            norm_eps=self.norm_eps,
            deterministic=self.numerics.deterministic,
        )
