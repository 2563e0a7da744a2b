"""TileKernels 2.1.0 (TileLang): the mHC boundary in the V4 order and the Engram gate."""

import torch
from torch import Tensor

from benchmarks.h200.peers.case import (
    STREAMS,
    WIDTH,
    Boundary,
    Case,
    Shape,
    boundary_error,
    randn,
)
from benchmarks.h200.rows import relative_error

FOLDERS = ("tl", "dg", "pure")
WHAT = "TileKernels 2.1.0"


def mhc(shape: Shape) -> Case:
    """Update, DeepGEMM's projection, coefficients with input mix, norm; (4n+4)d of traffic."""
    import deep_gemm  # noqa: PLC0415
    import tile_kernels.quant.norm_forward_kernel as norms  # noqa: PLC0415
    from tile_kernels.mhc import mhc_post_fwd, mhc_pre_big_fuse_fwd  # noqa: PLC0415

    tokens = int(shape["T"])
    given = Boundary.random(tokens)
    new, normed, _, c, b = given.wanted(own_mix=True)
    splits = 64 if tokens < 512 else 4
    sizes = [(splits, tokens, 24), (splits, tokens), (tokens, 4), (tokens, 16)]
    products, squares, got_c, got_b = (torch.empty(*size, device="cuda") for size in sizes)
    mixed = torch.empty(tokens, WIDTH, device="cuda", dtype=torch.bfloat16)
    state = given.y[None], given.x[None], given.c[None, ..., None].contiguous(), given.b[None]
    weights = given.scale, given.base
    constants = 1e-20, 1e-6, 1e-6, 2.0, 20

    def run() -> tuple[Tensor, ...]:
        streams = mhc_post_fwd(*state)
        flat = streams.view(tokens, STREAMS * WIDTH)
        deep_gemm.tf32_hc_prenorm_gemm(flat, given.fn, products, squares, splits)
        shaped = flat.view(tokens, STREAMS, WIDTH)
        made = got_c, got_b, mixed
        mhc_pre_big_fuse_fwd(
            products, squares, *weights, shaped, *made, *constants, n_splits=splits
        )
        cast = norms.norm_forward_and_per_token_cast_impl
        return streams, cast(mixed, given.weight, 1e-20, "bf16", None)[0], got_c, got_b

    return Case(
        what=f"{WHAT} with DeepGEMM's projection, V4 order",
        run=run,
        error=lambda out: boundary_error(out, (new, normed, c, b)),
        tolerance=0.02,
    )


def _gate_inputs(tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    streams = randn(tokens, STREAMS, WIDTH).bfloat16()
    kv = randn(tokens, STREAMS + 1, WIDTH).bfloat16()
    query, key = (randn(STREAMS, WIDTH).bfloat16() for _ in range(2))
    return streams, kv, query, key, (query.float() * key.float()).contiguous()


def gated(streams: Tensor, kv: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The gate in float64: streams + gate * value."""
    x, rows = streams.double(), kv.double()
    keys, value = rows[:, :STREAMS], rows[:, STREAMS]
    dot = (x * query.double() * key.double() * keys).sum(-1) * WIDTH**-0.5
    for part in (x, keys):
        dot = dot * torch.rsqrt(part.square().mean(-1) + 1e-20)
    gate = torch.sigmoid(torch.copysign(dot.abs().clamp_min(1e-6).sqrt(), dot))
    return x + gate[..., None] * value[:, None]


def engram_gate(shape: Shape) -> Case:
    """Gate of all streams, forward."""
    from tile_kernels.engram import engram_gate_fwd  # noqa: PLC0415

    streams, kv, query, key, product = _gate_inputs(int(shape["T"]))
    want = gated(streams[:64], kv[:64], query, key)
    return Case(
        what=f"{WHAT} engram_gate_fwd",
        run=lambda: engram_gate_fwd(streams, kv, product, 1e-20, 1e-6, save_for_backward=False)[0],
        error=lambda out: relative_error(out[:64], want),
        tolerance=0.02,
    )


def engram_gate_backward(shape: Shape) -> Case:
    """Backward alone, after a forward that saved what it needs."""
    from tile_kernels.engram import engram_gate_bwd, engram_gate_fwd  # noqa: PLC0415

    streams, kv, query, key, product = _gate_inputs(int(shape["T"]))
    _, *saved = engram_gate_fwd(streams, kv, product, 1e-20, 1e-6)
    gradient = randn(*streams.shape).bfloat16()
    leaf = streams[:64].double().requires_grad_()
    gated(leaf, kv[:64], query, key).backward(gradient[:64].double())
    want = leaf.grad
    assert want is not None, "the loop above has a gradient"
    return Case(
        what=f"{WHAT} engram_gate_bwd",
        run=lambda: engram_gate_bwd(gradient, streams, kv, product, *saved, 1e-6),
        error=lambda out: relative_error(out[0][:64], want),
        tolerance=0.05,
    )


CASES = {"mhc": mhc, "engram_gate": engram_gate, "engram_gate_backward": engram_gate_backward}
