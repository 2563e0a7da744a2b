"""The CUDA sources of scores from packed rows, run thread by thread on the CPU."""

import math
import re
from pathlib import Path

import pytest
import torch

from openv41.ops import index_prefill_cuda, kernels, packed_index_cuda, packed_index_scores
from openv41.ops.cuda_library import FOLDER
from openv41.ops.packed_rows import pack_rows
from tests.close import assert_close
from tests.kernels.on_cpu import compiled

HERE = Path(__file__).parent
LAUNCH = """
int launch(const Given& in, {grid}, void*) {{
    static_assert(sizeof(Shared) <= sizeof(emulated_memory));
    memset(emulated_memory, 255, sizeof(Shared));
    {set}
    run_blocks(kThreads, [&] {{ {kernel}(in); }});
    return 0;
}}
"""
KERNELS = {
    packed_index_cuda.SOURCE: ("packed_scores", "dim3 grid", "gridDim = grid;"),
    index_prefill_cuda.SOURCE: ("score", "int blocks", "gridDim = {unsigned(blocks), 1, 1};"),
}


def for_the_cpu(name):
    """Put the shim in the place of Hopper's instructions, and threads in that of a launch."""
    rows = (FOLDER / "packed_rows.cuh").read_text().replace("#pragma once", "")
    source = (FOLDER / name).read_text().replace('#include "packed_rows.cuh"', rows)
    shim = HERE / "index_products_on_cpu.h"
    source = source.replace('#include "index_products.cuh"', f'#include "{shim}"')
    kernel, grid, start = KERNELS[name]
    launch = LAUNCH.format(kernel=kernel, grid=grid, set=start)
    source = re.sub(r"cudaError_t launch\(.*?\n}\n", launch, source, flags=re.S)
    keys = "gridDim = {unsigned((words + 255) / 256), 1, 1}; blockDim = {256, 1, 1};\n"
    keys += "run_blocks(256, [&] { blockDim = {256, 1, 1}; place_keys("
    source = re.sub(r"place_keys<<<.*?>>>\((.*?)\);", keys + r"\1); });", source, flags=re.S)
    return source.replace("cudaGetLastError()", "0")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Compiles a source for the CPU."""
    return lambda name: compiled(for_the_cpu(name), tmp_path_factory.mktemp("cuda"))


def given(B, T, heads, pages, per_page, num, spread=1.0):  # noqa: PLR0917
    """Packed queries and keys, of which pages stand anywhere; the scales of blocks differ."""

    def packed(*shape):
        blocks = torch.exp2(spread * torch.randn(*shape, 4)).repeat_interleave(32, -1)
        return pack_rows(torch.randn(*shape, 128) * blocks)

    table = torch.stack([torch.randperm(pages)[: -(-num // per_page)] for _ in range(B)])
    visible = torch.randint(0, num + 1, (B, T))
    visible[0, -1] = num
    q, keys = packed(B, T, heads), packed(pages * per_page)
    return q, torch.randn(B, T, heads), keys, table, visible


def compare(got, want, **bounds):
    assert torch.equal(got == -math.inf, want == -math.inf)
    known = want > -math.inf
    assert_close("scores", got[known], want[known], **bounds)


@pytest.mark.slow
@pytest.mark.parametrize(
    "per_page",
    [24, pytest.param(64, marks=pytest.mark.prove), pytest.param(8, marks=pytest.mark.prove)],
)
def test_source_of_decoded_queries(library, per_page):
    """A tile and a part of one, by fewer heads; then candidates, one block of which is none."""
    num = 75 if per_page == 24 else 600
    parts = given(2, 1, 5, -(-2 * num // per_page), per_page, num)
    parts[4][1] = num // 2  # the rest is filled up
    found = library(packed_index_cuda.SOURCE)
    pools = torch.tensor([[[0, 4, -1]], [[9, 2, 1]]])
    for listed, width in ((None, num), (pools, 24)):
        out = torch.full((2, 1, width), math.nan)
        assert not packed_index_cuda.call(found, *parts, per_page, listed, out, None, programs=2)
        with kernels("reference"):
            want = packed_index_scores(*parts, per_page, num, listed)
        compare(out, want, rtol=1e-5, atol=1e-4)


@pytest.mark.slow
def test_source_of_many_queries(library):
    """Nine queries, two of a second block; two tiles by both warpgroups, in two parts."""
    q, weights, keys, table, visible = given(1, 9, 32, 20, 16, 200)
    found = library(index_prefill_cuda.SOURCE)
    codes, scales = torch.empty(256, 128, dtype=torch.uint8), torch.empty(256)
    index_prefill_cuda.call(
        found, "index_prefill_keys", (keys, table[0], codes, scales), (1, 16, 200), None
    )
    out, best = torch.full((9, 200), -math.inf), torch.full((9, 13), -math.inf)
    tensors = q[0], weights[0], codes, scales, visible[0], out, best
    index_prefill_cuda.call(found, "index_prefill_scores", tensors, (9, 200, 2), None)
    with kernels("reference"):
        want = packed_index_scores(q, weights, keys, table, visible, 16, 200)[0]
    compare(out, want, rtol=1e-3, atol=1e-3 * want[want > -math.inf].abs().max().item())
    of_16 = torch.nn.functional.pad(out, (0, 8), value=-math.inf).unflatten(1, (-1, 16))
    seen = torch.arange(13) < (visible[0][:, None] + 15) // 16
    assert torch.equal(best[seen], of_16.amax(2)[seen])
