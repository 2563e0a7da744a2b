"""DeepSeek-ViT: the vision encoder, over packed patches of many images. Report §2.1.1."""

from collections.abc import Sequence
from typing import Unpack

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from openv41 import ops
from openv41.config import NumericsConfig, VisionConfig
from openv41.image_grid import ImageGrid
from openv41.layers.factory import Factory
from openv41.layers.quantized_linear import Linear, RMSNorm

EPS = 1e-6  # of the vision encoder alone


class VisionAttention(nn.Module):
    """Full attention inside each image, with 2-D rotary positions."""

    def __init__(
        self, vision: VisionConfig, numerics: NumericsConfig, **made: Unpack[Factory]
    ) -> None:
        super().__init__()
        dim = vision.hidden_size
        self.num_heads = vision.num_heads
        self.wqkv = Linear(dim, 3 * dim, numerics, bias=True, **made)
        self.wo = Linear(dim, dim, numerics, bias=True, **made)

    def forward(
        self,
        x: Float[Tensor, "patches width"],
        angles: Float[Tensor, "patches half"],
        lengths: Sequence[int],
    ) -> Float[Tensor, "patches width"]:
        """Mix the patches of each image."""
        q, k, v = self.wqkv(x).unflatten(1, (3, self.num_heads, -1)).unbind(1)
        q, k = ops.rotate_halves(q, angles), ops.rotate_halves(k, angles)
        mixed: Tensor = self.wo(ops.image_attention(q, k, v, lengths).flatten(1))
        return mixed


class VisionMLP(nn.Module):
    """SwiGLU without a clamp; gate and up are the halves of one matrix."""

    def __init__(
        self, vision: VisionConfig, numerics: NumericsConfig, **made: Unpack[Factory]
    ) -> None:
        super().__init__()
        dim, wide = vision.hidden_size, vision.intermediate_size
        self.w1 = Linear(dim, 2 * wide, numerics, **made)
        self.w2 = Linear(wide, dim, numerics, **made)

    def forward(self, x: Float[Tensor, "patches width"]) -> Float[Tensor, "patches width"]:
        """Transform each patch."""
        gate, up = self.w1(x).chunk(2, dim=-1)
        y: Tensor = self.w2(F.silu(gate) * up)
        return y


class VisionBlock(nn.Module):
    """Attention and MLP, each behind a norm and around a residual."""

    def __init__(
        self, vision: VisionConfig, numerics: NumericsConfig, **made: Unpack[Factory]
    ) -> None:
        super().__init__()
        self.norm1 = RMSNorm(vision.hidden_size, EPS, **made)
        self.attn = VisionAttention(vision, numerics, **made)
        self.norm2 = RMSNorm(vision.hidden_size, EPS, **made)
        self.mlp = VisionMLP(vision, numerics, **made)

    def forward(
        self,
        x: Float[Tensor, "patches width"],
        angles: Float[Tensor, "patches half"],
        lengths: Sequence[int],
    ) -> Float[Tensor, "patches width"]:
        """Advance the patches by one block."""
        x = x + self.attn(self.norm1(x), angles, lengths)
        y: Tensor = x + self.mlp(self.norm2(x))
        return y


class VisionEncoder(nn.Module):
    """Patches of any number of images of any sizes, one after the other, without padding."""

    def __init__(
        self, vision: VisionConfig, numerics: NumericsConfig, **made: Unpack[Factory]
    ) -> None:
        super().__init__()
        self.vision = vision
        dim, patch = vision.hidden_size, 3 * vision.patch_size**2
        self.patch_embed = Linear(patch, dim, numerics, bias=True, **made)
        self.blocks = nn.ModuleList(
            VisionBlock(vision, numerics, **made) for _ in range(vision.num_layers)
        )
        self.norm = RMSNorm(dim, EPS, **made)

    def forward(
        self, patches: Float[Tensor, "patches 3 side side"], grids: Sequence[ImageGrid]
    ) -> Float[Tensor, "patches width"]:
        """Encode every patch; positions start at 0 in each image."""
        head_dim = self.vision.hidden_size // self.vision.num_heads
        x = self.patch_embed(patches.to(self.norm.weight.dtype).flatten(1))
        angles = [
            ops.rope_angles_2d(g.rows, g.cols, head_dim, self.vision.rope_theta, x.device)
            for g in grids
        ]
        lengths = [grid.num_patches for grid in grids]
        assert sum(lengths) == len(x), f"{len(x)} patches for grids of {lengths}"
        table = torch.cat(angles) if angles else x.new_empty(0, head_dim // 2, dtype=torch.float32)
        for block in self.blocks:
            x = block(x, table, lengths)
        encoded: Tensor = self.norm(x)
        return encoded
