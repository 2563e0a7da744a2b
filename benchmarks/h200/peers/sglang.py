"""SGLang 0.5.23: its FP4 index logits and top-k kernels, DeepSelect as it carries it, and mHC."""

from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from benchmarks.h200.peers import sglang_stub
from benchmarks.h200.peers.case import (
    STREAMS,
    WIDTH,
    Boundary,
    Case,
    Shape,
    boundary_error,
    index_scores,
    randn,
)
from benchmarks.h200.peers.deepgemm import logits
from benchmarks.h200.rows import relative_error

FOLDERS = ("ffi11", "dg", "pure", "tl")
HEADS, DIM, PAGE, TOP = 32, 128, 64, 512
WHAT = "SGLang 0.5.23"
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


def load(folder: Path) -> None:
    """Make single kernel modules importable without the runtime."""
    sglang_stub.install(folder / "sc")


def fp4_logits(shape: Shape) -> Case:
    """Logits of T queries over L paged keys of 68 bytes each."""
    from sglang.kernels.ops.attention.dsv4.fp4_indexer import (  # noqa: PLC0415
        fp4_index_logits_paged,
    )

    tokens, length = int(shape["T"]), int(shape["L"])
    pages, codes = min(tokens * length, 1 << 23) // PAGE, PAGE * 64
    table = torch.randint(0, 256, (pages, PAGE * 68), dtype=torch.uint8, device="cuda")
    table[:, codes:] = torch.randint(123, 130, (pages, PAGE * 4), device="cuda").to(torch.uint8)
    within = torch.arange(PAGE, device="cuda")
    chosen = [torch.randperm(pages, device="cuda")[: length // PAGE] for _ in range(tokens)]
    rows = torch.stack([(c[:, None] * PAGE + within).view(-1) for c in chosen]).int()
    q, weights = randn(tokens, HEADS, DIM).bfloat16(), randn(tokens, HEADS).bfloat16()
    requests = torch.arange(tokens, device="cuda", dtype=torch.int32)
    lengths = torch.full((tokens,), length, dtype=torch.int32, device="cuda")
    t = tokens // 2
    page, place = rows[t, :1024].long() // PAGE, rows[t, :1024].long() % PAGE
    packed = table[:, :codes].reshape(pages, PAGE, 64)[page, place]
    scales = table[:, codes:].reshape(pages, PAGE, 4)[page, place]
    values = torch.tensor((*E2M1, *(-v for v in E2M1)), device="cuda", dtype=torch.float64)
    keys = torch.stack([values[(packed & 15).long()], values[(packed >> 4).long()]], -1).flatten(1)
    keys = keys * torch.exp2(scales.double() - 127).repeat_interleave(32, 1)
    want = index_scores(q[t], keys, weights[t])
    return Case(
        what=f"{WHAT} Triton fp4_index_logits_paged, 68-byte rows",
        run=lambda: fp4_index_logits_paged(
            q, weights, requests, rows, lengths, table, PAGE, length, 1
        ),
        error=lambda out: relative_error(out[t, :1024], want),
        tolerance=0.02,
    )


def _picked_error(scores: Tensor) -> Tensor:
    checked = scores[:64].float()
    return torch.topk(checked, TOP, dim=1).values.sort(1).values


def deepselect(shape: Shape) -> Case:
    """The 512 largest of L bfloat16 scores of T queries."""
    from sglang.kernels.ops.attention import deep_select  # noqa: PLC0415

    scores = randn(int(shape["T"]), int(shape["L"])).bfloat16()
    want = _picked_error(scores)

    def error(out: Tensor) -> float:
        got = scores[:64].float().gather(1, out[:64].long()).sort(1).values
        return relative_error(got, want)

    return Case(
        what="DeepSelect (SGLang 0.5.23) bfloat16 top-512",
        run=lambda: deep_select.topk(scores, TOP)[1],
        error=error,
        tolerance=1e-6,
    )


def top_k_v2(shape: Shape) -> Case:
    """The 512 largest of L float32 scores of T queries."""
    from sglang.kernels.ops.attention.dsv4.topk import (  # noqa: PLC0415
        plan_topk_v2,
        topk_transform_paged_v2,
    )

    tokens, length = int(shape["T"]), int(shape["L"])
    scores = randn(tokens, length)
    want = _picked_error(scores)
    lengths = torch.full((tokens,), length, dtype=torch.int32, device="cuda")
    out = torch.empty(tokens, TOP, dtype=torch.int32, device="cuda")
    plan = plan_topk_v2(lengths)

    def run() -> Tensor:
        topk_transform_paged_v2(scores, lengths, None, out, 1, plan)
        return out

    def error(found: Tensor) -> float:
        return relative_error(scores[:64].gather(1, found[:64].long()).sort(1).values, want)

    return Case(what=f"{WHAT} topk_v2 float32", run=run, error=error, tolerance=1e-6)


def logits_and_top_k(shape: Shape) -> Case:
    """A prefill chunk's logits by DeepGEMM, then DeepSelect of them: the fastest pair of peers."""
    from sglang.kernels.ops.attention import deep_select  # noqa: PLC0415

    first = logits(shape)

    def run() -> tuple[Tensor, Tensor]:
        scores = first.run()
        return scores, deep_select.topk(scores.bfloat16(), TOP)[1]

    return Case(
        what="DeepGEMM fp8_mqa_logits, then DeepSelect bfloat16 top-512",
        run=run,
        error=lambda out: first.error(out[0]),
        tolerance=first.tolerance,
    )


def mhc(shape: Shape) -> Case:
    """Its fused boundary for prefill (gated off on SM90), else its chain as routed."""
    from sglang.kernels.ops.layernorm import mhc as kernels  # noqa: PLC0415
    from sglang.kernels.ops.layernorm.mhc_post_combine_norm_prefill import (  # noqa: PLC0415
        mhc_post_combine_norm_prefill,
    )
    from sglang.kernels.ops.layernorm.mhc_post_split_h import mhc_post_split_h  # noqa: PLC0415

    tokens = int(shape["T"])
    given = Boundary.random(tokens)
    want, parts = given.wanted(), kernels.split_bf16_hc_weight(given.fn)

    def predicted(flat: Tensor) -> tuple[Tensor, ...]:
        rest = given.scale, given.base
        if tokens >= 32:
            return kernels.hc_mix_stats_sinkhorn_bf16x3(flat, parts, *rest, 20, 1e-20, 1e-6)
        return kernels.hc_mix_stats_sinkhorn(flat, given.fn, *rest, 4, 20, 1e-20, 1e-6)

    def run() -> tuple[Tensor, ...]:
        state = given.y, given.x, given.c, given.b
        if tokens >= 4096:
            new, normed = mhc_post_combine_norm_prefill(*state, given.a, given.weight, 1e-20)
        else:
            new = mhc_post_split_h(*state)
            flat = new.view(tokens, STREAMS * WIDTH)
            mixed = kernels.mhc_combine(flat, given.a, STREAMS, torch.bfloat16)
            normed = rms_norm(mixed, (WIDTH,), given.weight, 1e-20)
        return (new, normed, *predicted(new.view(tokens, STREAMS * WIDTH)))

    return Case(
        what=f"{WHAT} " + ("fused prefill, gated off on SM90" if tokens >= 4096 else "as routed"),
        run=run,
        error=lambda out: boundary_error(out, want),
        tolerance=0.02,
    )


def mhc_best_mix(shape: Shape) -> Case:
    """The fastest chain of several projects' kernels; nobody ships it."""
    import deep_gemm  # noqa: PLC0415
    import tile_kernels.quant.norm_forward_kernel as norms  # noqa: PLC0415
    from sglang.kernels.ops.layernorm import mhc as kernels  # noqa: PLC0415
    from sglang.kernels.ops.layernorm.mhc_post_combine_norm_prefill import (  # noqa: PLC0415
        mhc_post_combine_norm_prefill,
    )
    from sglang.kernels.ops.layernorm.mhc_post_split_h import mhc_post_split_h  # noqa: PLC0415

    tokens = int(shape["T"])
    given = Boundary.random(tokens)
    want, splits = given.wanted(), 64 if tokens < 512 else 4
    sizes = [(splits, tokens, 24), (splits, tokens), (tokens, 4), (tokens, 4), (tokens, 4, 4)]
    products, squares, a, c, b = (torch.empty(*size, device="cuda") for size in sizes)

    def run() -> tuple[Tensor, ...]:
        state = given.y, given.x, given.c, given.b
        if tokens >= 4096:
            new, normed = mhc_post_combine_norm_prefill(*state, given.a, given.weight, 1e-20)
        else:
            new = mhc_post_split_h(*state)
            flat = new.view(tokens, STREAMS * WIDTH)
            mixed = kernels.mhc_combine(flat, given.a, STREAMS, torch.bfloat16)
            cast = norms.norm_forward_and_per_token_cast_impl
            normed = cast(mixed, given.weight, 1e-20, "bf16", None)[0]
        flat = new.view(tokens, STREAMS * WIDTH)
        deep_gemm.tf32_hc_prenorm_gemm(flat, given.fn, products, squares, splits)
        reduce = kernels._hc_mix_reduce_sinkhorn_kernel[(tokens,)]
        inputs = products, squares, given.scale, given.base, a, c, b
        sizes = {"MIX": 24, "HC": 4, "NUM_SLICES": splits, "ITERS": 20, "EPS": 1e-6}
        reduce(*inputs, tokens, 1.0 / (STREAMS * WIDTH), 1e-20, **sizes, num_warps=1)
        return new, normed, a, c, b

    return Case(
        what="best mix: SGLang, TileKernels and DeepGEMM (tf32 projection)",
        run=run,
        error=lambda out: boundary_error(out, want),
        tolerance=0.02,
    )


CASES = {
    "fp4_logits": fp4_logits,
    "deepselect": deepselect,
    "top_k_v2": top_k_v2,
    "logits_and_top_k": logits_and_top_k,
    "mhc": mhc,
    "mhc_best_mix": mhc_best_mix,
}
