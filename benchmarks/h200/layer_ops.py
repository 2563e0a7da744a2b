"""Ops that no other module measures: sums of pairs, parts of streams, Engram and indexer."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.h200.harness import main
from benchmarks.h200.rows import Inputs, Row, relative_error, tensors_of, unequal
from openv41 import ops
from openv41.ops._dispatch import Op

TOKENS, DIM, STREAMS = 8192, 5120, 4
EXPERTS, TOP = 384, 6
TRIED: dict[str, str] = {}
Maker = Callable[..., Inputs]


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    """Random numbers in bfloat16."""
    return torch.randn(shape, generator=generator, device=generator.device).bfloat16()


def order_of(g: torch.Generator) -> Tensor:
    """Pairs sorted by a random expert."""
    experts = torch.randint(EXPERTS, (TOKENS * TOP,), generator=g, device=g.device)
    return experts.sort(stable=True).indices


def combine_inputs(g: torch.Generator) -> Inputs:
    """Outputs of the pairs."""
    return {"outputs": normal(g, TOKENS * TOP, DIM), "order": order_of(g), "top_k": TOP}


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


def route_inputs(g: torch.Generator) -> Inputs:
    """Logits of a decode step's tokens."""
    logits = torch.randn(64, EXPERTS, generator=g, device=g.device)
    bias = torch.randn(EXPERTS, generator=g, device=g.device)
    rest = {"top_k": TOP, "temperature": 1.0, "scale": 2.5, "normalise": True}
    return {"logits": logits, "bias": bias, **rest}


def pair_inputs(g: torch.Generator) -> Inputs:
    """Experts of a decode step's tokens."""
    scores = torch.rand(64, EXPERTS, generator=g, device=g.device)
    return {"expert_ids": scores.topk(TOP).indices.sort().values, "num_experts": EXPERTS}


def divergence_inputs(g: torch.Generator) -> Inputs:
    """Scores of the selected entries, and what a layer attends to."""
    scores = torch.randn(TOKENS, 512, generator=g, device=g.device)
    return {"scores": scores, "mass": torch.rand(TOKENS, 512, generator=g, device=g.device)}


def widened(value: object) -> object:
    """Floats in float64, all else as it is."""
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def error(op: Op[..., Any], given: Inputs, out: object) -> float:
    """Error against the reference in float64; integers are equal or not."""
    want = op.reference(**{name: widened(value) for name, value in given.items()})
    worst = 0.0
    for got, expected in zip(tensors_of(out), tensors_of(want), strict=True):
        compare = relative_error if got.is_floating_point() else unequal
        worst = max(worst, compare(got, expected))
    return worst


def row(op: Op[..., Any], shape: dict[str, int | str], make: Maker, floor_bytes: int) -> Row:
    """One op; the tolerance is that of one bfloat16 rounding."""
    return Row(
        op=op.reference.__name__,
        shape=shape,
        make=make,
        ours=op,
        reference=op.reference,
        error=partial(error, op),
        tolerance=4e-3,
        floor_bytes=floor_bytes,
    )


def rows() -> list[Row]:
    """Every op that no other module measures."""
    t, pairs, streams = {"T": TOKENS}, TOKENS * TOP, TOKENS * STREAMS * DIM * 2
    dims = {**t, "d": DIM}
    return [
        row(ops.combine, dims, combine_inputs, DIM * (2 * pairs + 4 * TOKENS)),
        row(ops.mix_streams, dims, stream_inputs, streams + 2 * TOKENS * DIM),
        row(ops.engram_gate, dims, gate_inputs, 2 * streams),
        row(ops.add_gated, dims, gated_inputs, 2 * streams + 2 * TOKENS * DIM),
        row(ops.hash_ngrams, t, hash_inputs, TOKENS * (4 + 24) * 8),
        row(ops.choose_candidates, {"T": 64, "L": 131_072}, candidate_inputs, 64 * 131_072 * 4),
        row(ops.route, {"T": 64, "E": EXPERTS}, route_inputs, 64 * EXPERTS * 4),
        row(ops.order_pairs, {"T": 64, "E": EXPERTS}, pair_inputs, 64 * TOP * 16),
        row(ops.selection_divergence, {**t, "keys": 512}, divergence_inputs, TOKENS * 512 * 8),
    ]


if __name__ == "__main__":
    main(__file__)
