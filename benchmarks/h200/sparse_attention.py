"""Sparse attention: packed decode and prefill, training forward and backward, teaching masses."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.h200.harness import main
from benchmarks.h200.rows import Goal, Inputs, Row, relative_error
from openv41.ops import attention_mass, packed_sparse_attention, plan_keys, quantize
from openv41.ops import sparse_attention as attention
from openv41.ops._dispatch import kernels

WIDTH, NEAR, FAR = 512, 128, 512  # channels, window rows and selected rows of a query
SCALE = WIDTH**-0.5
CHECKED = 8  # queries of a large call that are compared
DECODE = {1: (16.8, 1.0), 8: (18.5, 1.0), 64: (34.3, 1.3), 128: (46.0, 1.0), 256: (58.2, 1.5)}
PREFILL = {16384: 1440.0, 131072: 1750.0}  # rows of main KV: us
TRIED = {
    "packed_sparse_attention T=8192 heads=64 keys=128+512 rows=16384": (
        "Triton gives both warpgroups the same scores to compute (5,194 us); with layouts chosen "
        "in Gluon, and blocks dequantised behind the products, 2,833 us. In CUDA C++ one "
        "warpgroup dequantises, one makes scores and two add up a half of the channels each: "
        "4,000 to 4,400 cycles per block of 64 rows, of which the products of scores and sums, "
        "which slow each other down in shared memory, take 3,000 and the softmax between them "
        "1,000; the change of queries takes 6,000. A half of the sums that waits for the next "
        "scores gains 2 %, both halves lose 4 %. Rows read into registers a step ahead took "
        "1,805 us, bulk copies of a row 1,736 and a race, copies of 16 bytes 1,597 before the last "
        "changes; what dequantises nothing still takes 1,447. Next: half of the next scores "
        "asked for before a block is weighed, which fits into 96 registers; all of them, or sums "
        "of 256 channels at once, do not fit into those that 512 threads have"
    ),
    "packed_sparse_attention T=256 heads=64 keys=128+512 rows=2097152": (
        "as for 8192 queries: Triton 185.9 us, layouts chosen in Gluon 109.2 us, CUDA C++ 64.1 us"
    ),
    "packed_sparse_attention T=64 heads=64 keys=128+512 rows=1048576": (
        "in CUDA C++, two parts of each query and a second kernel that joins them 32.9 us, one "
        "part 34.9 us; the rows of 8 queries in ten parts take 21.7 us where Triton's take 18.7, "
        "so that fewer than 32 queries stay there"
    ),
}


def packed_rows(count: int, kind: str, generator: torch.Generator) -> Tensor:
    """Stored rows with random codes, and scales around one."""
    shape = {"window": (512, 16), "main": (256, 32)}[kind]
    device = generator.device
    codes = torch.randint(
        0, 256, (count, shape[0]), generator=generator, device=device, dtype=torch.uint8
    )
    if kind == "window":
        codes = torch.where((codes & 127) == 127, 0, codes)  # NaN
        low, high = 118, 121
    else:
        low, high = 40, 60  # 1/4 to 1.5 in E4M3
    scales = torch.randint(
        low, high, (count, shape[1]), generator=generator, device=device, dtype=torch.uint8
    )
    return torch.cat([codes, scales], 1)


def lists(tokens: int, rows: int, count: int, generator: torch.Generator) -> Tensor:
    """Ascending random rows of each query."""
    device = generator.device
    return torch.randint(rows, (tokens, count), generator=generator, device=device).sort(1).values


def packed_inputs(tokens: int, heads: int, rows: int, generator: torch.Generator) -> Inputs:
    """Queries, both packed stores and what each query lists of them."""
    device = generator.device
    near = tokens * NEAR if tokens <= 256 else tokens + NEAR
    first = torch.arange(tokens, device=device)[:, None] * (NEAR if tokens <= 256 else 1)
    return {
        "q": torch.randn(tokens, heads, WIDTH, generator=generator, device=device).bfloat16(),
        "window": packed_rows(near, "window", generator),
        "window_rows": first + torch.arange(NEAR, device=device),
        "main": packed_rows(rows, "main", generator),
        "main_rows": lists(tokens, rows, FAR, generator),
        "sink": torch.randn(heads, generator=generator, device=device),
        "scale": SCALE,
    }


def packed_error(given: Inputs, out: Tensor) -> float:
    """Error of some queries against the dequantised rows in float64; infinite where not finite."""
    if not out.isfinite().all():
        return float("inf")
    count = len(out)
    picked = torch.arange(0, count, max(1, count // CHECKED), device=out.device)[:CHECKED]
    stores = []
    for kind, cut in (("window", 512), ("main", 256)):
        rows = given[kind][given[f"{kind}_rows"][picked].flatten()]
        codes, scales = rows[:, :cut].contiguous(), rows[:, cut:].contiguous()
        if kind == "window":
            parts = codes.view(torch.float8_e4m3fn), scales.view(torch.float8_e8m0fnu)
            stores.append(quantize.dequantize_fp8(*parts, torch.float64))
        else:
            scales = scales.view(torch.float8_e4m3fn)
            stores.append(quantize.dequantize_fp4_e4m3(codes, scales, torch.float64))
    places = [torch.arange(len(s), device=out.device).view(len(picked), -1) for s in stores]
    near, far = (plan_keys(p) for p in places)
    q = given["q"][picked].double()
    want = attention.reference(q, stores[0], near, stores[1], far, given["sink"], SCALE)
    return relative_error(out[picked], want)


def tiled(*sizes: int) -> Callable[..., Tensor]:
    """The packed kernel in other sizes."""

    def run(**given: object) -> Tensor:
        from openv41.ops import packed_sparse_attention_triton as file  # noqa: PLC0415

        return file.attend(**given, tiling=file.Tiling(*sizes))

    return run


def packed_row(tokens: int, heads: int, rows: int, goals: tuple[Goal, ...], peer: str) -> Row:
    """Attention from packed rows."""
    variants = {}
    if tokens in {256, 8192}:
        variants["Triton, 64 rows"] = tiled(64, 64, 8, 3, 1)
        variants["Gluon"] = tiled(64, 64, 8, 3, 1, 1)
    if tokens <= 64 and heads == 64:
        other = 5 if tokens < 64 else 1
        variants[f"Gluon, {other} parts"] = tiled(64, 64, 8, 3, other, 1)
    shape = {"T": tokens, "heads": heads, "keys": f"{NEAR}+{FAR}", "rows": rows}
    return Row(
        op="packed_sparse_attention",
        shape=shape,
        make=partial(packed_inputs, tokens, heads, rows),
        ours=packed_sparse_attention,
        error=packed_error,
        tolerance=4e-3,
        floor_bytes=tokens * (FAR * 288 + NEAR * 528 + 2 * heads * WIDTH * 2),
        floor_flops=tokens * heads * (NEAR + FAR) * WIDTH * 4,
        variants=variants,
        peers=(peer,) if heads == 64 else (),
        goals=goals,
    )


def training_inputs(tokens: int, heads: int, generator: torch.Generator) -> Inputs:
    """Queries, rows of both stores, lists as in training without a cache, and a gradient."""
    device = generator.device

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).bfloat16()

    at = torch.arange(tokens, device=device)[:, None]
    near = at + torch.arange(1 - NEAR, 1, device=device)
    far = torch.rand(tokens, FAR, generator=generator, device=device) * (at + 1)
    return {
        "q": normal(tokens, heads, WIDTH).requires_grad_(),
        "window_kv": normal(tokens, WIDTH).requires_grad_(),
        "window_rows": near.masked_fill(near < 0, -1),
        "main_kv": normal(tokens, WIDTH).requires_grad_(),
        "main_rows": far.long().clamp(max=tokens - 1).sort(1).values,
        "sink": torch.randn(heads, generator=generator, device=device).requires_grad_(),
        "gradient": normal(tokens, heads, WIDTH),
    }


def arguments(given: Inputs) -> tuple[object, ...]:
    """Arguments of ``sparse_attention``; the keys are planned anew."""
    near, far = plan_keys(given["window_rows"]), plan_keys(given["main_rows"])
    return given["q"], given["window_kv"], near, given["main_kv"], far, given["sink"], SCALE


def forward(**given: object) -> Tensor:
    """Without anything kept for a backward."""
    with torch.no_grad():
        return attention(*arguments(given))


def train(**given: object) -> tuple[Tensor, ...]:
    """Output and gradients."""
    out = attention(*arguments(given))
    leaves = [given[name] for name in ("q", "window_kv", "main_kv", "sink")]
    return out.detach(), *torch.autograd.grad(out, leaves, given["gradient"])


def masses(**given: object) -> Tensor:
    """Probabilities of the listed rows."""
    q, window_kv, near, main_kv, _, sink, scale = arguments(given)
    return attention_mass(q, window_kv, near, main_kv, given["main_rows"], sink, scale)


def against_reference(
    function: Callable[..., object], given: Inputs, outputs: Tensor | tuple[Tensor, ...]
) -> float:
    """Largest error against the reference, which sums in float32."""
    with torch.enable_grad(), kernels("reference"):
        want = function(**given)
    pairs = zip(outputs, want, strict=True) if isinstance(outputs, tuple) else [(outputs, want)]
    return max(relative_error(got, known) for got, known in pairs)


def sized(which: str, *sizes: int) -> Callable[..., object]:
    """Forward or backward of the kernel in other sizes."""

    def run(**given: object) -> tuple[Tensor, ...]:
        from openv41.ops import sparse_attention_triton as file  # noqa: PLC0415

        q, window_kv, near, main_kv, far, sink, scale = (
            x.detach() if isinstance(x, Tensor) else x for x in arguments(given)
        )
        stores, keys, tiling = (window_kv, main_kv), (near, far), file.Tiling(*sizes)
        first = tiling if which == "forward" else None
        out, lse = file.forward(q, stores, keys, sink, scale, first)
        if which == "forward":
            return out
        saved = q, *stores, sink, out, lse
        return out, *file.backward(saved, keys, scale, given["gradient"], tiling)

    return run


def training_rows(tokens: int, heads: int) -> Iterator[Row]:
    """Forward, forward and backward, and masses, from rows in bfloat16."""
    keys = NEAR + FAR
    shape = {"T": tokens, "heads": heads, "keys": f"{NEAR}+{FAR}"}
    product = tokens * heads * keys * WIDTH * 2
    rows = 2 * tokens * WIDTH * 2 + tokens * keys * 8
    queries = tokens * heads * WIDTH * 2
    sizes = {"forward": [(64, 8, 2)], "train": [(64, 8, 1)]} if heads == 64 else {}
    for name, function, products, moved, goals in (
        ("forward", forward, 2, 2 * queries + rows, ()),
        ("train", train, 7, 6 * queries + 3 * rows, (Goal("peer_ratio", 3.0),)),
        ("mass", masses, 1, queries + rows + tokens * FAR * 4, ()),
    ):
        variants = {
            f"Triton, {k} rows": sized(name, heads, WIDTH, k, w, s)
            for k, w, s in sizes.get(name, [])
        }
        yield Row(
            op="attention_mass" if name == "mass" else "sparse_attention",
            shape={"what": name, **shape},
            make=partial(training_inputs, tokens, heads),
            ours=function,
            reference=function,
            error=partial(against_reference, function),
            tolerance=1e-2,
            floor_bytes=moved,
            floor_flops=products * product,
            variants=variants,
            peers=("compiled:sparse_attention",) if goals else (),
            goals=goals,
        )


def rows() -> list[Row]:
    """Decode at every number of queries, prefill, and training as released and as ``small``."""
    found = []
    for count, us in PREFILL.items():
        goals = (Goal("us", us), Goal("peer_ratio", 0.9))
        found.append(packed_row(8192, 64, count, goals, "flashmla:prefill"))
    for tokens, (us, ratio) in reversed(DECODE.items()):
        count = max(65536, min(tokens * 16384, 1 << 21))
        goals = (Goal("us", us), Goal("peer_ratio", ratio))
        found.append(packed_row(tokens, 64, count, goals, "flashmla:decode"))
    found += [*training_rows(8192, 64), *training_rows(4096, 16)]
    return [*found, packed_row(64, 16, 1 << 20, (), "")]


if __name__ == "__main__":
    main(__file__)
