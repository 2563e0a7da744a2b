"""The CUDA source of the choice, run thread by thread on the CPU, against the reference."""

import re
from pathlib import Path

import pytest
import torch

from openv41.ops import indexer, top_k_cuda
from openv41.ops.cuda_library import FOLDER
from tests.kernels.on_cpu import compiled
from tests.kernels.test_indexer_triton import KINDS, kinds

SHIM = Path(__file__).with_name("hopper_on_cpu.h")
THREADS = 64
MORE = """
#define __shared__ static
constexpr int cudaSuccess = 0;
inline int cudaGetLastError() { return 0; }
inline int __float_as_int(float f) { return int(as_uint(f)); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int atomicAdd(int *p, int v) { return std::atomic_ref(*p).fetch_add(v); }
inline unsigned atomicOr(unsigned *p, unsigned v) { return std::atomic_ref(*p).fetch_or(v); }
struct int2 { int x, y; };
inline int2 make_int2(int a, int b) { return {a, b}; }
inline bool __any_sync(unsigned mask, bool v) { return __ballot_sync(mask, v); }
inline int __shfl_up_sync(unsigned mask, int v, int by) {
  int lane = threadIdx.x % 32;
  block->slots[threadIdx.x].v[0] = uint32_t(v); warp_sync();
  int r = int(block->slots[threadIdx.x - (lane < by ? 0 : by)].v[0]); warp_sync(); return r;
}
template <class F> int reduced(int v, F join) {
  for (int step = 1; step < 32; step *= 2)
    v = join(v, int(__shfl_xor_sync(~0u, uint32_t(v), step)));
  return v;
}
inline int __reduce_add_sync(unsigned, int v) {
  return reduced(v, [](int a, int b) { return a + b; });
}
inline int __reduce_min_sync(unsigned, int v) {
  return reduced(v, [](int a, int b) { return min(a, b); });
}
inline int __reduce_max_sync(unsigned, int v) {
  return reduced(v, [](int a, int b) { return max(a, b); });
}
"""
CHOOSE = """
template <bool GROUPED, int SUB>
int choose_with(int per, int rows, void*, const Rows& in, const float* best, int64_t* out) {
    gridDim = {unsigned(rows), 1, 1};
    auto kernel = per <= 4 ? choose<4, SUB, GROUPED> : per <= 8 ? choose<8, SUB, GROUPED>
                : per <= 16 ? choose<16, SUB, GROUPED> : choose<32, SUB, GROUPED>;
    run_blocks(kThreads, [&] { kernel(in, best, out); });
    return 0;
}
"""
GROUP = """gridDim = {unsigned(blocks), 1, 1};
    run_blocks(kGroupThreads, [&] { kernel(in, parts, best); });"""


def for_the_cpu(source):
    """Fewer threads, which the shim runs, and its functions in the place of instructions."""
    source = source.replace("#include <cuda_runtime.h>", f'#include "{SHIM}"\n{MORE}')
    source = source.replace("kThreads = 1024", f"kThreads = {THREADS}")
    source = source.replace("kGroupThreads = 256", f"kGroupThreads = {THREADS}")
    source = re.sub(r"asm volatile\(\"griddep.*?;\"[^;]*;", ";", source)
    source = re.sub(
        r"template <bool GROUPED, int SUB>\ncudaError_t.*?\n}\n", CHOOSE, source, flags=re.S
    )
    source = re.sub(r"kernel<<<.*?;", GROUP, source)
    return source.replace("static_cast<cudaStream_t>(on)", "on")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The source, compiled for the CPU."""
    source = for_the_cpu((FOLDER / top_k_cuda.SOURCE).read_text())
    return compiled(source, tmp_path_factory.mktemp("cuda"), "-O1")


def check(library, scores, visible, **sizes):
    k = sizes["k"]
    out = torch.full((len(scores), k), 1 << 40)
    assert not top_k_cuda.call(library, scores, visible, out, None, **sizes)
    hidden = torch.arange(scores.shape[1]) >= visible[:, None]
    kept = indexer.keep_top_k(scores.masked_fill(hidden, -torch.inf), k)
    assert torch.equal(out, indexer.ids_of(kept, k))


SIZES = [  # scores, k, width of groups, loads
    (61, 7, 0, 4),
    (2047, 50, 0, 4),
    (9000, 60, 32, 4),
    *(
        pytest.param(values, marks=pytest.mark.prove)
        for values in (
            (2048, 32, 0, 4),
            (1500, 100, 0, 4),
            (1000, 20, 16, 4),
            (20_011, 32, 16, 8),
            (16_390, 120, 64, 8),
            (5000, 300, 128, 4),
        )
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", SIZES)
def test_source_follows_the_tie_rule(library, kind, sizes):
    """Whole rows, and groups of every width; rows cut, and rows that start at any address."""
    M, k, width, loads = sizes
    scores = kinds(4, M, kind)
    if M == 20_011 and kind == "normal":
        scores = scores.sort(dim=1).values
    visible = torch.tensor([M, M - 3, M // 2, 0])
    check(library, scores, visible, k=k, width=width, loads=loads)


def test_groups_fit_into_a_block():
    width_of = top_k_cuda.width_of
    assert [width_of(n, 512) for n in (16_384, 131_072, 1 << 20)] == [0, 16, 32]
    assert width_of(1 << 19, 2048) == 16
    assert width_of((1 << 19) + 1, 2048) is None
