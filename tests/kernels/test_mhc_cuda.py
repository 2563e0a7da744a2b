"""The CUDA sources of the streams, run thread by thread on the CPU, against float64."""

import ctypes
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.h200 import mhc as timed
from openv41 import ops
from openv41.ops import mhc_cuda
from openv41.ops.cuda_library import FOLDER
from tests.close import assert_close
from tests.kernels.on_cpu import compiled

SHIM, MAPS = map(Path(__file__).with_name, ("cuda_on_cpu.h", "tensor_maps_on_cpu.h"))
LAUNCHES = (
    """
template <bool kHasY, bool kHasG>
cudaError_t launch(const Args &args, int groups, cudaStream_t stream) {
  static_assert(kBytes <= sizeof(emulated_memory));
  gridDim = {unsigned(args.dim / kWidth), unsigned(groups), 1};
  run_blocks(kWarps * 32, [&] { gradients<kHasY, kHasG>(args); });
  return 0;
}
""",
    """
template <bool kHasY>
cudaError_t launch(const Args &args, int parts, cudaStream_t stream) {
  gridDim = {unsigned(kRanks * parts * ((args.tokens + kTile - 1) / kTile)), 1, 1};
  const unsigned width = args.dim / kRanks;
  const auto bytes = sizeof(Memory) + kStreams * kMixes * (width + kPad) * sizeof(float);
  run_clusters(width + 32, bytes, [&] { boundary<kHasY>(args, parts); });
  return 0;
}
""",
    """
template <bool kHasY>
cudaError_t launch(const Args &args, const Shares &shares, cudaStream_t stream) {
  gridDim = {unsigned(shares.slices * shares.groups), 1, 1};
  const int warps = args.dim / (shares.slices * 32);
  run_grid(warps * 32 + 64, bytes_of(warps), [&] { boundary<kHasY>(args, shares); });
  return 0;
}
""",
    """
template <bool kHasY>
cudaError_t launch_on(const Args &args, const Shares &shares, const Maps &maps,
                      cudaStream_t stream) {
  gridDim = {unsigned(shares.slices * shares.groups), 1, 1};
  const int warps = args.dim / (shares.slices * 32);
  run_grid(warps * 32 + 64, bytes_of(warps), [&] { boundary<kHasY>(args, shares, maps); });
  return 0;
}
""",
)


def for_the_cpu(source):
    """Put the shim's pairs and products in the place of PTX, and threads in that of a launch."""
    source = source.replace('#include "tensor_maps.cuh"', f'#include "{MAPS}"')
    source = source.replace("__align__(1024) ", "")
    for name in ("mhc_boundary.cuh", "mhc_pairs.cuh"):
        text = (FOLDER / name).read_text().replace("#pragma once", "")
        source = source.replace(f'#include "{name}"', text)
    source = source.replace('#include "mhc_cluster.cuh"', "")
    source = source.replace("#include <cuda_runtime.h>", "")
    for pattern, replacement in (
        (r"asm\(\"cvt.*?;\n", "pair = emulated_pack(first, second);\n"),
        (r"asm\(\"rcp.*?;\n", "inverse = 1 / of;\n"),
        (r"asm volatile\(.*?\);\n", "emulated_multiply(sum, a0, a1, a2, a3, b0, b1);\n"),
        (r"template <bool kHasY>\ncudaLaunchConfig_t.*?\n}\n", ""),
        (r'extern "C" int openv41_mega_mhc_clusters.*?\n}\n', ""),
    ):
        source = re.sub(pattern, replacement, source, flags=re.S)
    for name, place in (("memory", "emulated_memory"), ("whole", "own_memory")):
        source = source.replace(
            f"extern __shared__ uint4 {name}[];",
            f"uint4 *{name} = reinterpret_cast<uint4 *>({place});",
        )
    for launch in LAUNCHES:
        head = re.escape(launch.strip().partition(" {\n")[0])
        source = re.sub(head + r" {\n.*?\n}\n", launch, source, flags=re.S)
    return f'#include "{SHIM}"\n' + source


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    """The sources of the forward for few and for many tokens, of the gradients, and a candidate."""
    return [
        compiled(for_the_cpu(path.read_text()), tmp_path_factory.mktemp("cuda"), "-O1")
        for path in (*(FOLDER / name for name in mhc_cuda.SOURCES), timed.BOXES)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "dim", "cut", "has_y"),
    [
        (1, 512, 2, True),
        (37, 512, 1, False),
        (75, 128, (2, 1), True),
        (50, 96, (3, 2), False),
        (75, 128, (2, 1, 3), True),
        (50, 192, (3, 2, 0), False),
        pytest.param(1040, 128, (4, 1), True, marks=pytest.mark.prove),
    ],
)
def test_the_streams(libraries, tokens, dim, cut, has_y):
    """Few tokens in clusters; many in groups, whose tiles follow each other; the last is cut.

    A cut with a third number, how far rows are fetched ahead, is for the candidate.
    """
    T, N = tokens, 4
    x, y, a = torch.randn(T, N, dim).bfloat16(), torch.randn(T, dim).bfloat16(), torch.rand(T, N)
    b, c = torch.rand(T, N, N), torch.rand(T, N)
    weights = {
        "fn": torch.randn(24, N * dim) / math.sqrt(N * dim),
        "base": torch.randn(24),
        "scale": torch.rand(3) + 0.5,
        "norm": (1 + torch.rand(dim)).to(torch.bfloat16 if has_y else torch.float32),
    }
    pending = (y, b, c) if has_y else (None,) * 3
    out = [torch.full_like(x, math.nan), torch.full_like(y, math.nan), torch.full_like(a, math.nan)]
    out += [torch.full((T, *size), math.nan) for size in ((N, N), (N,), (32,), (2,))]
    pointers = [x, *pending, a, *weights.values(), *out]
    sizes = [*x.stride()[:2], y.stride(0), T, dim, 20, int(has_y)]
    if isinstance(cut, int):
        function = libraries[0].openv41_mega_mhc
        sizes.append(cut)
    else:
        function = libraries[1].openv41_mega_mhc_many
        if len(cut) == 3:
            function = libraries[3].openv41_mega_mhc_boxes
        shares = mhc_cuda._shares(mhc_cuda.Groups(*cut[:2]), -(-T // 16), x.device)
        pointers.extend((*(share.fill_(math.nan) for share in shares[:2]), shares[2].zero_()))
        sizes.extend(cut)
    function(
        mhc_cuda._addresses(*pointers),
        (ctypes.c_longlong * len(sizes))(*sizes),
        ctypes.c_float(1e-6),
        ctypes.c_float(1e-20),
        None,
    )
    wide = [part if part is None else part.double() for part in (x, *pending, a)]
    weights = {name: weight.double() for name, weight in weights.items()}
    options = {"steps": 20, "eps": 1e-6, "norm_eps": 1e-20}
    want = ops.mega_mhc.reference(*wide, **weights, **options)
    new = (out[0] if has_y else x).double()  # as they are written
    rounded = ops.predict_mix.reference(
        new,
        weights["fn"],
        weights["base"],
        weights["scale"],
        **options,
    )
    for name, got, right, eps in (
        *((("x", out[0], want[0], 2**-8),) if has_y else ()),
        ("h", out[1], want[1], 2**-7),
        *zip("abc", out[2:5], rounded, (2e-5,) * 3, strict=True),
    ):
        assert_close(name, got, right, rtol=eps, atol=eps * right.abs().max().item() / 8)
    assert out[5].isfinite().all()
    assert not out[5][:, 24:].any()
    assert_close("inverse", out[6][:, 0], new.square().mean((1, 2)).rsqrt(), rtol=1e-5, atol=0)
    h = (a.double()[..., None] * want[0]).sum(1)
    assert_close("inverse of h", out[6][:, 1], h.square().mean(1).rsqrt(), rtol=1e-4, atol=0)


@pytest.mark.slow
def test_the_candidate_as_it_is_timed(libraries, monkeypatch):
    """Its arguments are in order."""
    monkeypatch.setattr(timed, "DIM", 128)
    monkeypatch.setattr(timed, "load", lambda _: libraries[3])
    monkeypatch.setattr(mhc_cuda, "groups", lambda: mhc_cuda.Groups(2, 1))
    monkeypatch.setattr(mhc_cuda, "_shares", zeroed(mhc_cuda._shares))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=None))
    given = timed.inputs(65, torch.Generator().manual_seed(0))
    assert timed.error(given, timed.in_boxes(3, **given)) < 0.01


def zeroed(shares):
    """The shares, whose counters a launch on a GPU sets to zero."""

    def make(*given):
        found = shares(*given)
        found[2].zero_()
        return found

    return make


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
def test_gradients_of_the_streams(libraries, has_y):
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
    libraries[2].openv41_mega_mhc_backward(
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
