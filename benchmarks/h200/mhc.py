"""What happens to the streams between two blocks, forward and with its gradients."""

import ctypes
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.h200.harness import main
from benchmarks.h200.rows import Goal, Inputs, Row, relative_error, tensors_of
from openv41.ops import mega_mhc, mhc_cuda, mix_streams, predict_mix, rms_norm, update_streams
from openv41.ops.cuda_library import load

DIM, STREAMS = 5120, 4
BOXES = Path(__file__).parent / "candidate_sources" / "mhc_boxes.cu"
CONSTANTS = {"steps": 20, "eps": 1e-6, "norm_eps": 1e-20}
TRIED = {
    "mega_mhc T=8192 d=5120 n=4": (
        "Triton in two launches 822 us, in one 1149 us; CUDA C++ in tiles of 128 tokens by 128 "
        "numbers, whose programs wait at a counter, 652 us. Clusters of 16 blocks that keep their "
        "slice's weights in registers and exchange sums through each other's shared memory, 325 "
        "us: 7 of them fit, on 112 of 132 processors. Now 8 groups of 16 blocks that exchange "
        "sums through memory, weights in shared memory, no barrier of the block, two warps for "
        "all that the others would wait for: 260 us, 254 for a mere copy in the same pattern, 258 "
        "without the products, 277 with 7 groups. Slower: a warp for each tile, which walks along "
        "the slice, 323 (16 slices, 6 warps) to 351 (32 slices, 12 warps), whatever it computes; "
        "the warps of a block in step 269; norms awaited one tile later instead of two 295; slices "
        "of rows prefetched to L2 by bulk copies of 640 B 356, line by line 267, whole rows by "
        "bulk copies two tiles ahead 268, three ahead 260 (none 264); L2 sectors by 64 or 256 B "
        "instead of 128 278, 270. DRAM moves 0.99 of the floor's bytes and is busy 65% of the "
        "time. A lane's 16 bytes of 8 rows ask L2 for halves of lines. The candidate, right on a "
        "CPU, thread by thread, but not run on a GPU yet, moves whole lines both ways as boxes of "
        "tensor maps, two warps together, with half of the weights in registers to make room."
    ),
    "mega_mhc T=1 d=5120 n=4": (
        "Triton 20.2 us; CUDA C++ with a counter 26.5 us; a cluster that also went through many "
        "tiles 13.5 us. A cluster for a tile alone, coefficients by a warp of its own, B by a "
        "second cluster: 12.0 with weights by bulk copies, of which a barrier's worth of shuffles "
        "under a condition, 3,000 cycles, has been taken out since; 11.5 with 20 warps whose lanes "
        "copy them, 10.8 without a first pass over the coefficients' code, 12.7 with 10 warps; one "
        "cluster instead of two 13.1. An empty launch is 4.3 us; of 13,300 cycles at 1.98 GHz "
        "3,900 went by until all copies were asked for, 1,800 for the update, 3,000 for the "
        "products, 1,100 for the exchange, 3,100 for the coefficients. Weights come at about 32 B "
        "a cycle to each block, however they are asked for: the blocks of a cluster share a GPC. "
        "All processors, sums through memory: 7.7 us for 2 MB and the last block's sums alone."
    ),
    "mega_mhc T=8 d=5120 n=4": (
        "As T=1: 14.0 us before; bulk copies 12.6, copies by lanes 12.5 and 11.8."
    ),
    "mega_mhc T=64 d=5120 n=4": (
        "Triton 25.9 us; clusters that went through many tiles, 15.6 to 15.8 us. For a tile alone, "
        "as T=1: bulk copies 14.8, copies by lanes 16.5 and 16.0. 8 clusters for B and the rest do "
        "not fit, and 64 processors do the work of 64 tokens."
    ),
    "mega_mhc T=256 d=5120 n=4": (
        "In clusters 26.6 us, in the groups of many tokens 22: from 113 tokens on they are faster "
        "(128 tokens 18.6 for 21.1, 1,024 44 for 57, 4,096 139 for 171)."
    ),
}
NAMES = ("x", "y", "b", "c", "a", "fn", "base", "scale", "norm")


def inputs(tokens: int, generator: torch.Generator) -> Inputs:
    """Streams, a block's output, coefficients of about their real sizes, and the weights."""

    def randn(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=generator.device)

    size = STREAMS * (STREAMS + 2)
    return {
        "x": randn(tokens, STREAMS, DIM).bfloat16(),
        "y": randn(tokens, DIM).bfloat16(),
        "b": randn(tokens, STREAMS, STREAMS).softmax(-1),
        "c": 2 * randn(tokens, STREAMS).sigmoid(),
        "a": randn(tokens, STREAMS).sigmoid(),
        "fn": randn(size, STREAMS * DIM) / math.sqrt(STREAMS * DIM),
        "base": randn(size),
        "scale": 1 + 0.1 * randn(3).abs(),
        "norm": 1 + 0.1 * randn(DIM),
        **CONSTANTS,
    }


def in_double(given: Inputs, rows: int) -> Inputs:
    """The first tokens of the inputs in float64."""
    wide = {name: given[name].double() for name in NAMES}
    return CONSTANTS | wide | {name: wide[name][:rows] for name in ("x", "y", "b", "c", "a")}


def error(given: Inputs, outputs: tuple[Tensor, ...]) -> float:
    """The largest relative error of an output, against float64 on some tokens at both ends."""
    found = []
    for rows in (slice(0, 64), slice(-64, None)):
        some = given | {name: given[name][rows] for name in ("x", "y", "b", "c", "a")}
        want = mega_mhc.reference(**in_double(some, 64))
        found += [relative_error(g[rows], w) for g, w in zip(outputs, want, strict=True)]
    return max(found)


def separately(**given: Any) -> tuple[Tensor, ...]:  # noqa: ANN401
    """The same with a kernel for each step, which moves (4 N + 4) D numbers."""
    weights = {name: given[name] for name in ("fn", "base", "scale")}
    new = update_streams(*(given[name] for name in NAMES[:4]))
    coefficients = predict_mix(new, **weights, **CONSTANTS)
    h = rms_norm(mix_streams(new, given["a"]), given["norm"], CONSTANTS["norm_eps"])
    return new, h, *coefficients


def plainly(**given: Any) -> tuple[Tensor, ...]:  # noqa: ANN401
    """Plain mHC reads with the A predicted from the same streams: they are read once more."""
    new, _, a, b, c = mega_mhc(**given)
    return new, rms_norm(mix_streams(new, a), given["norm"], CONSTANTS["norm_eps"]), a, b, c


def plain_error(given: Inputs, outputs: tuple[Tensor, ...]) -> float:
    """As ``error``, of ``plainly``."""
    wide = in_double(given, 64)
    new, _, a, b, c = mega_mhc.reference(**wide)
    h = rms_norm.reference(mix_streams.reference(new, a), wide["norm"], CONSTANTS["norm_eps"])
    return max(relative_error(g[:64], w) for g, w in zip(outputs, (new, h, a, b, c), strict=True))


def plain_row(tokens: int) -> Row:
    """Plain mHC, for comparison: at least (3 N + 2) D."""
    return Row(
        op="mega_mhc",
        shape={"T": tokens, "d": DIM, "n": STREAMS, "order": "plain"},
        make=lambda generator: inputs(tokens, generator),
        ours=plainly,
        error=plain_error,
        tolerance=0.01,
        floor_bytes=bytes_of(tokens, 3 * STREAMS + 2),
    )


def in_boxes(ahead: int, **given: Any) -> tuple[Tensor, ...]:  # noqa: ANN401
    """The candidate for many tokens; ``ahead`` as in its source, 0 for none."""
    library = load(str(BOXES))
    assert library is not None, "the candidate needs a compiler of CUDA, and Hopper"
    x = given["x"]
    tokens, num, dim = x.shape
    new, h = torch.empty_like(x), torch.empty_like(given["y"])
    a, b, c, mixes, inverse = (
        torch.empty(tokens, *rest, device=x.device)
        for rest in ((num,), (num, num), (num,), (32,), (2,))
    )
    cut = mhc_cuda.groups()
    shares = mhc_cuda._shares(cut, -(-tokens // mhc_cuda.TILE), x.device)
    pointers = *(given[name] for name in NAMES), new, h, a, b, c, mixes, inverse, *shares
    is_bf16 = int(given["norm"].dtype == torch.bfloat16)
    strides = *x.stride()[:2], given["y"].stride(0)
    sizes = *strides, tokens, dim, given["steps"], is_bf16, *cut, ahead
    error = library.openv41_mega_mhc_boxes(
        mhc_cuda._addresses(*pointers),
        (ctypes.c_longlong * len(sizes))(*sizes),
        ctypes.c_float(given["eps"]),
        ctypes.c_float(given["norm_eps"]),
        ctypes.c_void_p(torch.cuda.current_stream(x.device).cuda_stream),
    )
    assert error == 0, f"the launch of the candidate failed: CUDA error {error}"
    return new, h, a, b, c


def bytes_of(tokens: int, rows: int) -> int:
    """``rows`` rows of bf16 per token; the coefficients, and the weights once."""
    size = STREAMS * (STREAMS + 2)
    return tokens * (rows * DIM * 2 + (2 * size + STREAMS) * 4) + size * STREAMS * DIM * 4 + DIM * 4


def forward_row(tokens: int) -> Row:
    """One boundary forward: one read and one write of the streams."""
    goals = [Goal("over_empty_us", 5.0), Goal("peer_ratio", 2.5)]
    if tokens >= 8192:
        goals = [Goal("over_floor", 1.25), Goal("peer_ratio", 1.3, "best_mix")]
    candidates = {
        "candidate: boxes": partial(in_boxes, 3),
        "candidate: boxes, no rows ahead": partial(in_boxes, 0),
    }
    split = {"separate kernels": separately} | candidates if tokens >= 8192 else {}
    return Row(
        op="mega_mhc",
        shape={"T": tokens, "d": DIM, "n": STREAMS},
        make=lambda generator: inputs(tokens, generator),
        ours=mega_mhc,
        reference=mega_mhc,
        error=error,
        tolerance=0.01,
        floor_bytes=bytes_of(tokens, 2 * STREAMS + 2),
        floor_flops=2 * tokens * STREAMS * DIM * STREAMS * (STREAMS + 2),
        variants=split,
        peers=("sglang:mhc", "sglang:mhc_best_mix", "tilekernels:mhc"),
        goals=tuple(goals),
    )


def with_gradients(tokens: int, generator: torch.Generator) -> Inputs:
    """Inputs as leaves, and gradients of the outputs."""
    given = inputs(tokens, generator)
    with torch.no_grad():
        outputs = mega_mhc.reference(**given)
    given["grads"] = [
        torch.randn(o.shape, generator=generator, device=o.device).to(o.dtype) for o in outputs
    ]
    return {n: v.requires_grad_() if n in NAMES else v for n, v in given.items()}


def step(function: Callable[..., tuple[Tensor, ...]] = mega_mhc, **given: Any) -> tuple[Any, ...]:  # noqa: ANN401
    """Forward and backward: the gradients of all inputs."""
    grads = given.pop("grads")
    outputs = function(**given)
    return torch.autograd.grad(outputs, [given[name] for name in NAMES], grads)


def gradient_error(given: Inputs, outputs: tuple[Tensor, ...]) -> float:
    """The largest relative error of a gradient, against float64, piece by piece of tokens."""
    sums: list[Tensor] = []
    rows: list[list[Tensor]] = []
    with torch.enable_grad():
        for first in range(0, len(given["x"]), 512):
            part = slice(first, first + 512)
            leaves = {n: given[n].detach().double() for n in NAMES}
            leaves |= {n: leaves[n][part] for n in NAMES[:5]}
            leaves = {n: leaf.requires_grad_() for n, leaf in leaves.items()}
            grads = [g[part].double() for g in given["grads"]]
            found = step(mega_mhc.reference, **leaves, **CONSTANTS, grads=grads)
            rows.append(list(found[:5]))
            sums = [a + b for a, b in zip(sums, found[5:], strict=True)] if sums else found[5:]
    want = [torch.cat(parts) for parts in zip(*rows, strict=True)] + list(sums)
    return max(relative_error(g, w) for g, w in zip(outputs, want, strict=True))


def training_row(tokens: int) -> Row:
    """A boundary and its gradients; the floor reads and writes every tensor once each way."""
    return Row(
        op="mega_mhc",
        shape={"T": tokens, "d": DIM, "n": STREAMS, "pass": "forward+backward"},
        make=lambda generator: with_gradients(tokens, generator),
        ours=step,
        error=gradient_error,
        tolerance=0.01,
        floor_bytes=bytes_of(tokens, 2 * STREAMS + 2) + bytes_of(tokens, 3 * STREAMS + 3),
        goals=(Goal("us", 1800.0),),
    )


def part_row(op: Callable[..., Any], tokens: int, rows: int, names: tuple[str, ...]) -> Row:
    """A part of the boundary alone, as a kernel of its own would do it."""

    def run(**given: Tensor) -> Any:  # noqa: ANN401
        return op(**given, **(CONSTANTS if op is predict_mix else {}))

    def wrong(given: Inputs, outputs: Any) -> float:  # noqa: ANN401
        some = {n: v[:64].double() if n in NAMES[:5] else v.double() for n, v in given.items()}
        want = op.reference(**some, **(CONSTANTS if op is predict_mix else {}))
        pairs = zip(tensors_of(outputs), tensors_of(want), strict=True)
        return max(relative_error(g[:64], w) for g, w in pairs)

    return Row(
        op=op.__name__,
        shape={"T": tokens, "d": DIM, "n": STREAMS},
        make=lambda generator: {n: v for n, v in inputs(tokens, generator).items() if n in names},
        ours=run,
        reference=run,
        error=wrong,
        tolerance=0.01,
        floor_bytes=bytes_of(tokens, rows),
    )


def rows() -> list[Row]:
    """A chunk of a prompt, and the tokens of decode steps."""
    many, *few = (forward_row(tokens) for tokens in (8192, 1, 64, 8, 256))
    parts = [
        part_row(update_streams, 8192, 2 * STREAMS + 1, NAMES[:4]),
        part_row(mix_streams, 8192, STREAMS + 1, ("x", "a")),
        part_row(predict_mix, 8192, STREAMS, ("x", "fn", "base", "scale")),
    ]
    return [many, training_row(8192), *few, *parts, plain_row(8192)]


if __name__ == "__main__":
    main(__file__)
