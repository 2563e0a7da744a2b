"""Ops that no other module measures: sums of pairs, parts of streams, Engram and indexer."""

from collections.abc import Callable
from dataclasses import replace
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


def projection_inputs(tokens: int, g: torch.Generator) -> Inputs:
    """Tokens of ``small``, and the weights of latent queries, window KV and index weights."""
    weights = tuple(normal(g, width, 1024) / 32 for width in (512, 512, 32))
    return {"x": normal(g, tokens, 1024), "weights": weights}


def query_inputs(tokens: int, g: torch.Generator) -> Inputs:
    """Latents of ``small`` and the weight of its 16 heads."""
    positions = torch.arange(tokens, device=g.device) * 37
    table = ops.rope_table(positions, ops.rope_frequencies(64, 1e4).to(g.device))
    return {
        "latent": normal(g, tokens, 512),
        "norm": normal(g, 512),
        "eps": 1e-20,
        "weight": normal(g, 8192, 512) / 512**0.5,
        "table": table,
        "num_heads": 16,
    }


def mixture_inputs(tokens: int, g: torch.Generator) -> Inputs:
    """Tokens of ``small`` with their experts, and all weights."""
    shapes, experts = ((224, 1024), (224, 1024), (1024, 224)), 64
    logits = torch.randn(tokens, experts, generator=g, device=g.device)
    none = torch.zeros(experts, device=g.device)
    return {
        "x": normal(g, tokens, 1024),
        "routed": ops.route.reference(logits, none, TOP, 1.0, 1.5, normalise=True),
        "experts": tuple(normal(g, experts, *shape) / shape[1] ** 0.5 for shape in shapes),
        "shared": tuple(normal(g, *shape) / shape[1] ** 0.5 for shape in shapes),
        "limit": 10.0,
    }


def place_inputs(g: torch.Generator) -> Inputs:
    """Places among the candidates of a decode step's tokens, and the blocks of these."""
    places = torch.rand(64, 16384, generator=g, device=g.device).topk(512).indices
    pools = torch.randint(16384, (64, 2048), generator=g, device=g.device)
    return {"places": places.sort().values, "pools": pools, "block_size": 8}


def page_inputs(g: torch.Generator) -> Inputs:
    """Entries of a decode step's tokens, and their pages."""
    entries = torch.rand(64, 16384, generator=g, device=g.device).topk(512).indices
    table = torch.randint(1 << 20, (64, 256), generator=g, device=g.device)
    return {"entries": entries.sort().values, "table": table, "per_page": 64}


def packing_inputs(g: torch.Generator) -> Inputs:
    """Index queries of a decode step's tokens, and the weights of their heads."""
    positions = torch.arange(64, device=g.device) * 37
    table = ops.rope_table(positions, ops.rope_frequencies(64, 1e4).to(g.device))
    rest = {"weights": normal(g, 64, 32), "factor": 128**-0.5 * 32**-0.5}
    return {"q": normal(g, 64, 32, 128), "table": table, **rest}


def packing_error(given: Inputs, out: tuple[Tensor, Tensor]) -> float:
    """Share of bytes that differ, which a rounding may; weights are equal."""
    want = ops.pack_index_queries.reference(**given)
    weights = unequal(out[1], want[1])
    return weights + unequal(out[0], want[0]) / want[0].numel()


def described(g: torch.Generator) -> Inputs:
    """Rows of 64 requests that stand anywhere."""
    places = torch.arange(64, device=g.device)
    return {
        "places": places,
        "positions": torch.randint(1, 1 << 20, (64,), generator=g, device=g.device),
    }


def ring_inputs(g: torch.Generator) -> Inputs:
    """Rings of windows."""
    return described(g) | {"reach": 128, "size": 192}


def group_inputs(g: torch.Generator) -> Inputs:
    """Groups of two positions."""
    return described(g) | {"ratio": 2, "width": 8192}


def pending_inputs(g: torch.Generator) -> Inputs:
    """Projections of a decode step's tokens, and rings with those before."""
    kv, gate = torch.randn(2, 64, 512, generator=g, device=g.device)
    own, rows = ops.ring_rows.reference(**described(g), reach=2, size=8)
    numbers = torch.arange(64, device=g.device)
    return {
        "kv": kv,
        "gate": gate,
        "ring": torch.randn(64 * 8, 1024, generator=g, device=g.device),
        "own": own,
        "previous": rows[:, 0],
        "members": torch.stack([numbers, numbers + 64], dim=1),
    }


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


def row(
    op: Op[..., Any],
    shape: dict[str, int | str],
    make: Maker,
    floor_bytes: int,
    tolerance: float = 4e-3,
) -> Row:
    """One op; the tolerance is that of one bfloat16 rounding if it is not given."""
    return Row(
        op=op.reference.__name__,
        shape=shape,
        make=make,
        ours=op,
        reference=op.reference,
        error=partial(error, op),
        tolerance=tolerance,
        floor_bytes=floor_bytes,
    )


def few_rows(tokens: int) -> list[Row]:
    """What a decode step of ``small`` does with as many tokens."""
    shape, used = {"T": tokens}, min(64, tokens * TOP) + 1
    return [
        row(ops.joint_linear, shape, partial(projection_inputs, tokens), 2 * 1056 * 1024),
        row(ops.rotated_queries, shape, partial(query_inputs, tokens), 2 * 8192 * 512, 8e-3),
        row(
            ops.expert_mixture, shape, partial(mixture_inputs, tokens), used * 6 * 224 * 1024, 8e-3
        ),
    ]


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
        *(found for tokens in (1, 8, 64) for found in few_rows(tokens)),
        row(ops.ring_rows, {"T": 64, "reach": 128}, ring_inputs, 64 * 130 * 8),
        row(ops.group_rows, {"T": 64, "ratio": 2}, group_inputs, 64 * 7 * 8),
        row(ops.pool_pending, {"T": 64, "C": 512}, pending_inputs, 64 * 512 * 28),
        row(ops.pool_entries, {"T": 64, "K": 512}, place_inputs, 64 * 512 * 24),
        row(ops.page_rows, {"T": 64, "K": 512}, page_inputs, 64 * 512 * 24),
        replace(
            row(ops.pack_index_queries, {"T": 64}, packing_inputs, 64 * 32 * (256 + 68), 1e-2),
            error=packing_error,
        ),
        row(ops.selection_divergence, {**t, "keys": 512}, divergence_inputs, TOKENS * 512 * 8),
    ]


if __name__ == "__main__":
    main(__file__)
