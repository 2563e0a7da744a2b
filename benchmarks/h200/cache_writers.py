"""Norm, rotation, rounding and storing of latents, in the three formats of the cache."""

from collections.abc import Callable

import torch

from benchmarks.h200.harness import main
from benchmarks.h200.rows import Goal, Inputs, Row, relative_error
from openv41.ops import rope, write_latents

KINDS = {  # as released: format, channels, bytes of a stored row
    "window": ("fp8", 512, 528),
    "main": ("fp4_e4m3", 512, 288),
    "index": ("mxfp4", 128, 68),
}
PAIRS = 32  # rotated, of channels
_SIZES = (
    "rounding to FP8 and bfloat16 in hardware and quotients by a corrected reciprocal made of "
    "19.4, 18.5 and 11.2 us 14.3, 15.3 and 9.4; one warp for 512 elements took 11.8, 13.9 and 8.0 "
    "in that run, and is the default since. What is left is arithmetic on each element"
)
TRIED: dict[str, str] = {f"write_latents kind={kind} T=8192": _SIZES for kind in KINDS}


def inputs(kind: str, tokens: int, generator: torch.Generator) -> Inputs:
    """Latents and a cache of twice as many rows, of which some are written."""
    form, width, columns = KINDS[kind]
    device = generator.device
    positions = torch.arange(tokens, device=device)
    frequencies = rope.rope_frequencies(2 * PAIRS, 160_000.0).to(device)
    latents = torch.randn(tokens, width, generator=generator, device=device) * 3
    weight = 1 + 0.1 * torch.randn(width, generator=generator, device=device)
    places = torch.randperm(2 * tokens, generator=generator, device=device)[:tokens]
    return {
        "stored": torch.zeros(2 * tokens, columns, dtype=torch.uint8, device=device),
        "places": places,
        "latents": latents.bfloat16(),
        "weight": weight.bfloat16(),
        "eps": 1e-20,
        "table": rope.rope_table(positions, frequencies),
        "form": form,
    }


def written(**given: object) -> tuple[torch.Tensor, torch.Tensor]:
    """The values, and the cache that the rows went into."""
    values = write_latents(**given)
    return values, given["stored"]


def sized(elements: int, warps: int) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The kernel with other sizes of a program."""

    def run(**given: object) -> tuple[torch.Tensor, torch.Tensor]:
        from openv41.ops import cache_writers_triton as file  # noqa: PLC0415

        return file.launch(**given, elements=elements, warps=warps), given["stored"]

    return run


def error(given: Inputs, outputs: tuple[torch.Tensor, torch.Tensor]) -> float:
    """Share of bytes that differ from the reference, or the error of the values if it is larger."""
    values, stored = outputs
    want = {**given, "stored": torch.zeros_like(stored)}
    want_values = write_latents.reference(**want)
    kept = given["places"]
    differ = (stored[kept] != want["stored"][kept]).float().mean().item()
    return max(differ, relative_error(values, want_values))


def row(kind: str, tokens: int) -> Row:
    """One format at one number of tokens."""
    _, width, columns = KINDS[kind]
    per_row = 2 * width + 2 * width + columns + 8 * PAIRS + 8  # in, values, bytes, angles, place
    goal = Goal("net_over_floor", 1.5) if tokens >= 8192 else Goal("over_empty_us", 3.0)
    sizes = [(256, 1), (512, 2), (1024, 1), (1024, 2), (2048, 2)] if tokens > 64 else []
    return Row(
        op="write_latents",
        shape={"kind": kind, "T": tokens},
        make=lambda generator: inputs(kind, tokens, generator),
        ours=written,
        reference=written,
        error=error,
        variants={f"{e} elements, {w} warps": sized(e, w) for e, w in sizes},
        tolerance=0.01,  # FP4 steps are large where a sum rounds the other way
        floor_bytes=tokens * per_row + 2 * width,
        goals=(goal,),
    )


def rows() -> list[Row]:
    """Every format at every size."""
    return [row(kind, tokens) for kind in KINDS for tokens in (1, 64, 8192)]


if __name__ == "__main__":
    main(__file__)
