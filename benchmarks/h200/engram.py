"""Engram: hash, gather and dequantise in one kernel; the gated update, forward and backward."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.h200.harness import main
from benchmarks.h200.rows import Goal, Inputs, Row, relative_error, unequal
from openv41.ops import engram, engram_update, lookup_ngrams, quantize

EPS = 1e-20
ROWS = 1 << 22  # of the table: 1.1 GB, far beyond L2
HEADS, REACH, WIDTH = 8, 4, 256
STREAMS, DIM = 4, 5120
TRIED: dict[str, str] = {
    "engram_update T=8192 d=5120 n=4": (
        "8 tokens a program, to read the weights once for them, leave one program an SM: 649 us; 2 "
        "tokens 402, 1 token and 16 warps 450, 1 token and 8 warps 359, 1 token and 4 warps 345, "
        "the default of 4,096 tokens and more since. CUDA C++ (engram.cu), whose blocks stay, hold "
        "the weights and read rows ahead by bulk copies, is right on a CPU, thread by thread, and "
        "has not run on a GPU: it is a variant."
    ),
}


def lookup_inputs(tokens: int, generator: torch.Generator) -> Inputs:
    """Random ids, and tables of random codes."""
    device = generator.device
    codes = torch.randint(
        0, 256, (ROWS, WIDTH), generator=generator, device=device, dtype=torch.uint8
    )
    codes = torch.where((codes & 127) == 127, 0, codes)  # NaN
    scales = torch.randint(
        118, 125, (ROWS, WIDTH // 32), generator=generator, device=device, dtype=torch.uint8
    )
    primes = torch.arange(24, device=device).view(3, HEADS) * 2 + ROWS // 24 - 49
    return {
        "recent": torch.randint(0, 99092, (tokens, REACH), generator=generator, device=device),
        "multipliers": torch.tensor(
            [76632096046245, 4839876093313, 35959672319349, 73987337458391], device=device
        ),
        "primes": primes,
        "offsets": (primes.flatten().cumsum(0) - primes.flatten()).view(3, HEADS),
        "pad_id": 2,
        "codes": codes.view(torch.float8_e4m3fn),
        "scales": scales.view(torch.float8_e8m0fnu),
        "dtype": torch.bfloat16,
    }


def lookup_error(given: Inputs, out: Tensor) -> float:
    """Number of values that differ."""
    names = "recent", "multipliers", "primes", "offsets", "pad_id"
    rows = engram.hash_ngrams.reference(*(given[n] for n in names)).flatten()
    codes = given["codes"].view(torch.uint8)[rows].view(torch.float8_e4m3fn)
    scales = given["scales"].view(torch.uint8)[rows].view(torch.float8_e8m0fnu)
    return unequal(out, quantize.dequantize_fp8_rows(codes, scales, out.dtype).view_as(out))


def with_warps(warps: int) -> Callable[..., Tensor]:
    """The lookup with another number of warps."""

    def run(**given: object) -> Tensor:
        from openv41.ops import engram_triton as file  # noqa: PLC0415

        return file.lookup_ngrams.run(**given, warps=warps)

    return run


def lookup_row(tokens: int, goal: float | None) -> Row:
    """Values of the rows of every token's n-grams."""
    return Row(
        op="lookup_ngrams",
        shape={"T": tokens, "lookups": 24, "width": WIDTH},
        make=partial(lookup_inputs, tokens),
        ours=lookup_ngrams,
        error=lookup_error,
        tolerance=0,
        floor_bytes=tokens * 24 * (WIDTH + WIDTH // 32 + 2 * WIDTH),
        reference=lookup_ngrams,
        variants={f"{w} warps": with_warps(w) for w in (2, 8)},
        goals=() if goal is None else (Goal("us", goal),),
    )


def update_inputs(tokens: int, generator: torch.Generator) -> Inputs:
    """Streams; keys and values cut from one product; weights and a gradient."""
    device = generator.device

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).bfloat16()

    keys, value = normal(tokens, (STREAMS + 1) * DIM).split([STREAMS * DIM, DIM], dim=1)
    return {
        "x": normal(tokens, STREAMS, DIM).requires_grad_(),
        "key": keys.unflatten(1, (STREAMS, DIM)).requires_grad_(),
        "value": value.requires_grad_(),
        "q_weight": normal(STREAMS, DIM).requires_grad_(),
        "k_weight": normal(STREAMS, DIM).requires_grad_(),
        "gradient": normal(tokens, STREAMS, DIM),
    }


def tensors(given: Inputs) -> tuple[Tensor, ...]:
    """What the update takes."""
    return tuple(given[n] for n in ("x", "key", "value", "q_weight", "k_weight"))


def update(**given: object) -> Tensor:
    """Forward alone."""
    with torch.no_grad():
        return engram_update(*tensors(given), EPS)


def train(**given: object) -> object:
    """Forward and all gradients."""
    out = engram_update(*tensors(given), EPS)
    return out, *torch.autograd.grad(out, tensors(given), given["gradient"])


def update_error(given: Inputs, out: Tensor | tuple[Tensor, ...]) -> float:
    """Largest error against float32 through the reference, some tokens at a time."""
    found = (out,) if isinstance(out, Tensor) else out
    leaves = [t.detach().float().requires_grad_() for t in tensors(given)]
    errors = []
    for part in torch.arange(len(found[0]), device=found[0].device).split(1024):
        with torch.enable_grad():
            own = [t[part] if len(t) == len(found[0]) else t for t in leaves]
            exact = engram.engram_update.reference(*own, EPS)
            errors.append(relative_error(found[0][part], exact.detach()))
            if len(found) > 1:
                exact.backward(given["gradient"][part].float())
    grads = zip(found[1:], leaves, strict=False)
    return max(*errors, 0.0, *(relative_error(a, b.grad) for a, b in grads))


def grouped(tokens_at_once: int, warps: int) -> Callable[..., Tensor]:
    """The forward with other sizes."""

    def run(**given: object) -> Tensor:
        from openv41.ops import engram_triton as file  # noqa: PLC0415

        sizes = {"tokens_at_once": tokens_at_once, "warps": warps}
        with torch.no_grad():
            return file.forward((*tensors(given), None), EPS, **sizes)[0]

    return run


def native(**given: object) -> Tensor:
    """The forward in CUDA C++."""
    from openv41.ops import engram_cuda as file  # noqa: PLC0415

    with torch.no_grad():
        return file.forward((*tensors(given), None), EPS)


def train_native(**given: object) -> tuple[Tensor, ...]:
    """Forward and all gradients in CUDA C++."""
    from openv41.ops import engram_cuda as file  # noqa: PLC0415

    parts = *(t.detach() for t in tensors(given)), None
    *found, partial = file.backward(parts, given["gradient"], EPS)
    both, dtype = partial.sum(dim=0), parts[3].dtype
    for_weights = (both * parts[4]).to(dtype), (both * parts[3]).to(dtype)
    return file.forward(parts, EPS), *found, *for_weights


def update_row(tokens: int, goal: float | None) -> Row:
    """The gated update of all streams."""
    sizes = [(1, 8), (2, 4)] if tokens == 8192 else [(1, 4)] if tokens == 256 else []
    variants = {f"{t} tokens, {w} warps": grouped(t, w) for t, w in sizes}
    variants["CUDA C++"] = native
    return Row(
        op="engram_update",
        shape={"T": tokens, "d": DIM, "n": STREAMS},
        make=partial(update_inputs, tokens),
        ours=update,
        error=update_error,
        tolerance=4e-3,
        floor_bytes=tokens * (3 * STREAMS + 1) * DIM * 2,
        reference=update,
        variants=variants,
        peers=("tilekernels:engram_gate",),
        goals=() if goal is None else (Goal("us", goal),),
    )


def training_row(tokens: int) -> Row:
    """The gated update and all its gradients."""
    return Row(
        op="engram_update",
        shape={"T": tokens, "d": DIM, "n": STREAMS, "pass": "forward and backward"},
        make=partial(update_inputs, tokens),
        ours=train,
        error=update_error,
        tolerance=1e-2,
        floor_bytes=tokens * (3 * STREAMS + 1 + 5 * STREAMS + 2) * DIM * 2,
        reference=train,
        variants={"CUDA C++": train_native},
        peers=("tilekernels:engram_gate_backward",),
    )


def rows() -> list[Row]:
    """All rows."""
    return [
        lookup_row(8192, 70.0),
        lookup_row(8, None),
        update_row(8192, 300.0),
        update_row(256, None),
        update_row(8, None),
        training_row(8192),
    ]


if __name__ == "__main__":
    main(__file__)
