"""What the attention kernels share: sizes of programs, reading of listed rows. Report §2.3.1."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from openv41.ops.sparse_attention import NO_SINK

LOG2E = 1.4426950408889634
NONE: tl.constexpr = tl.constexpr(NO_SINK)


class Tiling(NamedTuple):
    """Sizes of a program: heads and channels padded to powers of two, rows read at a time."""

    heads: int
    channels: int
    rows: int
    warps: int
    stages: int

    @property
    def launch(self) -> dict[str, int]:
        """Keyword arguments of a launch."""
        return {
            "BLOCK_H": self.heads,
            "BLOCK_C": self.channels,
            "BLOCK_K": self.rows,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


def forward_tiling(q: Tensor) -> Tiling:
    """Choose from heads, width and dtype alone, so that a query's bits depend on nothing else."""
    heads, channels = _padded(q)
    if q.element_size() == 4:
        return Tiling(min(heads, 16), channels, 16, 4, 1)
    if channels < 512:
        return Tiling(heads, channels, 64, 4, 2)
    return Tiling(heads, channels, 64, 8, 2) if heads == 64 else Tiling(heads, channels, 32, 4, 2)


def _padded(q: Tensor) -> tuple[int, int]:
    heads, channels = (max(16, triton.next_power_of_2(n)) for n in q.shape[1:])
    return min(heads, 64), channels


def fits_hopper(q: Tensor) -> bool:
    """Whether the kernels whose layouts are chosen for Hopper take these queries."""
    if q.dtype != torch.bfloat16 or q.shape[2] != 512 or not q.shape[1] > 32:
        return False
    return q.is_cuda and torch.cuda.get_device_capability(q.device)[0] == 9


def contiguous(x: Tensor) -> Tensor:
    """Itself where it is contiguous, which costs no call."""
    return x if x.is_contiguous() else x.contiguous()


def kernel_arguments(
    q: Tensor,
    stores: tuple[Tensor, Tensor],
    rows: tuple[Tensor, Tensor],
    sink: Tensor,
    scale: float,
) -> dict[str, Any]:
    """What every kernel over queries and their rows is given."""
    near, far = (part.contiguous() for part in rows)
    return {
        "q_ptr": q,
        "window_ptr": stores[0],
        "main_ptr": stores[1],
        "window_rows": near,
        "main_rows": far,
        "W": near.shape[1],
        "K": far.shape[1],
        "sink_ptr": sink,
        "scale": scale * LOG2E,
        "H": q.shape[1],
        "C": q.shape[2],
    }


@triton.jit
@no_type_check
def read_heads(base, heads, channels, row, H, C):
    """Read a [heads, channels] tile of one query; padding is zero."""
    at = base + row * H * C + heads[:, None] * C + channels[None, :]
    return tl.load(at, mask=(heads[:, None] < H) & (channels[None, :] < C), other=0.0)


@triton.jit
@no_type_check
def read_list(rows_ptr, start, K, BLOCK_K: tl.constexpr):
    """Read a block of a query's list; -1 behind its end."""
    at = start + tl.arange(0, BLOCK_K)
    return tl.load(rows_ptr + at, mask=at < K, other=-1)


@triton.jit
@no_type_check
def gather_rows(kv_ptr, rows, channels, C):
    """Read rows of a store; row -1 reads zeros, whatever the store holds."""
    at = kv_ptr + rows.to(tl.int64)[:, None] * C + channels[None, :]
    return tl.load(at, mask=(rows[:, None] >= 0) & (channels[None, :] < C), other=0.0)


@triton.jit
@no_type_check
def scores(q, kv, rows, scale):
    """Scaled products in base 2; -inf where there is no row."""
    products = tl.dot(q, tl.trans(kv), input_precision="ieee") * scale
    return tl.where(rows[None, :] >= 0, products, -float("inf"))


@triton.jit
@no_type_check
def join_sink(sink_ptr, heads, H, top, total):
    """Factor of the sums and logarithm of the denominator, once the sink has joined it."""
    sink = tl.load(sink_ptr + heads, mask=heads < H, other=0.0).to(tl.float32)
    sink = tl.minimum(tl.maximum(sink * 1.4426950408889634, NONE), -NONE)  # no product is fused
    new = tl.maximum(top, sink)
    shrink = tl.exp2(top - new)
    total = total * shrink + tl.exp2(sink - new)
    return shrink / total, new + tl.log2(total)
