"""Attention and rotary positions of the vision encoder. Report §2.1.1."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from openv41.ops._dispatch import op
from openv41.ops.precision import cast, widened


def rope_angles_2d(
    rows: int, cols: int, head_dim: int, theta: float, device: torch.device | str = "cpu"
) -> Float[Tensor, "patches half"]:
    """Angles of each patch of an image, in reading order: those of its row, then of its column."""
    steps = torch.arange(0, head_dim // 2, 2, dtype=torch.float32, device=device)
    frequencies = 1.0 / theta ** (steps / (head_dim // 2))
    height = torch.arange(rows, device=device).repeat_interleave(cols)
    width = torch.arange(cols, device=device).repeat(rows)
    return torch.cat([height[:, None] * frequencies, width[:, None] * frequencies], dim=1)


@op
def rotate_halves(
    x: Float[Tensor, "patches heads head_dim"], angles: Float[Tensor, "patches half"]
) -> Float[Tensor, "patches heads head_dim"]:
    """Rotate each head's pairs (i, i + head_dim / 2) by angle i, in at least float32."""
    wide = widened(x)
    cos, sin = angles.to(wide.dtype).cos()[:, None], angles.to(wide.dtype).sin()[:, None]
    first, second = wide.chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return cast(turned, x.dtype)


@op
def image_attention(
    q: Float[Tensor, "patches heads head_dim"],
    k: Float[Tensor, "patches heads head_dim"],
    v: Float[Tensor, "patches heads head_dim"],
    lengths: Sequence[int],
) -> Float[Tensor, "patches heads head_dim"]:
    """Softmax attention of every patch to all patches of its own image, scaled by head_dim^-0.5.

    ``lengths`` are the patches of each image. Scores, softmax and sums are at least float32; the
    result is rounded once.
    """
    parts = []
    split = (widened(t).transpose(0, 1).split(list(lengths), dim=1) for t in (q, k, v))
    for own_q, own_k, own_v in zip(*split, strict=True):  # [heads, patches, head_dim] of one image
        parts.append(F.scaled_dot_product_attention(own_q[None], own_k[None], own_v[None])[0])
    mixed = torch.cat(parts, dim=1) if parts else widened(q).transpose(0, 1)
    return cast(mixed.transpose(0, 1), q.dtype)
