"""Single-Pass mHC: residual streams mixed with coefficients one block old. Report §2.4.1."""

from collections.abc import Callable
from typing import ClassVar, NamedTuple, Unpack

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from openv41 import ops
from openv41.config import MhcConfig, NumericsConfig
from openv41.layers.factory import Factory
from openv41.layers.islands import Float32Islands, island
from openv41.ops.precision import cast


class Pending(NamedTuple):
    """A block's output that is not yet written into the streams, and how it will be."""

    y: Float[Tensor, "T D"]
    b: Float[Tensor, "T N N"]
    c: Float[Tensor, "T N"]


class Streams(NamedTuple):
    """The residual streams between two sub-layers.

    The next sub-layer writes what is pending while it reads the streams, in one pass.
    """

    x: Float[Tensor, "T N D"]
    a: Float[Tensor, "T N"]  # with which the next sub-layer reads
    pending: Pending | None = None

    def settled(self, deterministic: bool) -> "Streams":
        """The same with nothing pending, for all that reads the streams themselves."""
        if self.pending is None:
            return self
        x = ops.update_streams(self.x, *self.pending, deterministic=deterministic)
        return Streams(x, self.a)

    def rows(self, index: Int[Tensor, " rows"]) -> "Streams":
        """Some of the tokens."""
        pending = self.pending and Pending(*(part[index] for part in self.pending))
        return Streams(self.x[index], self.a[index], pending)

    def mean(self) -> Float[Tensor, "T D"]:
        """Mean over the streams, of which none is pending."""
        assert self.pending is None, "streams that are read must be settled"
        return cast(cast(self.x, self.a.dtype).mean(dim=1), self.x.dtype)


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
        streams: Streams,
        norm: Float[Tensor, " D"],
        block: Callable[[Tensor], Tensor],
    ) -> Streams:
        """Apply ``block`` F to the collapsed and normalised streams; its output is left pending."""
        y, b, c = streams.pending or (None, None, None)
        x, h, next_a, next_b, next_c = ops.mega_mhc(
            streams.x,
            y,
            b,
            c,
            streams.a,
            fn=self.fn,
            base=self.base,
            scale=self.scale,
            norm=norm,
            steps=self.mhc.sinkhorn_steps,
            eps=self.mhc.eps,
            norm_eps=self.norm_eps,
            deterministic=self.numerics.deterministic,
        )
        return Streams(x, next_a, Pending(block(h), next_b, next_c))
