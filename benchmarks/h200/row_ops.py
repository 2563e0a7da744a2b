"""What is done row by row between products: norm, rotary embedding, SwiGLU; and their gradients."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.h200.harness import main
from benchmarks.h200.rows import Inputs, Row, relative_error
from openv41 import ops

TRIED = {
    "rotate T=4096 H=16 pass=forward": (
        "Timed as one tile of whole rows, in which every channel also loads its partner and its "
        "turn. Since then the 64 rotary channels are a tile of their own, which is not timed."
    ),
}
Op = Callable[[Inputs], Tensor]


def normal(generator: torch.Generator, *size: int) -> Tensor:
    """Values in bfloat16."""
    made = torch.empty(size, device=generator.device, dtype=torch.bfloat16)
    return made.normal_(generator=generator)


def norm_inputs(tokens: int, width: int, generator: torch.Generator) -> Inputs:
    """Rows, a weight in float32, a gradient."""
    weight = torch.rand(width, generator=generator, device=generator.device) + 0.5
    return {
        "x": normal(generator, tokens, width).requires_grad_(),
        "weight": weight.requires_grad_(),
        "gradient": normal(generator, tokens, width),
    }


def rope_inputs(tokens: int, heads: int, generator: torch.Generator) -> Inputs:
    """Heads of 512 channels, 64 of them rotary."""
    positions = torch.arange(tokens, device=generator.device)
    frequencies = ops.rope_frequencies(64, 1e4).to(generator.device)
    return {
        "x": normal(generator, tokens, heads, 512).requires_grad_(),
        "table": ops.rope_table(positions, frequencies),
        "gradient": normal(generator, tokens, heads, 512),
    }


def swiglu_inputs(pairs: int, width: int, generator: torch.Generator) -> Inputs:
    """Gate, up and the weight of each row."""
    weight = torch.rand(pairs, generator=generator, device=generator.device)
    return {
        "x": normal(generator, pairs, width).requires_grad_(),
        "up": normal(generator, pairs, width).requires_grad_(),
        "weight": weight.requires_grad_(),
        "gradient": normal(generator, pairs, width),
    }


def norm(given: Inputs) -> Tensor:
    """The op on its inputs."""
    return ops.rms_norm(given["x"], given["weight"], 1e-20)


def rope(given: Inputs) -> Tensor:
    """Likewise."""
    return ops.rotate(given["x"], given["table"])


def swiglu(given: Inputs) -> Tensor:
    """Likewise."""
    return ops.clamped_swiglu(given["x"], given["up"], 10.0, given["weight"])


def leaves(given: Inputs) -> list[Tensor]:
    """What has a gradient."""
    return [t for t in given.values() if isinstance(t, Tensor) and t.requires_grad]


def forward(op: Op) -> Callable[..., Tensor]:
    """The op alone."""

    def run(**given: Tensor) -> Tensor:
        with torch.no_grad():
            return op(given)

    return run


def train(op: Op) -> Callable[..., tuple[Tensor, ...]]:
    """The op and its gradients."""

    def run(**given: Tensor) -> tuple[Tensor, ...]:
        out = op(given)
        return out, *torch.autograd.grad(out, leaves(given), given["gradient"])

    return run


def error_of(op: Op, given: Inputs, out: Tensor | tuple[Tensor, ...]) -> float:
    """Largest error against the reference in float64."""
    found = (out,) if isinstance(out, Tensor) else out
    wide = {name: t.detach().double() if t.requires_grad else t for name, t in given.items()}
    for name, tensor in given.items():
        wide[name].requires_grad_(tensor.requires_grad)
    with torch.enable_grad():
        exact = op(wide)
        grads = torch.autograd.grad(exact, leaves(wide), given["gradient"].double())
    pairs = zip(found, (exact.detach(), *grads), strict=False)
    return max(relative_error(got, want) for got, want in pairs)


def both_passes(name: str, op: Op, make: Callable[..., Inputs], sizes: dict[str, int]) -> list[Row]:
    """A row for the forward, and one for forward and backward."""
    values = 2 * sizes["T"] * (sizes["D"] if "D" in sizes else 512 * sizes.get("H", 1))
    moved = {"rms_norm": (2, 5), "rotate": (2, 4), "clamped_swiglu": (3, 8)}[name]
    runs = {"forward": forward(op), "both": train(op)}
    return [
        Row(
            op=name,
            shape=sizes | {"pass": passes},
            make=partial(make, *sizes.values()),
            ours=run,
            error=partial(error_of, op),
            tolerance=1e-2,
            floor_bytes=values * count,
            reference=run,
        )
        for (passes, run), count in zip(runs.items(), moved, strict=True)
    ]


def rows() -> list[Row]:
    """Shapes of ``small`` in training and of the released width."""
    return [
        *both_passes("rms_norm", norm, norm_inputs, {"T": 4096, "D": 1024}),
        *both_passes("rms_norm", norm, norm_inputs, {"T": 8192, "D": 5120}),
        *both_passes("rotate", rope, rope_inputs, {"T": 4096, "H": 16}),
        *both_passes("clamped_swiglu", swiglu, swiglu_inputs, {"T": 24576, "D": 224}),
        *both_passes("clamped_swiglu", swiglu, swiglu_inputs, {"T": 49152, "D": 2304}),
    ]


if __name__ == "__main__":
    main(__file__)
