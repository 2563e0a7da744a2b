"""The streams between two blocks in CUDA C++, for the released number of streams. Report §2.4.1.

Numbers moved per token, of bf16: (2 N + 2) D forward, in one launch at any number of
tokens, of which many need counters set to zero; (3 N + 3) D in the gradients of the streams.
"""

import ctypes
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from openv41.ops.cuda_library import load

SOURCES = ("mhc.cu", "mhc_many.cu", "mhc_backward.cu")  # with mhc_boundary.cuh, mhc_pairs.cuh
STREAMS, MIXES, TILE = 4, 24, 16  # TILE tokens are advanced together
RANKS, WARP_WIDTH, MOST_WIDTH = 16, 32, 5120  # blocks of a cluster or group; of a warp; the most D
SLOTS = 8  # tiles of a group whose sums are in memory
BACKWARD_TOKENS, BACKWARD_WIDTH = 128, 256


def library() -> ctypes.CDLL | None:
    """The compiled sources, or None where they cannot be compiled."""
    return load(*SOURCES)


@cache
def clusters(dim: int) -> int:
    """How many clusters of blocks run at once on this GPU; 0 where it cannot run one."""
    compiled = library()
    return 0 if compiled is None else int(compiled.openv41_mega_mhc_clusters(dim))


def _reads(x: Tensor, others: tuple[Tensor, ...]) -> bool:
    """Whether a source can read these streams; ``others`` are read in pieces of 16 bytes too."""
    if not x.is_cuda or x.dtype != torch.bfloat16 or x.shape[1] != STREAMS:
        return False
    if any(t.dtype not in (torch.bfloat16, torch.float32) for t in others):
        return False
    if any(t.data_ptr() % 16 for t in (x, *others)) or any(s % 8 for s in x.stride()[:2]):
        return False
    return library() is not None


def fits(x: Tensor, others: tuple[Tensor, ...]) -> bool:
    """Whether the sources take these streams."""
    dim = x.shape[2]
    if dim % (RANKS * WARP_WIDTH) or dim > MOST_WIDTH:
        return False
    return _reads(x, others) and clusters(dim) > 0


class Groups(NamedTuple):
    """How the GPU is cut for many tokens: blocks of a group, and groups."""

    slices: int
    groups: int


@cache
def groups() -> Groups:
    """As many groups as run at once."""
    processors = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    return Groups(RANKS, processors // RANKS)


def launch(
    pointers: tuple[Tensor | None, ...],
    strides: tuple[int, int, int],
    norm: Tensor,
    constants: tuple[int, float, float],
) -> None:
    """Launch on tensors in the sources' order."""
    compiled, x = library(), pointers[0]
    assert compiled is not None and x is not None, "the launch was not checked by fits"  # noqa: PT018
    steps, eps, norm_eps = constants
    tokens, dim = len(x), x.shape[2]
    sizes = [*strides, tokens, dim, steps, int(norm.dtype == torch.bfloat16)]
    tiles, at_once = -(-tokens // TILE), clusters(dim)
    if tiles <= at_once:
        function = compiled.openv41_mega_mhc
        sizes.append(2 if 2 * tiles <= at_once else 1)
    else:
        function = compiled.openv41_mega_mhc_many
        pointers = *pointers, *_shares(groups(), tiles, x.device)
        sizes.extend(groups())
    error = function(
        _addresses(*pointers),
        (ctypes.c_longlong * len(sizes))(*sizes),
        ctypes.c_float(eps),
        ctypes.c_float(norm_eps),
        ctypes.c_void_p(torch.cuda.current_stream(x.device).cuda_stream),
    )
    assert error == 0, f"the launch of mega_mhc failed: CUDA error {error}"


def _shares(cut: Groups, tiles: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """What blocks of a group leave for each other: mixes, squares, and counters of the tiles."""
    rows = cut.slices * cut.groups * SLOTS * TILE
    mixes, squares = torch.empty(rows, MIXES, device=device), torch.empty(rows, 2, device=device)
    return mixes, squares, torch.empty(tiles, dtype=torch.int32, device=device)


def backward_fits(x: Tensor, others: tuple[Tensor, ...]) -> bool:
    """Whether the source takes these streams for their gradients."""
    return x.shape[2] % BACKWARD_WIDTH == 0 and _reads(x, others)


def launch_backward(
    pointers: tuple[Tensor | None, ...], strides: tuple[int, int, int], norm: Tensor
) -> Tensor:
    """Launch on tensors in the source's order but the last, the sums [slices, T, mixes]."""
    compiled, x = library(), pointers[0]
    assert compiled is not None and x is not None, "the launch was not checked by fits"  # noqa: PT018
    tokens, num, dim = x.shape
    slices = dim // BACKWARD_WIDTH
    parts = torch.empty(slices, tokens, num * (num + 2), dtype=torch.float32, device=x.device)
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    groups = max(1, min(-(-tokens // BACKWARD_TOKENS), processors // slices))
    sizes = *strides, tokens, dim, int(norm.dtype == torch.bfloat16), groups
    error = compiled.openv41_mega_mhc_backward(
        _addresses(*pointers, parts),
        (ctypes.c_longlong * len(sizes))(*sizes),
        ctypes.c_void_p(torch.cuda.current_stream(x.device).cuda_stream),
    )
    assert error == 0, f"the launch of mega_mhc's gradients failed: CUDA error {error}"
    return parts


def _addresses(*tensors: Tensor | None) -> ctypes.Array[ctypes.c_void_p]:
    given = [tensor if tensor is None else tensor.data_ptr() for tensor in tensors]
    return (ctypes.c_void_p * len(given))(*given)
