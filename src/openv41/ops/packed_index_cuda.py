"""Launches ``packed_index.cu``: index scores of decoded queries on Hopper. Report §2.3.1."""

import ctypes
from functools import cache

import torch
from torch import Tensor

from openv41.ops.cuda_library import trusted
from openv41.ops.packed_rows import unpack_rows

SOURCE = "packed_index.cu"
PIECE = 8  # entries of one copy: a page holds whole pieces, a candidate block is one
HEADS = 32
PROGRAMS_PER_SM = 3


@cache
def library() -> ctypes.CDLL | None:
    """The compiled source, if it scores rightly here; None else."""
    return trusted(SOURCE, _is_right)


def refuse(q: Tensor, keys: Tensor, per_page: int, block_size: int | None) -> str | None:
    """Say what the kernel cannot take."""
    if q.shape[2] > HEADS or per_page % PIECE or block_size not in {None, PIECE}:
        return f"{q.shape[2]} heads, pages of {per_page} entries, blocks of {block_size}"
    if keys.data_ptr() % 16 or q.data_ptr() % 4:
        return "keys do not start at 16 bytes"
    if torch.cuda.is_current_stream_capturing() and not library.cache_info().currsize:
        return "it is not compiled yet"
    return "it is not to be had" if library() is None else None


def scores(  # noqa: PLR0917 -- those of packed_index_scores
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    table: Tensor,
    visible: Tensor,
    per_page: int,
    width: int,
    pools: Tensor | None = None,
    *,
    programs_per_sm: int = PROGRAMS_PER_SM,
) -> Tensor:
    """As ``packed_index_scores``; every query reads its own keys."""
    batches, tokens = q.shape[:2]
    out = torch.empty(batches, tokens, width, dtype=torch.float32, device=q.device)
    if not out.numel():
        return out
    q, weights, visible = q.contiguous(), weights.float().contiguous(), visible.long().contiguous()
    table = table if table.dtype in {torch.int32, torch.int64} else table.long()
    table = table if table.stride(1) == 1 else table.contiguous()
    pools = None if pools is None else pools.long().contiguous()
    found = library()
    assert found is not None, f"{SOURCE} is not to be had"
    count = torch.cuda.get_device_properties(q.device).multi_processor_count
    with torch.cuda.device(q.device):
        stream = torch.cuda.current_stream().cuda_stream
        parts = found, q, weights, keys, table, visible, per_page, pools, out, stream
        status = call(*parts, programs=count * programs_per_sm)
    if status:
        raise RuntimeError(f"{SOURCE}: the launch failed with CUDA error {status}")
    return out


def call(  # noqa: PLR0917
    found: ctypes.CDLL,
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    table: Tensor,
    visible: Tensor,
    per_page: int,
    pools: Tensor | None,
    out: Tensor,
    stream: int | None,
    *,
    programs: int,
) -> int:
    """Call the source; the CUDA error comes back."""
    batches, tokens, heads = q.shape[:3]
    code: int = found.packed_index_scores(
        *(_pointer(x) for x in (q, weights, keys, table, visible, pools, out)),
        ctypes.c_int64(table.stride(0)),
        *(ctypes.c_int(n) for n in (heads, batches, tokens, out.shape[2], per_page)),
        ctypes.c_int(0 if pools is None else pools.shape[2]),
        ctypes.c_int(int(table.dtype == torch.int64)),
        ctypes.c_int(programs),
        ctypes.c_void_p(stream),
    )
    return code


def _pointer(x: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if x is None else x.data_ptr())


def _is_right(found: ctypes.CDLL) -> bool:
    """Score a few tiles by pages of two sizes, whose end is not seen."""
    generator = torch.Generator("cuda").manual_seed(0)

    def packed(*shape: int) -> Tensor:
        size, device = (*shape, 68), generator.device
        rows = torch.randint(0, 256, size, generator=generator, device=device, dtype=torch.uint8)
        rows[..., 64:] = 124 + (rows[..., 64:] & 3)
        return rows

    q, keys, num = packed(2, 1, HEADS), packed(4096), 1500
    weights = torch.randn(2, 1, HEADS, generator=generator, device="cuda")
    visible = torch.tensor([[num], [700]], device="cuda")
    stream = torch.cuda.current_stream().cuda_stream
    for per_page in (64, PIECE):
        order = torch.randperm(4096 // per_page, generator=generator, device="cuda")
        table = order[: 2 * -(-num // per_page)].view(2, -1)
        out = torch.full((2, 1, num), torch.nan, device="cuda")
        if call(found, q, weights, keys, table, visible, per_page, None, out, stream, programs=6):
            return False
        rows = table[..., None] * per_page + torch.arange(per_page, device="cuda")
        values = unpack_rows(keys)[rows.flatten(1)[:, :num]].double()
        dots = torch.einsum("bij,bmj->bim", unpack_rows(q[:, 0]).double(), values).relu()
        want = torch.einsum("bi,bim->bm", weights[:, 0].double(), dots)
        want[1, 700:] = -torch.inf
        if not torch.allclose(out[:, 0].double(), want, rtol=1e-4, atol=1e-2):
            return False
    return True
