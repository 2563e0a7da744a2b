"""The streams between two blocks in CUDA C++, for the released number of streams. Report §2.4.1.

``mhc.cu`` is compiled by nvcc when it is first needed, and kept in torch's folder of extensions.
Numbers moved per token, of bf16: (2 N + 2) D, in one launch at any number of tokens.
"""

import ctypes
import functools
import hashlib
import logging
from pathlib import Path

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("mhc.cu")
STREAMS = 4
FEW_TOKENS, FEW_WIDTH = 64, 64  # of one tile, of its slices; as in the source
MANY_TOKENS, MANY_WIDTH = 128, 128
PART_WIDTH = 32
MOST_SLICES = 128  # programs that wait for each other: all run at once


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled source, or None where it cannot be compiled."""
    from torch.utils import cpp_extension  # noqa: PLC0415 -- slow, and of no use without a compiler

    if cpp_extension.CUDA_HOME is None:
        return None
    name = f"openv41_mhc_{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]}"
    folder = Path(cpp_extension.get_default_build_root()) / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        cpp_extension.load(
            name,
            [str(SOURCE)],
            extra_cuda_cflags=["-O3", "-std=c++17"],
            build_directory=str(folder),
            is_python_module=False,
        )
        return ctypes.CDLL(str(folder / f"{name}.so"))
    except (OSError, RuntimeError) as error:
        logger.warning("mhc.cu does not compile here, Triton runs instead: %s", error)
        return None


def slices_of(tokens: int, dim: int) -> int:
    """In how many slices the rows are cut."""
    return dim // (FEW_WIDTH if tokens <= FEW_TOKENS else MANY_WIDTH)


def fits(x: Tensor, others: tuple[Tensor, ...]) -> bool:
    """Whether the source takes these streams; ``others`` are read in pieces of 16 bytes too."""
    dim = x.shape[2]
    if not x.is_cuda or x.dtype != torch.bfloat16 or x.shape[1] != STREAMS:
        return False
    if dim % MANY_WIDTH or dim // FEW_WIDTH > MOST_SLICES:
        return False
    if any(t.data_ptr() % 16 for t in (x, *others)) or any(s % 8 for s in x.stride()[:2]):
        return False
    return torch.cuda.get_device_capability(x.device) >= (8, 0) and library() is not None


def tiles_of(tokens: int) -> int:
    """In how many tiles the tokens are cut."""
    return -(-tokens // (FEW_TOKENS if tokens <= FEW_TOKENS else MANY_TOKENS))


def launch(
    pointers: tuple[Tensor | None, ...],
    strides: tuple[int, int, int],
    counters: Tensor,
    norm: Tensor,
    constants: tuple[int, float, float],
) -> None:
    """Launch on tensors in the source's order, up to the partial sums and the counters."""
    compiled, x = library(), pointers[0]
    assert compiled is not None and x is not None, "the launch was not checked by fits"  # noqa: PT018
    tokens, dim = len(x), x.shape[2]
    slices = slices_of(tokens, dim)
    rows = tiles_of(tokens) * slices * (FEW_TOKENS if tokens <= FEW_TOKENS else MANY_TOKENS)
    parts = torch.empty(rows, PART_WIDTH, dtype=torch.float32, device=x.device)
    sums = torch.empty(rows, 2, dtype=torch.float32, device=x.device)
    given = [t if t is None else t.data_ptr() for t in (*pointers, parts, sums, counters)]
    steps, eps, norm_eps = constants
    sizes = *strides, tokens, dim, slices, steps, int(norm.dtype == torch.bfloat16)
    error = compiled.openv41_mega_mhc(
        (ctypes.c_void_p * len(given))(*given),
        (ctypes.c_longlong * len(sizes))(*sizes),
        ctypes.c_float(eps),
        ctypes.c_float(norm_eps),
        ctypes.c_void_p(torch.cuda.current_stream(x.device).cuda_stream),
    )
    assert error == 0, f"the launch of mega_mhc failed: CUDA error {error}"
