"""Launches ``engram.cu``: the gated update of all streams and its gradients. Report §2.4.2.

Forward (3 N + 1) D values of bf16 a token are moved, backward (5 N + 2) D: sums of the weights'
gradients stay in registers, where the Triton kernels read keys and streams a second time.
"""

import ctypes
from functools import cache

import torch
from torch import Tensor

from openv41.ops._dispatch import kernels
from openv41.ops.cuda_library import trusted

SOURCE = "engram.cu"
STREAMS, WIDEST = 4, 5120
FEW: int | None = None  # tokens from which the op takes it; none until it has run on a GPU
Given = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]  # the op's tensors


@cache
def library() -> ctypes.CDLL | None:
    """The compiled source, if it updates rightly here; None else."""
    return trusted(SOURCE, _is_right)


def fits(given: Given, grad: Tensor | None = None) -> bool:
    """Whether the source takes these."""
    x, key, value, q_weight, k_weight, _ = given
    tokens, num, dim = x.shape
    if FEW is None or not x.is_cuda or tokens < FEW or num != STREAMS or dim % 256 or dim > WIDEST:
        return False
    rows = (x, key, value) if grad is None else (x, key, value, grad)
    if any(t.dtype != torch.bfloat16 or t.data_ptr() % 16 or t.stride(0) % 8 for t in rows):
        return False
    if q_weight.dtype != k_weight.dtype or q_weight.dtype not in {torch.bfloat16, torch.float32}:
        return False
    if any(t.data_ptr() % 16 for t in (q_weight, k_weight)):
        return False
    if torch.cuda.is_current_stream_capturing() and not library.cache_info().currsize:
        return False
    return library() is not None


def forward(given: Given, eps: float) -> Tensor:
    """The streams."""
    found = library()
    assert found is not None, f"{SOURCE} is not to be had"
    return _forward(found, given, eps, _blocks(given[0]))


def backward(given: Given, grad: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of streams, keys and values, and each block's sums for those of the weights."""
    found = library()
    assert found is not None, f"{SOURCE} is not to be had"
    return _backward(found, given, grad, eps, _blocks(given[0]))


def _blocks(x: Tensor) -> int:
    """As many as run at once, no more than four on a processor."""
    count = torch.cuda.get_device_properties(x.device).multi_processor_count
    return min(len(x), count * min(4, WIDEST // x.shape[2]))


def _forward(found: ctypes.CDLL, given: Given, eps: float, blocks: int) -> Tensor:
    out = torch.empty_like(given[0])
    _launch(found, given, (out, None, None, None, None), eps, blocks)
    return out


def _backward(
    found: ctypes.CDLL, given: Given, grad: Tensor, eps: float, blocks: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, key, value, *_ = given
    to_x = torch.empty_like(x)
    to_key = torch.empty(key.shape, dtype=key.dtype, device=x.device)
    to_value = torch.empty(value.shape, dtype=value.dtype, device=x.device)
    partial = torch.empty(blocks, *x.shape[1:], dtype=torch.float32, device=x.device)
    _launch(found, given, (to_x, grad, to_key, to_value, partial), eps, blocks)
    return to_x, to_key, to_value, partial


def _launch(
    found: ctypes.CDLL, given: Given, rest: tuple[Tensor | None, ...], eps: float, blocks: int
) -> None:
    """Pass addresses and sizes; rows of keys and of values need not follow each other."""
    x, key, value, weight = given[:4]
    strides = 2 * key.stride(0), 2 * value.stride(0)
    sizes = *strides, len(x), x.shape[2], int(weight.dtype == torch.float32), blocks
    addresses = [None if t is None else t.data_ptr() for t in (*given, *rest)]
    with torch.cuda.device(x.device):
        status = found.openv41_engram_update(
            (ctypes.c_void_p * len(addresses))(*addresses),
            (ctypes.c_longlong * len(sizes))(*sizes),
            ctypes.c_float(eps),
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )
    if status:
        raise RuntimeError(f"{SOURCE}: the launch failed with CUDA error {status}")


@torch.inference_mode(mode=False)
def _is_right(
    found: ctypes.CDLL,
    device: str = "cuda",
    cases: tuple[tuple[int, int], ...] = ((WIDEST, 2), (256, 1)),
) -> bool:
    """Update tokens enough for the ring to begin anew, with a stream of zeros and an image row."""
    from openv41.ops.engram import engram_update  # noqa: PLC0415 -- it imports this file

    draw = torch.Generator(device).manual_seed(0)
    for dim, blocks in cases:
        shapes = *[(9, STREAMS, dim)] * 2, (9, dim), *[(STREAMS, dim)] * 2, (9, STREAMS, dim)
        x, key, value, q, k, grad = (
            torch.randn(shape, generator=draw, device=device).bfloat16() for shape in shapes
        )
        x[4, 1] = 0.0
        given = x, key, value, q, k, torch.arange(9, device=device) == 2
        leaves = [t.float().requires_grad_() for t in given[:5]]
        wide, wide_key, wide_value, wide_q, wide_k = leaves
        with torch.enable_grad(), kernels("reference"):  # of the ops within, too
            out = engram_update.reference(
                wide, wide_key, wide_value, wide_q, wide_k, 1e-6, given[5]
            )
            slopes = torch.autograd.grad(out, leaves, grad.float())
        *found_slopes, partial = _backward(found, given, grad, 1e-6, blocks)
        both = partial.sum(0)
        got = _forward(found, given, 1e-6, blocks), *found_slopes, both * k, both * q
        for a, b in zip(got, (out.detach(), *slopes), strict=True):
            if not (a.float() - b).norm() <= 1e-2 * b.norm():
                return False
    return True
