"""Launches ``packed_sparse_attention.cu``: attention over packed rows on Hopper. Report §2.3.1."""

import ctypes

import torch
from torch import Tensor

from openv41.ops.cuda_library import load

SOURCE = "packed_sparse_attention.cu"
HEADS, WIDTH, ROWS = 64, 512, 64  # of a block of threads, and of its buffers, as in the source
FEW = 32  # queries and groups of heads below which the Triton kernel is faster
LIST_TYPES = {torch.int32, torch.int64}
Given = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float]  # the op's arguments


def refuse(given: Given, *, deterministic: bool) -> str | None:
    """Say what the kernel cannot take, or had better not."""
    q, window, _, main, _, _, scale = given
    if not deterministic and len(q) * groups_of(q) < FEW:
        return f"there are {len(q)} queries"
    if any(x.stride(0) % 16 or x.data_ptr() % 16 for x in (window, main)):
        return "rows do not start at 16 bytes"
    if not scale > 0:
        return f"scale is {scale}"
    return "it is not to be had" if load(SOURCE) is None else None


def groups_of(q: Tensor) -> int:
    """Blocks of threads that share a query."""
    return -(-q.shape[1] // HEADS)


def parts_of(given: Given, processors: int, *, deterministic: bool) -> int:
    """In how many parts lists are cut; a query's bits depend on nothing else if they have to."""
    q, _, near, _, far, _, _ = given
    blocks = max(1, sum(-(-rows.shape[1] // ROWS) for rows in (near, far)))
    programs = len(q) * groups_of(q)
    parts = 1 if deterministic else min(blocks, max(1, processors // programs))
    return -(-blocks // -(-blocks // parts))  # none is empty


def attend(given: Given, *, deterministic: bool) -> Tensor:
    """The op."""
    q = given[0]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not out.numel():
        return out
    library = load(SOURCE)
    assert library is not None, f"{SOURCE} is not to be had"
    count = torch.cuda.get_device_properties(q.device).multi_processor_count
    parts = parts_of(given, count, deterministic=deterministic)
    with torch.cuda.device(q.device):
        stream = torch.cuda.current_stream().cuda_stream
        status = call(library, given, out, (parts, count), stream)
    if status:
        raise RuntimeError(f"{SOURCE}: the launch failed with CUDA error {status}")
    return out


def call(
    library: ctypes.CDLL, given: Given, out: Tensor, cut: tuple[int, int], stream: int | None
) -> int:
    """Pass addresses and sizes; ``cut`` is parts and blocks of threads."""
    q, window, near, main, far, sink, scale = given
    (count, heads, width), parts = q.shape, cut[0]
    if q.stride(2) != 1 or q.stride(0) % 8 or q.stride(1) % 8 or q.data_ptr() % 16:
        q = q.clone(memory_format=torch.contiguous_format)
    near, far = ((x if x.dtype in LIST_TYPES else x.long()).contiguous() for x in (near, far))
    sums = lse = None
    if parts > 1:
        sums = torch.empty(count, parts, heads, width, dtype=torch.float32, device=q.device)
        lse = torch.empty(count, parts, heads, dtype=torch.float32, device=q.device)
    tensors = q, window, main, near, far, sink.float().contiguous(), out, sums, lse
    sizes = (
        *(2 * n for n in q.stride()[:2]),
        *(window.stride(0), main.stride(0), count, heads),
        *(near.shape[1], far.shape[1], parts),
        *(int(x.dtype == torch.int64) for x in (near, far)),
        cut[1],
    )
    addresses = [None if x is None else x.data_ptr() for x in tensors]
    status: int = library.packed_sparse_attention(
        (ctypes.c_void_p * len(addresses))(*addresses),
        (ctypes.c_longlong * len(sizes))(*sizes),
        ctypes.c_float(scale),
        ctypes.c_void_p(stream),
    )
    return status
