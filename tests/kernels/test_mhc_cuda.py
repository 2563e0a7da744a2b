"""The CUDA source of the streams' gradients, run thread by thread on the CPU, against float64."""

import ctypes
import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from openv41.ops import mhc_cuda
from openv41.ops.cuda_library import FOLDER
from tests.close import assert_close

SHIM = Path(__file__).with_name("cuda_on_cpu.h")
LAUNCH = """
template <bool kHasY, bool kHasG>
int launch(const Args &args, int groups, void *) {
  static_assert(kBytes <= sizeof(emulated_memory));
  gridDim = {unsigned(args.dim / kWidth), unsigned(groups), 1};
  run_blocks(kWarps * 32, [&] { gradients<kHasY, kHasG>(args); });
  return 0;
}
"""


def for_the_cpu(source, header):
    """Put the shim's pairs and products in the place of PTX, and threads in that of a launch."""
    header = header.replace("#pragma once", "").replace("#include <cuda_runtime.h>", "")
    header = re.sub(
        r"asm\(\"cvt.*?;\n", "pair = emulated_pack(first, second);\n", header, flags=re.S
    )
    product = "emulated_multiply(sum, a0, a1, a2, a3, b0, b1);\n"
    header = re.sub(r"asm volatile\(.*?\);\n", product, header, flags=re.S)
    source = source.replace('#include "mhc_pairs.cuh"', header)
    source = source.replace(
        "extern __shared__ uint4 memory[];",
        "uint4 *memory = reinterpret_cast<uint4 *>(emulated_memory);",
    )
    source = re.sub(
        r"template <bool kHasY, bool kHasG>\ncudaError_t launch.*?\n}\n", LAUNCH, source, flags=re.S
    )
    return f'#include "{SHIM}"\n' + source.replace("static_cast<cudaStream_t>(stream)", "stream")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The source, compiled for the CPU."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++")
    folder = tmp_path_factory.mktemp("cuda")
    code = for_the_cpu(
        (FOLDER / mhc_cuda.SOURCES[1]).read_text(), (FOLDER / "mhc_pairs.cuh").read_text()
    )
    (folder / "source.cpp").write_text(code)
    words = [compiler, "-O1", "-std=c++20", "-shared", "-fPIC", "-pthread", "-w"]
    subprocess.run([*words, "source.cpp", "-o", "library.so"], cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "library.so"))


def wanted(x, pending, a, grads, full):
    """Gradients of x, y, a, c and b in float64, with the source's two roundings to bf16."""
    fn, norm, inverse, g_mixes, along, products = (part.double() for part in full)
    wide, a, (g_new, g_h) = x.double(), a.double(), grads
    new = wide
    if pending is not None:
        y, b, c = (part.double() for part in pending)
        new = torch.einsum("tmn,tnd->tmd", b, wide) + c[..., None] * y[:, None]
        new = new.bfloat16().double()
    h = (a[..., None] * new).sum(1).bfloat16().double()
    inverse = inverse[:, 1:]
    pull = products[:, None] / x.shape[2] * inverse**3
    g_h = g_h.double() * norm * inverse - h * pull
    total = a[..., None] * g_h[:, None] - along[:, None, None] * new
    total = total + (g_mixes[:, :24] @ fn).view(x.shape)
    g_a = (g_h[:, None] * new).sum(-1)
    if pending is None:
        return total, None, g_a, None, None
    total = total + g_new.double()
    g_x = torch.einsum("tmn,tmd->tnd", b, total)
    g_b = torch.einsum("tmd,tnd->tmn", total, wide)
    return g_x, (c[..., None] * total).sum(1), g_a, (total * y[:, None]).sum(-1), g_b


@pytest.mark.slow
@pytest.mark.parametrize("has_y", [True, False])
def test_gradients_of_the_streams(library, has_y):
    """More than a tile of tokens, the last one cut; every element is written."""
    T, N, D = 133, 4, mhc_cuda.BACKWARD_WIDTH
    x, y, a = torch.randn(T, N, D).bfloat16(), torch.randn(T, D).bfloat16(), torch.rand(T, N)
    pending = (y, torch.rand(T, N, N), torch.rand(T, N)) if has_y else None
    g_new = torch.randn(T, N, D).bfloat16() if has_y else None
    g_h = torch.randn(T, D).bfloat16()
    g_mixes = torch.randn(T, 32) * (torch.arange(32) < 24)
    norm = (1 + torch.rand(D)).to(torch.bfloat16 if has_y else torch.float32)
    fn = torch.randn(24, N * D) / math.sqrt(N * D)
    full = fn, norm, torch.rand(T, 2) + 0.5, g_mixes, torch.rand(T), torch.randn(T) * D / 10
    g_x, g_y = torch.full_like(x, math.nan), torch.full_like(y, math.nan)
    parts = torch.full((1, T, 24), math.nan)
    tensors = x, *(pending or (None,) * 3), a, *full[:3], g_new, g_h, *full[3:], g_x, g_y, parts
    sizes = *x.stride()[:2], y.stride(0), T, D, int(norm.dtype == torch.bfloat16), 1
    library.openv41_mega_mhc_backward(
        mhc_cuda._addresses(*tensors), (ctypes.c_longlong * len(sizes))(*sizes), None
    )
    g_a, g_c, g_b = parts[0].split([N, N, N * N], dim=1)
    want = wanted(x, pending, a, (g_new, g_h), full)
    pairs = zip(
        ("x", "y", "a", "c", "b"), (g_x, g_y, g_a, g_c, g_b.view(T, N, N)), want, strict=True
    )
    for name, got, right in pairs:
        if right is not None:
            eps = 2**-8 if name in "xy" else 1e-4
            assert_close(name, got, right, rtol=eps, atol=eps * right.abs().max().item() / 8)
