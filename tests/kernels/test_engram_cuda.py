"""The CUDA source of the gated update, run thread by thread on the CPU, and on a GPU."""

import math
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from openv41.ops import engram, engram_cuda, kernels
from openv41.ops.cuda_library import FOLDER
from tests.close import assert_close
from tests.kernels.on_cpu import compiled

SHIM = Path(__file__).with_name("hopper_on_cpu.h")
COPIES = """
thread_local int awaited;
inline void expect(uint32_t, uint32_t bytes) { awaited = bytes; }
inline void copy_row(uint32_t to, const uint8_t* from, uint32_t bytes, uint32_t barrier) {
    if (to % 16 || uintptr_t(from) % 16 || bytes % 16) std::abort();
    memcpy(shared_memory + to, from, bytes);
    if ((awaited -= bytes) == 0) arrive(barrier);
}
inline int __float_as_int(float x) { return int(as_uint(x)); }
inline float __expf(float x) { return std::exp(x); }
struct Eight {"""
LAUNCH = """
int launch(const Given& in, int blocks, void*) {
    if (bytes_for<kBackward>(in.dim) > sizeof(emulated_memory)) std::abort();
    gridDim = {unsigned(blocks), 1, 1};
    run_blocks(in.dim / 8, [&] {
        blockDim = {unsigned(in.dim / 8), 1, 1};
        engram<kBackward>(in);
    });
    return 0;
}
"""
EPS = 1e-20


def for_the_cpu(source):
    """Put the shim in the place of Hopper's instructions, and threads in that of a launch."""
    source = source.replace('#include "hopper.cuh"', f'#include "{SHIM}"')
    source = re.sub(
        r"__device__ __forceinline__ void expect\(.*?struct Eight {", COPIES, source, flags=re.S
    )
    source = re.sub(r"cudaError_t launch\(.*?\n}\n", LAUNCH, source, flags=re.S)
    return source.replace("static_cast<cudaStream_t>(stream)", "stream")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The source, compiled for the CPU."""
    source = for_the_cpu((FOLDER / engram_cuda.SOURCE).read_text())
    return compiled(source, tmp_path_factory.mktemp("cuda"))


def inputs(tokens, dim, weights, device="cpu"):
    """Streams, keys and values cut from one product, weights, image rows; and a gradient."""
    draw = torch.Generator(device).manual_seed(tokens + dim)

    def normal(*shape):
        return torch.randn(shape, generator=draw, device=device).bfloat16()

    keys, value = normal(tokens, 5 * dim).split([4 * dim, dim], dim=1)
    x = normal(tokens, 4, dim)
    x[-1, 1] = 0.0  # a dot of zero
    shown = torch.arange(tokens, device=device) % 3 == 1
    both = normal(4, dim).to(weights), normal(4, dim).to(weights)
    return (x, keys.unflatten(1, (4, dim)), value, *both, shown), normal(tokens, 4, dim)


def exact(given, grad):
    """Streams and all gradients in float64."""
    *leaves, shown = given
    leaves = [t.detach().double().requires_grad_() for t in leaves]
    out = engram.engram_update.reference(*leaves, EPS, shown)
    return out, torch.autograd.grad(out, leaves, grad.double())


def on_the_cpu(monkeypatch):
    """Let the launcher do without a device, and what is not written be NaN."""

    def poisoned(*shape, dtype, device):
        return torch.full(shape if isinstance(shape[0], int) else shape[0], math.nan, dtype=dtype)

    monkeypatch.setattr(torch, "empty", poisoned)
    monkeypatch.setattr(torch, "empty_like", lambda x: torch.full_like(x, math.nan))
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    stream = SimpleNamespace(cuda_stream=None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)


@pytest.mark.parametrize(
    ("tokens", "dim", "blocks", "weights"),
    [(5, 256, 2, torch.bfloat16), (1, 512, 1, torch.float32), (7, 512, 3, torch.bfloat16)],
)
def test_source_on_the_cpu(library, monkeypatch, tokens, dim, blocks, weights):  # noqa: PLR0917
    """Blocks of threads that take several tokens; an image row, and a stream of zeros."""
    given, grad = inputs(tokens, dim, weights)
    want, slopes = exact(given, grad)
    on_the_cpu(monkeypatch)
    out = engram_cuda._forward(library, given, EPS, blocks)
    assert_close("streams", out.double(), want, rtol=2**-8, atol=1e-6)
    *found, partial = engram_cuda._backward(library, given, grad, EPS, blocks)
    both = partial.sum(0)
    found += [both * given[4].float(), both * given[3].float()]
    for name, got, expected in zip(("x", "key", "value", "q", "k"), found, slopes, strict=True):
        kept = slice(0, -1) if name in {"x", "key"} else slice(None)  # steep at the zeros
        error = (got.double() - expected)[kept].norm() / expected[kept].norm().clamp_min(1e-9)
        assert error < 4e-3, name


def test_a_wrong_source_is_found_out(library, monkeypatch):
    """As on a GPU before its first use; here what it writes is changed behind it.

    What it is compared with runs where kernels are required, too, and they have no gradients.
    """
    on_the_cpu(monkeypatch)
    with kernels("required"):
        assert engram_cuda._is_right(library, "cpu", ((256, 2),))
    forward = engram_cuda._forward
    monkeypatch.setattr(engram_cuda, "_forward", lambda *given: forward(*given) * 1.02)
    assert not engram_cuda._is_right(library, "cpu", ((256, 2),))
    monkeypatch.setattr(engram_cuda, "_forward", lambda *given: forward(*given) * math.nan)
    assert not engram_cuda._is_right(library, "cpu", ((256, 2),))


def test_what_it_takes(monkeypatch):
    """It takes nothing unless it is switched on, and nothing on a CPU."""
    given, grad = inputs(600, 256, torch.bfloat16)
    assert not engram_cuda.fits(given)
    monkeypatch.setattr(engram_cuda, "FEW", 0)
    assert not engram_cuda.fits(given, grad)


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "dim"), [(1, 256), (133, 5120), (1030, 1024), (2000, 5120)])
@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32])
def test_on_a_gpu(monkeypatch, tokens, dim, weights):
    """Against float64; bits repeat."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    assert engram_cuda.library() is not None
    monkeypatch.setattr(engram_cuda, "FEW", 0)
    given, grad = inputs(tokens, dim, weights, "cuda")
    assert engram_cuda.fits(given, grad)
    want, slopes = exact(given, grad)
    out = engram_cuda.forward(given, EPS)
    assert torch.equal(out, engram_cuda.forward(given, EPS))
    assert_close("streams", out.double(), want, rtol=2**-8, atol=1e-6)
    *found, partial = engram_cuda.backward(given, grad, EPS)
    again = engram_cuda.backward(given, grad, EPS)
    assert all(torch.equal(a, b) for a, b in zip((*found, partial), again, strict=True))
    both = partial.sum(0)
    found += [both * given[4].float(), both * given[3].float()]
    for name, got, expected in zip(("x", "key", "value", "q", "k"), found, slopes, strict=True):
        kept = slice(0, -1) if name in {"x", "key"} else slice(None)
        error = (got.double() - expected)[kept].norm() / expected[kept].norm().clamp_min(1e-9)
        assert error < 1e-2, name
