"""Launches ``top_k.cu``: the choice of the best entries on Hopper. Report §2.3.1."""

import ctypes
from functools import cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

from openv41.ops.cuda_library import load

SOURCE = "top_k.cu"
CHUNK = 8192  # scores that a block thins, as in the source
WHOLE = 16384  # scores that one block chooses from
LEAST_KEPT, MOST_K = 1024, 2048


@cache
def library() -> ctypes.CDLL | None:
    """The compiled source, if it chooses rightly here; None else."""
    found = load(SOURCE)
    return found if found is not None and _is_right(found) else None


def refuse(scores: Tensor, k: int, allowed: Tensor | None) -> str | None:
    """Say what the kernels cannot take."""
    if scores.dtype != torch.float32 or allowed is not None or k > MOST_K:
        return f"scores are {scores.dtype}, k is {k}"
    if torch.cuda.is_current_stream_capturing() and not library.cache_info().currsize:
        return "it is not compiled yet"
    return "it is not to be had" if library() is None else None


def choose(
    scores: Float[Tensor, "T M"], k: int, visible: Int[Tensor, " T"] | None
) -> Int[Tensor, "T K"]:
    """Ids of the k best of each row as ``select_top_k`` gives them; k is at most M."""
    found = library()
    assert found is not None, f"{SOURCE} is not to be had"
    return _choose(found, scores, k, visible)


def _choose(found: ctypes.CDLL, scores: Tensor, k: int, visible: Tensor | None) -> Tensor:
    values = scores if scores.stride(1) == 1 else scores.contiguous()
    rows, size, ids = len(values), values.shape[1], None
    out = torch.empty(rows, k, dtype=torch.int64, device=scores.device)
    if not out.numel():
        return out
    visible = None if visible is None else visible.long().contiguous()
    kept = max(LEAST_KEPT, 2 * k)
    stream = ctypes.c_void_p(torch.cuda.current_stream(scores.device).cuda_stream)
    while size > WHOLE:
        chunks = -(-size // CHUNK)
        keys, places = torch.empty(
            2, rows, chunks * kept, dtype=torch.int32, device=scores.device
        ).unbind()
        given = _pointers(values, ids, visible), ctypes.c_int64(values.stride(0))
        sizes = (ctypes.c_int(n) for n in (rows, size, k, kept, chunks))
        _check(found.top_k_thin(*given[0], given[1], *sizes, *_pointers(keys, places), stream))
        values, ids, visible, size = keys, places, None, chunks * kept
    sizes = (ctypes.c_int(n) for n in (rows, size, k))
    given = _pointers(values, ids, visible), ctypes.c_int64(values.stride(0))
    _check(found.top_k_choose(*given[0], given[1], *sizes, *_pointers(out), stream))
    return out


def _pointers(*tensors: Tensor | None) -> list[ctypes.c_void_p]:
    return [ctypes.c_void_p(None if x is None else x.data_ptr()) for x in tensors]


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"{SOURCE}: the launch failed with CUDA error {status}")


def _is_right(found: ctypes.CDLL) -> bool:
    """Choose from scores with ties and infinities, of one block and of many."""
    from openv41.ops.indexer import ids_of, keep_top_k  # noqa: PLC0415 -- it imports this file

    generator = torch.Generator("cuda").manual_seed(0)
    for size, k in ((100, 7), (6001, 512), (16384, 512), (70_000, 512), (300_001, 2048)):
        scores = torch.randn(6, size, generator=generator, device="cuda")
        scores[1] = (scores[1] * 4).round()
        scores[2, ::3], scores[3, ::2], scores[4] = torch.inf, -torch.inf, 0.0
        seen = torch.tensor([size, size, size // 2, size, size, 0], device="cuda")
        got = _choose(found, scores, k, seen)
        hidden = torch.arange(size, device="cuda") >= seen[:, None]
        kept = keep_top_k(scores.masked_fill(hidden, -torch.inf), k)
        if not torch.equal(got, ids_of(kept, k)):
            return False
    return True
