"""The CUDA source of packed sparse attention, run thread by thread on the CPU, against float64."""

import math
import re
from pathlib import Path

import pytest
import torch

from openv41.ops import kernels, packed_sparse_attention, plan_keys, sparse_attention
from openv41.ops import packed_sparse_attention_cuda as cuda
from openv41.ops.cuda_library import FOLDER
from tests.close import assert_close
from tests.kernels.on_cpu import compiled
from tests.kernels.test_packed_sparse_attention_triton import case, wanted

SHIM = Path(__file__).with_name("hopper_on_cpu.h")
LAUNCH = """
int launch(const Given& in, void* joined, int64_t queries, int programs, void*) {
    static_assert(sizeof(Shared) <= sizeof(emulated_memory));
    memset(emulated_memory, 255, sizeof(Shared));
    gridDim = {unsigned(min(in.items, programs)), 1, 1};
    run_blocks(kThreads, [&] { attend(in); });
    if (in.parts > 1) {
        const int64_t rows = queries * in.heads;
        gridDim = {unsigned((rows + kJoining - 1) / kJoining), 1, 1};
        run_blocks(kJoining * 32, [&] { join_parts(in, static_cast<uint16_t*>(joined), rows); });
    }
    return 0;
}
"""


def for_the_cpu(source):
    """Put the shim in the place of Hopper's instructions, and threads in that of a launch."""
    source = source.replace('#include "hopper.cuh"', f'#include "{SHIM}"')
    source = re.sub(r"cudaError_t launch\(.*?\n}\n", LAUNCH, source, flags=re.S)
    return source.replace("static_cast<cudaStream_t>(stream)", "stream")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The source, compiled for the CPU."""
    source = for_the_cpu((FOLDER / cuda.SOURCE).read_text())
    return compiled(source, tmp_path_factory.mktemp("cuda"))


def run(library, args, parts, blocks):
    """Every element is written."""
    out = torch.full(args[0].shape, math.nan, dtype=args[0].dtype)
    assert not cuda.call(library, tuple(args), out, (parts, blocks), None)
    return out


CASES = [
    ({"T": 1, "H": 40, "W": 20, "K": 40}, 1, 1),
    *(
        pytest.param(*values, marks=pytest.mark.prove)
        for values in (
            ({"T": 2, "H": 40, "W": 20, "K": 70}, 1, 1),
            ({"T": 1, "H": 33, "W": 0, "K": 130, "S": 0}, 2, 1),
            ({"T": 1, "H": 65, "W": 0, "K": 0}, 1, 4),
        )
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("size", "parts", "blocks"), CASES)
def test_source_matches_oracle(library, size, parts, blocks):
    """Blocks of threads that take several queries, cut lists, absent rows and heads."""
    args, stores = case("cpu", dtype=torch.bfloat16, spread=0.5, **{"C": 512, "M": 90, **size})
    args[2] = args[2].int()
    got = run(library, args, parts, blocks)
    assert_close("source", got, wanted(args, stores), ulps=2)


def test_lists_are_cut_into_parts_that_fill_the_processors():
    def parts(queries, *, deterministic=False):
        near, far = (torch.zeros(queries, n, dtype=torch.int64) for n in (128, 512))
        q, store = torch.zeros(queries, 64, 512), torch.zeros(0, 1)
        given = q, store, near, store, far, torch.zeros(64), 1.0
        return cuda.parts_of(given, 132, deterministic=deterministic)

    assert [parts(n) for n in (1, 32, 40)] == [10, 4, 3]
    assert parts(1, deterministic=True) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "size",
    [
        {"T": 200, "H": 64, "W": 128, "K": 512},
        {"T": 33, "H": 64, "W": 128, "K": 512},
        {"T": 70, "H": 40, "W": 65, "K": 130},
        {"T": 40, "H": 70, "W": 0, "K": 5, "S": 0},
        {"T": 40, "H": 64, "W": 0, "K": 0},
    ],
)
def test_packed_sparse_attention_on_a_gpu(device, size, deterministic):
    """Lists of both types with absent rows, queries with none or at strides; twice the same."""
    args, stores = case(device, dtype=torch.bfloat16, spread=0.5, C=512, M=900, **size)
    args[2] = args[2].int()
    args[2][-1], args[4][-1] = -1, -1
    args[0] = args[0].mT.contiguous().mT
    given = tuple(args)
    assert cuda.refuse(given, deterministic=deterministic) is None
    with kernels("required"):
        got = packed_sparse_attention(*given, deterministic=deterministic)
        assert torch.equal(got, packed_sparse_attention(*given, deterministic=deterministic))
    near, far = plan_keys(args[2]), plan_keys(args[4])
    kv = [x.to(device).double() for x in stores]
    q, sink, scale = args[0].double(), args[5], args[6]
    want = sparse_attention.reference(q, kv[0], near, kv[1], far, sink, scale)
    assert_close("packed", got, want, ulps=2)
    assert not got[-1].any()
