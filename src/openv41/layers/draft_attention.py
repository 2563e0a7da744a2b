"""Attention of the drafter: all rows of a block read one window and one another. Report §2.4.3."""

from dataclasses import dataclass

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor

from openv41 import ops
from openv41.layers.context import ForwardContext
from openv41.layers.latent_attention import LatentAttention
from openv41.layers.latents import Latents
from openv41.layers.rounding import round_window_kv


@dataclass(frozen=True, eq=False)
class Window:
    """Rows of a packed context that each block reads: ``counts`` rows from ``firsts`` on."""

    firsts: Int[Tensor, " B"]
    counts: Int[Tensor, " B"]
    widest: int  # columns for them: at least as many as any block reads
    total: int  # rows of the context

    def rows(self, block_size: int) -> Int[Tensor, "B S"]:
        """Rows that each block reads in [context, rows of all blocks]; -1 is none.

        A block's own rows are the last ones: every row of a block sees all of them.
        """
        steps = torch.arange(self.widest, device=self.firsts.device)
        near = torch.where(steps < self.counts[:, None], self.firsts[:, None] + steps, -1)
        blocks = torch.arange(len(self.firsts), device=self.firsts.device)[:, None]
        own = torch.arange(block_size, device=self.firsts.device)
        return torch.cat([near, self.total + blocks * block_size + own], dim=1)


class DraftBlocks:
    """What the stages share about the blocks of one forward: positions and keys of every row."""

    def __init__(self, ctx: ForwardContext, window: Window, block_size: int) -> None:
        self.ctx = ctx  # of the blocks' rows, at their absolute positions
        rows = window.rows(block_size).repeat_interleave(block_size, dim=0)
        self.keys = ops.plan_keys(rows, deterministic=ctx.deterministic)


class DraftAttention(LatentAttention):
    """Window attention whose window ends before the block, and which is bidirectional in it."""

    def context(self, main_x: Float[Tensor, "T D"], rope: Complex[Tensor, "T pairs"]) -> Latents:
        """KV of committed positions from the target's features."""
        return Latents("window", self.wkv(main_x), self.kv_norm, rope, self.numerics)

    def forward(
        self, x: Float[Tensor, "T D"], context: Float[Tensor, "S C"], blocks: DraftBlocks
    ) -> Float[Tensor, "T D"]:
        """Attend for every row of every block."""
        rope = blocks.ctx.rope(0)
        latent, kv = self.projected(x)
        _, q = self.queries(latent, rope)
        own = round_window_kv(self.rotate(self.kv_norm(kv), rope), self.numerics)
        kv = torch.cat([context.to(own.dtype), own])
        out = ops.sparse_attention(
            q,
            kv,
            blocks.keys,
            kv[:0],
            blocks.ctx.no_keys,
            self.sink,
            self.scale,
            deterministic=self.numerics.deterministic,
        )
        return self.project_out(self.rotate(out, blocks.ctx.inverse_rope(0)))
