"""Launches ``top_k.cu``: the choice of the best entries on Hopper. Report §2.3.1."""

import ctypes
from functools import cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

from openv41.ops.cuda_library import trusted

SOURCE = "top_k.cu"
WHOLE = 16384  # scores of a row that needs no groups
HELD = 32768  # scores, or groups of them, that a block holds
MOST_K = 2048
PLACES, FEWER = 65536, 32768  # scores of chosen groups; fewer where k is above FEW
FEW = 1024
WIDTHS = (16, 32, 64, 128)  # of groups
BLOCK = 256 * 4  # scores of a block that groups, for each load of a thread


@cache
def library() -> ctypes.CDLL | None:
    """The compiled source, if it chooses rightly here; None else."""
    return trusted(SOURCE, _is_right)


def refuse(scores: Tensor, k: int, allowed: Tensor | None) -> str | None:
    """Say what the kernels cannot take."""
    if scores.dtype != torch.float32 or allowed is not None or k > MOST_K:
        return f"scores are {scores.dtype}, k is {k}"
    if width_of(scores.shape[1], k) is None:
        return f"rows have {scores.shape[1]} scores"
    if torch.cuda.is_current_stream_capturing() and not library.cache_info().currsize:
        return "it is not compiled yet"
    return "it is not to be had" if library() is None else None


def width_of(size: int, k: int) -> int | None:
    """Scores of a group, so that few are read again; 0 without groups, None where none will do."""
    if size <= WHOLE:
        return 0
    places = PLACES if k <= FEW else FEWER
    fit = [w for w in WIDTHS if w * k <= places and -(-size // w) <= HELD]
    return min(fit, key=lambda width: size // width + 1.4 * k * width, default=None)


def choose(
    scores: Float[Tensor, "T M"], k: int, visible: Int[Tensor, " T"] | None
) -> Int[Tensor, "T K"]:
    """Ids of the k best of each row as ``select_top_k`` gives them; k is at most M."""
    found = library()
    assert found is not None, f"{SOURCE} is not to be had"
    return _choose(found, scores, k, visible)


def fits_groups(size: int, width: int, k: int) -> bool:
    """Whether rows of so many scores are chosen from groups of that width."""
    return WHOLE < size <= width * HELD and width * k <= (PLACES if k <= FEW else FEWER)


def choose_grouped(
    scores: Float[Tensor, "T M"],
    best: Float[Tensor, "T groups"],
    visible: Int[Tensor, " T"],
    out: Int[Tensor, "T K"],
    width: int,
) -> None:
    """Choose where the best of each group of ``width`` scores, up to the last seen, is there."""
    found = library()
    assert found is not None, f"{SOURCE} is not to be had"
    stream = torch.cuda.current_stream(scores.device).cuda_stream
    with torch.cuda.device(scores.device):
        status = call(
            found, scores, visible, out, stream, k=out.shape[1], width=width, loads=0, best=best
        )
    if status:
        raise RuntimeError(f"{SOURCE}: the launch failed with CUDA error {status}")


def _choose(found: ctypes.CDLL, scores: Tensor, k: int, visible: Tensor | None) -> Tensor:
    values = scores if scores.stride(1) == 1 else scores.contiguous()
    out = torch.empty(len(values), k, dtype=torch.int64, device=scores.device)
    if not out.numel():
        return out
    visible = None if visible is None else visible.long().contiguous()
    count = torch.cuda.get_device_properties(scores.device).multi_processor_count
    width, many = width_of(values.shape[1], k), values.numel() > 8 * count * BLOCK * 4
    stream = torch.cuda.current_stream(scores.device).cuda_stream
    with torch.cuda.device(scores.device):
        status = call(
            found, values, visible, out, stream, k=k, width=width or 0, loads=8 if many else 4
        )
    if status:
        raise RuntimeError(f"{SOURCE}: the launch failed with CUDA error {status}")
    return out


def call(
    found: ctypes.CDLL,
    values: Tensor,
    visible: Tensor | None,
    out: Tensor,
    stream: int | None,
    *,
    k: int,
    width: int,
    loads: int,
    best: Tensor | None = None,
) -> int:
    """Call the source: groups of ``width`` scores, or 0; the CUDA error comes back."""
    rows, size = values.shape
    groups = -(-size // width) if width else 0
    if width and best is None:
        best = values.new_empty(rows, groups)
    sizes = (ctypes.c_int(n) for n in (rows, size, k, groups, width, loads))
    tensors = (_pointer(x) for x in (values, visible, best, out))
    code: int = found.top_k_choose(
        *tensors, ctypes.c_int64(values.stride(0)), *sizes, ctypes.c_void_p(stream)
    )
    return code


def _pointer(x: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if x is None else x.data_ptr())


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
