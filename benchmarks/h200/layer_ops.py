"""The small ops between the large kernels: norm, rotation, SwiGLU, pairs of experts, and parts."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.h200.harness import main
from benchmarks.h200.rows import Inputs, Row, relative_error, tensors_of, unequal
from openv41 import ops
from openv41.ops._dispatch import Op

TOKENS, DIM, STREAMS, HEADS, WIDTH, PAIRS = 8192, 5120, 4, 64, 512, 32
EXPERTS, TOP, FF = 384, 6, 2304
TRIED: dict[str, str] = {}
Maker = Callable[..., Inputs]


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    """Random numbers in bfloat16."""
    return torch.randn(shape, generator=generator, device=generator.device).bfloat16()


def norm_inputs(g: torch.Generator) -> Inputs:
    """Rows of the model's width."""
    return {"x": normal(g, TOKENS, DIM), "weight": normal(g, DIM), "eps": 1e-20}


def rotate_inputs(g: torch.Generator) -> Inputs:
    """Queries of all heads."""
    frequencies = ops.rope_frequencies(2 * PAIRS, 1e4).to(g.device)
    table = ops.rope_table(torch.arange(TOKENS, device=g.device), frequencies)
    return {"x": normal(g, TOKENS, HEADS, WIDTH), "table": table}


def swiglu_inputs(g: torch.Generator) -> Inputs:
    """Pairs of tokens and experts, with their weights."""
    pairs = TOKENS * TOP
    weight = torch.rand(pairs, generator=g, device=g.device)
    gate, up = normal(g, pairs, FF), normal(g, pairs, FF)
    return {"gate": gate, "up": up, "limit": 10.0, "weight": weight}


def order_of(g: torch.Generator) -> Tensor:
    """Pairs sorted by a random expert."""
    experts = torch.randint(EXPERTS, (TOKENS * TOP,), generator=g, device=g.device)
    return experts.sort(stable=True).indices


def take_inputs(g: torch.Generator) -> Inputs:
    """Rows that are read once per pair."""
    return {"x": normal(g, TOKENS, DIM), "order": order_of(g), "top_k": TOP}


def combine_inputs(g: torch.Generator) -> Inputs:
    """Outputs of the pairs."""
    return {"outputs": normal(g, TOKENS * TOP, DIM), "order": order_of(g), "top_k": TOP}


def grouped_inputs(g: torch.Generator) -> Inputs:
    """Pairs evenly over a sixth of the experts, so that the weights fit beside the references."""
    experts = EXPERTS // 6
    counts = torch.full((experts,), TOKENS * TOP // experts, device=g.device)
    weight = normal(g, experts, FF, DIM) * DIM**-0.5
    return {"rows": normal(g, TOKENS * TOP, DIM), "weight": weight, "counts": counts}


def stream_inputs(g: torch.Generator) -> Inputs:
    """Streams and the mix of one block's input."""
    a = torch.rand(TOKENS, STREAMS, generator=g, device=g.device)
    return {"x": normal(g, TOKENS, STREAMS, DIM), "a": a}


def gate_inputs(g: torch.Generator) -> Inputs:
    """Streams, keys and weights of the Engram gate."""
    x, key = normal(g, TOKENS, STREAMS, DIM), normal(g, TOKENS, STREAMS, DIM)
    weights = normal(g, STREAMS, DIM), normal(g, STREAMS, DIM)
    return {"x": x, "key": key, "q_weight": weights[0], "k_weight": weights[1], "eps": 1e-20}


def gated_inputs(g: torch.Generator) -> Inputs:
    """Streams, gates and values."""
    gate = torch.rand(TOKENS, STREAMS, generator=g, device=g.device)
    return {"x": normal(g, TOKENS, STREAMS, DIM), "gate": gate, "value": normal(g, TOKENS, DIM)}


def hash_inputs(g: torch.Generator) -> Inputs:
    """Recent ids, and constants of three orders with eight heads each."""
    ids = torch.randint(0, 100_000, (TOKENS, 4), generator=g, device=g.device)
    primes = torch.randint(900_000, 1_000_000, (3, 8), generator=g, device=g.device)
    offsets = torch.arange(24, device=g.device).view(3, 8) * 1_000_000
    multipliers = torch.randint(1, 1 << 40, (4,), generator=g, device=g.device) * 2 + 1
    return {
        "recent": ids,
        "multipliers": multipliers,
        "primes": primes,
        "offsets": offsets,
        "pad_id": 0,
    }


def candidate_inputs(g: torch.Generator) -> Inputs:
    """Scores of a few queries over a long context."""
    length = 131_072
    scores = torch.randn(64, length, generator=g, device=g.device)
    visible = torch.full((64,), length, device=g.device)
    return {"scores": scores, "visible": visible, "num_blocks": 2048, "block_size": 8}


def divergence_inputs(g: torch.Generator) -> Inputs:
    """Scores of the selected entries, and what a layer attends to."""
    scores = torch.randn(TOKENS, 512, generator=g, device=g.device)
    return {"scores": scores, "mass": torch.rand(TOKENS, 512, generator=g, device=g.device)}


def widened(value: object) -> object:
    """Floats in float64, all else as it is."""
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def error(op: Op[..., Any], wide: bool, given: Inputs, out: object) -> float:
    """Error against the reference, in float64 where there is room; integers are equal or not."""
    want = op.reference(**({k: widened(v) for k, v in given.items()} if wide else given))
    worst = 0.0
    for got, expected in zip(tensors_of(out), tensors_of(want), strict=True):
        compare = relative_error if got.is_floating_point() else unequal
        worst = max(worst, compare(got, expected))
    return worst


def row(
    op: Op[..., Any],
    shape: dict[str, int | str],
    make: Maker,
    floor_bytes: int,
    *,
    flops: int = 0,
    wide: bool = True,
    tolerance: float = 4e-3,
) -> Row:
    """One op; the tolerance is that of one bfloat16 rounding."""
    return Row(
        op=op.reference.__name__,
        shape=shape,
        make=make,
        ours=op,
        reference=op.reference,
        error=partial(error, op, wide),
        tolerance=tolerance,
        floor_bytes=floor_bytes,
        floor_flops=flops,
    )


def rows() -> list[Row]:
    """Every op that no other module measures."""
    t, pairs, streams = {"T": TOKENS}, TOKENS * TOP, TOKENS * STREAMS * DIM * 2
    heads = TOKENS * HEADS * WIDTH * 2
    weights = EXPERTS // 6 * FF * DIM * 2
    grouped = pairs * (DIM + FF) * 2 + weights
    product = 2 * pairs * DIM * FF
    dims = {**t, "d": DIM}
    return [
        row(ops.rms_norm, dims, norm_inputs, 4 * TOKENS * DIM),
        row(ops.rotate, {**t, "heads": HEADS}, rotate_inputs, 2 * heads, wide=False),
        row(ops.clamped_swiglu, {"pairs": pairs, "f": FF}, swiglu_inputs, 6 * pairs * FF),
        row(ops.take_pairs, dims, take_inputs, 2 * DIM * (TOKENS + pairs)),
        row(ops.combine, dims, combine_inputs, DIM * (2 * pairs + 4 * TOKENS)),
        row(
            ops.grouped_linear,
            {"pairs": pairs, "experts": EXPERTS // 6},
            grouped_inputs,
            grouped,
            flops=product,
            wide=False,
        ),
        row(ops.mix_streams, dims, stream_inputs, streams + 2 * TOKENS * DIM),
        row(ops.engram_gate, dims, gate_inputs, 2 * streams),
        row(ops.add_gated, dims, gated_inputs, 2 * streams + 2 * TOKENS * DIM),
        row(ops.hash_ngrams, t, hash_inputs, TOKENS * (4 + 24) * 8),
        row(ops.choose_candidates, {"T": 64, "L": 131_072}, candidate_inputs, 64 * 131_072 * 4),
        row(ops.selection_divergence, {**t, "keys": 512}, divergence_inputs, TOKENS * 512 * 8),
    ]


if __name__ == "__main__":
    main(__file__)
