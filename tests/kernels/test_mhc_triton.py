"""The kernels of the residual streams against the oracle and the reference in float64."""

import math

import numpy as np
import pytest
import torch

from openv41 import ops
from tests.close import assert_close
from tests.oracles import mhc as oracle
from tests.oracles import norm as norm_oracle

mhc_triton = pytest.importorskip("openv41.ops.mhc_triton", reason="Triton is not installed")

EPS = {"eps": 1e-6, "norm_eps": 1e-20}
SHAPES = [(1, 4, 64), (3, 1, 33), (19, 3, 40), (33, 4, 70), (65, 2, 32)]
gpu = pytest.mark.gpu
BIG = [
    pytest.param(shape, marks=gpu)
    for shape in [(1, 4, 5120), (64, 4, 5120), (127, 4, 1024), (1000, 4, 5120), (2500, 4, 1000)]
]


def inputs(shape, dtype, device, pending=True):
    """Positional and named arguments of the op."""
    T, N, D = shape
    size = N * (N + 2)
    x, a = torch.randn(T, N, D), torch.rand(T, N)
    y, b, c = torch.randn(T, D), torch.rand(T, N, N), torch.rand(T, N)
    named = {
        "fn": torch.randn(size, N * D) / math.sqrt(N * D),
        "base": torch.randn(size),
        "scale": torch.rand(3) + 0.5,
        "norm": torch.randn(D),
    }
    parts = [x.to(dtype), y.to(dtype), b, c, a]
    if not pending:
        parts[1:4] = [None] * 3
    parts = [part if part is None else part.to(device) for part in parts]
    return parts, {name: value.to(device) for name, value in named.items()}


def widened(parts, named):
    """The same in float64 on the CPU."""
    parts = [part if part is None else part.detach().double().cpu() for part in parts]
    return parts, {name: value.detach().double().cpu() for name, value in named.items()}


def by_oracle(parts, named, steps):
    """The op token by token, in float64 loops."""
    parts, named = widened(parts, named)
    fn, base, scale, norm = (named[n].numpy() for n in ("fn", "base", "scale", "norm"))
    found = []
    for t in range(len(parts[0])):
        x, y, b, c, a = (None if part is None else part[t].numpy() for part in parts)
        if y is not None:
            x = oracle.update_streams(x, y, c, b.T)
        mixes = oracle.project(x, fn)
        pre, post, comb = oracle.coefficients(
            mixes, base, scale, num_streams=len(x), iterations=steps
        )
        h = norm_oracle.rms_norm(oracle.mix_streams(x, a), norm, 1e-20)
        found.append((x, h, pre, comb.T, post))
    return [torch.from_numpy(np.array(part)) for part in zip(*found, strict=True)]


def gradients(function, parts, named, seed, **options):
    """Outputs, and gradients of a random weighting of them."""
    leaves = [t for t in (*parts, *named.values()) if t is not None]
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    rest = iter(leaves)
    parts = [part if part is None else next(rest) for part in parts]
    named = {name: next(rest) for name in named}
    outputs = function(*parts, **named, **options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(o.shape, generator=generator).bfloat16() for o in outputs]
    weights = [w.to(o.device, o.dtype) for w, o in zip(weights, outputs, strict=True)]
    wanted = [(o, w) for o, w in zip(outputs, weights, strict=True) if o.requires_grad]
    grads = torch.autograd.grad([o for o, _ in wanted], leaves, [w for _, w in wanted])
    return outputs, grads


def error_of(got, want):
    """Relative error of a whole tensor."""
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    return ((got - want).norm() / want.norm().clamp_min(1e-30)).item()


def assert_similar(name, got, want, bound):
    """Bound the relative error of a whole tensor."""
    assert got.shape == want.shape, name
    assert got.isfinite().all(), name
    error = error_of(got, want)
    assert error <= bound, f"{name}: relative error {error:.3g}, allowed {bound}"


@pytest.mark.parametrize("pending", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [*SHAPES, *BIG])
def test_forward_matches_the_oracle(device, shape, dtype, pending):
    steps = 20 if shape == (1, 4, 64) else 3
    parts, named = inputs(shape, dtype, device, pending)
    got = mhc_triton.mega_mhc.run(*parts, **named, steps=steps, **EPS)
    want = by_oracle(parts, named, steps)
    eps = torch.finfo(dtype).eps
    for name, g, w in zip(("x", "h", "a", "b", "c"), got, want, strict=True):
        assert_close(name, g, w, rtol=16 * eps, atol=16 * eps * max(1, w.abs().max().item()))
    if not pending:
        assert got[0] is parts[0]


@pytest.mark.parametrize("pending", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 4, 64), (35, 3, 72), *BIG])
def test_gradients_are_those_of_float64(device, shape, dtype, pending):
    """In bf16 to 1e-2, or twice the reference's own error: one token's A has few numbers."""
    steps = 3 if device.type == "cpu" else 20
    parts, named = inputs(shape, dtype, device, pending)
    options = {"steps": steps, **EPS}
    _, got = gradients(mhc_triton.mega_mhc.run, parts, named, 1, **options)
    _, want = gradients(ops.mega_mhc.reference, *widened(parts, named), 1, **options)
    _, rounded = gradients(ops.mega_mhc.reference, parts, named, 1, **options)
    names = ["x", *(("y", "b", "c") if pending else ()), "a", *named]
    for name, g, r, w in zip(names, got, rounded, want, strict=True):
        bound = max(1e-2, 2 * error_of(r, w)) if dtype == torch.bfloat16 else 1e-4
        assert_similar(name, g, w, bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(0, 4, 64), (1, 4, 64), (35, 3, 40), *BIG])
def test_updating_and_collapsing_alone(device, shape, dtype):
    parts, _ = inputs(shape, dtype, device)
    for name, some in (("update_streams", parts[:4]), ("mix_streams", [parts[0], parts[4]])):
        got, got_grads = gradients(getattr(mhc_triton, name).run, some, {}, 1)
        reference = getattr(ops, name).reference
        want, want_grads = gradients(reference, widened(some, {})[0], {}, 1)
        bound = 1e-2 if dtype == torch.bfloat16 else 1e-5
        for k, (g, w) in enumerate(zip((*got, *got_grads), (*want, *want_grads), strict=True)):
            assert_similar(f"{name} {k}", g, w, bound)


@pytest.mark.parametrize("shape", [(1, 4, 64), (35, 3, 40), *BIG])
def test_predicting_alone(device, shape):
    parts, named = inputs(shape, torch.float32, device)
    weights = [named[name] for name in ("fn", "base", "scale")]
    options = {"steps": 3, **EPS}
    got, got_grads = gradients(mhc_triton.predict_mix.run, [parts[0], *weights], {}, 1, **options)
    wide = [part.double().cpu() for part in (parts[0], *weights)]
    want, want_grads = gradients(ops.predict_mix.reference, wide, {}, 1, **options)
    for k, (g, w) in enumerate(zip((*got, *got_grads), (*want, *want_grads), strict=True)):
        assert_similar(str(k), g, w, 1e-4)


def test_no_tokens(device):
    parts, named = inputs((0, 4, 64), torch.bfloat16, device)
    outputs, grads = gradients(mhc_triton.mega_mhc.run, parts, named, 1, steps=3, **EPS)
    assert [len(output) for output in outputs] == [0] * 5
    assert all(not grad.any() for grad in grads)


def test_streams_that_are_views(device):
    """The first streams are one row expanded; outputs of a block may be part of a wider tensor."""
    parts, named = inputs((5, 4, 64), torch.float32, device)
    parts[0] = torch.randn(5, 64, device=device)[:, None].expand(-1, 4, -1)
    parts[1] = torch.randn(5, 96, device=device)[:, 16:80]
    parts[2] = parts[2].mT
    parts[4] = torch.rand(4, device=device).expand(5, -1)
    got, got_grads = gradients(mhc_triton.mega_mhc.run, parts, named, 1, steps=3, **EPS)
    plain = [part.contiguous() for part in parts]
    want, want_grads = gradients(mhc_triton.mega_mhc.run, plain, named, 1, steps=3, **EPS)
    for k, (g, w) in enumerate(zip((*got, *got_grads), (*want, *want_grads), strict=True)):
        assert torch.equal(g, w), k


@pytest.mark.parametrize("shape", [(35, 3, 40), *BIG])
def test_every_element_is_written_and_runs_are_equal(device, shape):
    """Fresh memory holds NaN in tests; a second run gives the same bits."""
    parts, named = inputs(shape, torch.bfloat16, device)
    torch.use_deterministic_algorithms(True, warn_only=True)
    runs = [gradients(mhc_triton.mega_mhc.run, parts, named, 1, steps=3, **EPS) for _ in range(3)]
    for outputs, grads in runs:
        for k, (tensor, first) in enumerate(
            zip((*outputs, *grads), (*runs[0][0], *runs[0][1]), strict=True)
        ):
            assert tensor.isfinite().all(), k
            assert torch.equal(tensor, first), k


@gpu
@pytest.mark.parametrize("tokens", [1, 64, 3000])
def test_triton_does_as_cuda(tokens, monkeypatch):
    """What runs where there is no compiler of CUDA."""
    from openv41.ops import mhc_cuda  # noqa: PLC0415 -- needs a compiler

    parts, named = inputs((tokens, 4, 5120), torch.bfloat16, "cuda")
    options = {"steps": 20, **EPS}
    want = mhc_triton.mega_mhc.run(*parts, **named, **options)
    monkeypatch.setattr(mhc_cuda, "fits", lambda *_: False)
    got = mhc_triton.mega_mhc.run(*parts, **named, **options)
    for name, g, w in zip(("x", "h", "a", "b", "c"), got, want, strict=True):
        assert_similar(name, g, w, 1e-2 if name in "xh" else 1e-4)


@gpu
def test_the_sources_in_cuda_compile():
    """Else Triton would run in their place, and every other test pass."""
    from openv41.ops import mhc_cuda  # noqa: PLC0415 -- needs a compiler

    assert mhc_cuda.library() is not None
    assert mhc_cuda.clusters(5120) > 0


@gpu
@pytest.mark.parametrize("tokens", [1, 64, 3000])
def test_replays_of_a_graph(tokens):
    parts, named = inputs((tokens, 4, 5120), torch.bfloat16, "cuda")

    def run():
        return mhc_triton.mega_mhc.run(*parts, **named, steps=20, **EPS)

    want = run()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        got = run()
    for _ in range(3):
        for tensor in got:
            tensor.detach().fill_(math.nan)
        graph.replay()
        for k, (g, w) in enumerate(zip(got, want, strict=True)):
            assert torch.equal(g, w), k


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda parts, _: parts.__setitem__(slice(0, 2), [p.double() for p in parts[:2]]),
            "float32, not",
        ),
        (lambda parts, _: parts.__setitem__(4, parts[4].half()), "coefficients must be float32"),
        (lambda parts, _: parts.__setitem__(1, parts[1].float()), "output is torch.float32"),
        (lambda _, options: options.update(deterministic=True), "depend on how many"),
    ],
)
def test_what_is_refused(device, change, reason):
    parts, named = inputs((2, 4, 32), torch.bfloat16, device)
    options = {"steps": 3, **EPS}
    change(parts, options)
    assert reason in mhc_triton.mega_mhc.refuse(*parts, **named, **options)


def test_refusals_take_arguments_by_name(device):
    """As the benchmarks and the model give them."""
    (x, y, b, c, a), named = inputs((2, 4, 32), torch.bfloat16, device)
    weights = {name: named[name] for name in ("fn", "base", "scale")}
    options = {"steps": 3, **EPS}
    assert mhc_triton.mega_mhc.refuse(x=x, y=y, b=b, c=c, a=a, **named, **options) is None
    assert mhc_triton.update_streams.refuse(x=x, y=y, b=b, c=c) is None
    assert mhc_triton.mix_streams.refuse(x=x, a=a) is None
    assert mhc_triton.predict_mix.refuse(x=x, **weights, **options) is None


def test_many_streams_are_refused(device):
    parts, named = inputs((2, 5, 32), torch.bfloat16, device)
    assert "5 streams" in mhc_triton.mega_mhc.refuse(*parts, **named, steps=3, **EPS)
    parts, named = inputs((2, 4, 32), torch.bfloat16, device)
    assert mhc_triton.mega_mhc.refuse(*parts, **named, steps=3, **EPS) is None
