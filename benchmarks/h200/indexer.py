"""The indexer: scores from packed FP4 keys, top-k, prefill in a bounded workspace, training."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.h200.harness import main
from benchmarks.h200.rows import Goal, Inputs, Row, relative_error, unequal
from openv41.ops import (
    index_scores,
    indexer,
    packed_index_choice,
    packed_index_scores,
    select_top_k,
    selected_scores,
)
from openv41.ops.packed_rows import unpack_rows

HEADS, DIM, PAGE, TOP_K = 32, 128, 64, 512
BLOCKS, BLOCK = 2048, 8
CHECKED = 3  # queries of a call that are compared
DECODE = {(8, 131072): 28.2, (8, 1 << 20): 209.8, (64, 131072): 208.4, (1, 131072): None}
CHOICES = {  # us of DeepSelect on bf16 scores, where it was measured
    (1, 131072): 9.5,
    (8, 1 << 20): 19.7,
    (64, 131072): 17.4,
    (1, 16384): None,
    (1, 1 << 20): None,
    (8, 16384): None,
    (8, 131072): None,
    (64, 16384): None,
    (64, 1 << 20): None,
    (256, 16384): None,
    (256, 131072): None,
    (256, 1 << 20): None,
}
DECODED = (
    "8 x 131,072: Triton cannot read 68-byte rows by more than a word, and moves unpacked keys "
    "through shared memory: 145 us. CUDA C++ with bulk copies and mma.m16n8k16 of float16: 57. "
    "wgmma of E4M3 numbers, one product per block of 32 so that sums are exact, scales in float32: "
    "38 (246 for 8 x 1,048,576, 250 for 64 x 131,072); four programs an SM, whose products the "
    "compiler then makes one by one, and rings of four or six tiles are alike. Halves of tiles, of "
    "which one is unpacked while the other is multiplied, have since taken their place: 228 "
    "instructions of a warp for 16 entries, not 265."
)
CHOSEN = (
    "Triton, a reduction of the block for each halving: 34 us for 1 x 131,072, 131 for 8 x "
    "1,048,576, 100 for 64 x 131,072; CUDA C++, chunks that are thinned: 28, 78, 65; one pass for "
    "the best of each group of entries, then a block per row that reads the best groups alone "
    "(top_k.cu): 15, 28, 24. Blocks of 512 threads, not 1024, are a third slower but at 256 rows; "
    "groups of 64 are 1 to 5 us slower than those of 16 and 32. The block's own 8 us are "
    "instructions; a sixth of them has since gone."
)
TRIED: dict[str, str] = {
    **{f"packed_index_scores T={t} L={n}": DECODED for t, n in DECODE if t > 1},
    **{f"select_top_k T={t} L={n}": CHOSEN for (t, n), goal in CHOICES.items() if goal},
    "packed_index_choice T=8192 L=131072": (
        "Triton: 23.5 ms, of which the choice was 10.7 (335 us per 256 queries); with that in CUDA "
        "C++ 18.8. CUDA C++ with wgmma of E4M3 numbers, two warpgroups that take tiles of 64 keys "
        "by 8 queries in turns and write the best of each 16 scores: 10.9, of which 10.1 are "
        "scores. The second group begins when the first has asked for its products, made half of "
        "them, or all: 11.0, 10.9, 11.2."
    ),
}


def packed(count: int, generator: torch.Generator) -> Tensor:
    """Packed rows with random codes and scales around one."""
    device = generator.device
    rows = torch.randint(0, 256, (count, 68), generator=generator, device=device, dtype=torch.uint8)
    rows[:, 64:] = 124 + (rows[:, 64:] & 3)
    return rows


def normal(*shape: int, generator: torch.Generator) -> Tensor:
    """Random numbers in float32."""
    return torch.randn(shape, generator=generator, device=generator.device)


def decode_inputs(tokens: int, entries: int, generator: torch.Generator) -> Inputs:
    """A query of each request, whose pages stand anywhere."""
    device = generator.device
    pages = min(tokens * entries, 1 << 23) // PAGE
    order = [
        torch.randperm(pages, generator=generator, device=device)[: entries // PAGE]
        for _ in range(tokens)
    ]
    return {
        "q": packed(tokens * HEADS, generator).view(tokens, 1, HEADS, 68),
        "weights": normal(tokens, 1, HEADS, generator=generator),
        "keys": packed(pages * PAGE, generator),
        "table": torch.stack(order).int(),
        "visible": torch.full((tokens, 1), entries, device=device),
        "per_page": PAGE,
        "num_entries": entries,
    }


def exact_scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """Float32 scores of one query, a piece of the keys at a time, in float64 sums."""
    parts = []
    for piece in keys.split(1 << 16):
        dots = (unpack_rows(q).double() @ unpack_rows(piece).double().T).relu()
        parts.append(weights.double() @ dots)
    return torch.cat(parts)


def keys_of(given: Inputs, request: int) -> Tensor:
    """Packed keys of a request in order."""
    rows = given["table"][request].long()[:, None] * PAGE
    rows = rows + torch.arange(PAGE, device=rows.device)
    return given["keys"][rows.flatten()]


def decode_error(given: Inputs, out: Tensor) -> float:
    """Error of some requests' scores."""
    count = len(out)
    errors = [float("inf")] * (not out.isfinite().all())
    for t in range(0, count, max(1, count // CHECKED)):
        want = exact_scores(given["q"][t, 0], given["weights"][t, 0], keys_of(given, t))
        errors.append(relative_error(out[t, 0], want))
    return max(errors)


def tiled(*sizes: int, turned: bool = False) -> Callable[..., Tensor]:
    """The decode kernel in other sizes: entries, queries, tiles, warps, stages."""

    def run(**given: object) -> Tensor:
        from openv41.ops import index_scores_triton as file  # noqa: PLC0415

        return file.packed_scores(
            given["q"],
            given["weights"],
            given["keys"],
            given["table"],
            given["visible"],
            PAGE,
            given["num_entries"],
            file.Tiling(*sizes, turned=turned),
        )

    return run


def triton(**given: object) -> Tensor:
    """The Triton kernel, where CUDA C++ is the usual one."""
    from openv41.ops import index_scores_triton as file  # noqa: PLC0415

    names = "q", "weights", "keys", "table", "visible", "per_page"
    return file.packed_scores(*(given[n] for n in names), given["num_entries"])


def native(programs: int) -> Callable[..., Tensor]:
    """The CUDA C++ kernel with another number of programs."""

    def run(**given: object) -> Tensor:
        from openv41.ops import packed_index_cuda as file  # noqa: PLC0415

        names = "q", "weights", "keys", "table", "visible", "per_page", "num_entries"
        return file.scores(*(given[n] for n in names), programs_per_sm=programs)

    return run


def decode_row(tokens: int, entries: int, goal: float | None) -> Row:
    """Scores of decoded tokens from packed keys."""
    variants = {"Triton": triton}
    if (tokens, entries) == (8, 131072):
        variants |= {f"CUDA, {n} programs an SM": native(n) for n in (2, 6)}
        variants["Triton, 64 entries, turned"] = tiled(64, 1, 8, 4, 3, turned=True)
    return Row(
        op="packed_index_scores",
        shape={"T": tokens, "L": entries},
        make=partial(decode_inputs, tokens, entries),
        ours=packed_index_scores,
        error=decode_error,
        tolerance=1e-4,
        floor_bytes=tokens * entries * (68 + 4),
        floor_flops=tokens * entries * HEADS * DIM * 2,
        variants=variants,
        peers=("deepgemm:paged_logits", "sglang:fp4_logits"),
        goals=() if goal is None else (Goal("us", goal),),
    )


def choice_inputs(tokens: int, entries: int, generator: torch.Generator) -> Inputs:
    """Float32 scores, a quarter of the rows rounded so that many are equal."""
    scores = normal(tokens, entries, generator=generator)
    scores[: tokens // 4].mul_(256).round_().div_(256)
    return {"scores": scores, "allowed": None, "k": TOP_K}


def choice_error(given: Inputs, out: Tensor) -> float:
    """Number of ids that differ, in some rows where there are many."""
    rows = slice(None) if len(out) <= 64 else slice(0, None, len(out) // 32)
    scores = given["scores"][rows]
    return unequal(out[rows], indexer.ids_of(indexer.keep_top_k(scores, TOP_K), TOP_K))


def planned(*sizes: int) -> Callable[..., Tensor]:
    """The choice with another chunk, number kept and number of warps."""

    def run(scores: Tensor, **_: object) -> Tensor:
        from openv41.ops import top_k_triton as file  # noqa: PLC0415

        return file.choose(scores, TOP_K, plan=file.Plan(*sizes))

    return run


def choice_row(tokens: int, entries: int, peer_us: float | None) -> Row:
    """Top-512 of float32 scores."""
    variants = {
        f"chunks of {chunk}, {kept} kept, {warps} warps": planned(chunk, kept, warps)
        for chunk, kept, warps in ((8192, 1024, 8),)
        if (tokens, entries) in {(1, 131072), (8, 1 << 20), (64, 131072)}
    }
    variants = {"Triton": planned(), **variants}
    return Row(
        op="select_top_k",
        shape={"T": tokens, "L": entries},
        make=partial(choice_inputs, tokens, entries),
        ours=select_top_k,
        error=choice_error,
        tolerance=0,
        floor_bytes=tokens * (entries * 4 + TOP_K * 8),
        variants=variants,
        reference=None if tokens * entries > 1 << 26 else select_top_k,
        peers=("sglang:deepselect", "sglang:top_k_v2"),
        goals=() if peer_us is None else (Goal("us", peer_us),),
    )


def prefill_inputs(tokens: int, entries: int, generator: torch.Generator) -> Inputs:
    """The last queries of a long request."""
    device = generator.device
    order = torch.randperm(entries // PAGE, generator=generator, device=device)
    return {
        "q": packed(tokens * HEADS, generator).view(tokens, HEADS, 68),
        "weights": normal(tokens, HEADS, generator=generator),
        "keys": packed(entries, generator),
        "table": order.int(),
        "visible": torch.arange(entries - tokens, entries, device=device) + 1,
        "per_page": PAGE,
        "num_entries": entries,
        "k": TOP_K,
        "num_blocks": 0,
    }


def prefill_error(given: Inputs, out: tuple[Tensor, Tensor]) -> float:
    """How far below the last of the right choice a chosen entry scores, in some queries."""
    chosen, errors = out[0], []
    keys = keys_of({**given, "table": given["table"][None]}, 0)
    for t in range(0, len(chosen), len(chosen) // CHECKED):
        scores = exact_scores(given["q"][t], given["weights"][t], keys[: given["visible"][t]])
        ids = chosen[t]
        if bool((ids[1:] <= ids[:-1]).any()) or bool((ids < 0).any()):
            return float("inf")
        last = scores.topk(TOP_K).values[-1]
        errors.append(float((last - scores[ids].min()) / scores.abs().max()))
    return max(errors)


def prefill_triton(**given: object) -> tuple[Tensor, Tensor]:
    """Scores by the Triton kernel, where CUDA C++ is the usual one."""
    from openv41.ops import index_prefill_cuda as file  # noqa: PLC0415

    usual = file.refuse
    file.refuse = lambda *_: "Triton is asked for"
    try:
        return packed_index_choice(**given)
    finally:
        file.refuse = usual


def prefill_row(tokens: int, entries: int, goal: float | None) -> Row:
    """Scores and choice of a long prompt's chunk; the workspace is bounded."""
    variants = {"Triton": prefill_triton} if (tokens, entries) == (8192, 131072) else {}
    pairs = tokens * entries - tokens * tokens // 2
    return Row(
        op="packed_index_choice",
        shape={"T": tokens, "L": entries},
        make=partial(prefill_inputs, tokens, entries),
        ours=packed_index_choice,
        error=prefill_error,
        tolerance=1e-4,
        floor_bytes=entries * 68 + tokens * (HEADS * 72 + TOP_K * 8),
        floor_flops=pairs * HEADS * DIM * 2,
        flop_rate="fp8",
        variants=variants,
        peers=("sglang:logits_and_top_k",),
        goals=() if goal is None else (Goal("us", goal),),
    )


def training_inputs(tokens: int, generator: torch.Generator) -> Inputs:
    """Rows that queries list of as many keys, and a gradient."""
    device = generator.device

    def leaf(*shape: int) -> Tensor:
        return normal(*shape, generator=generator).bfloat16().requires_grad_()

    at = torch.arange(tokens, device=device)[:, None]
    noise = torch.rand(tokens, tokens, generator=generator, device=device)
    noise.masked_fill_(torch.arange(tokens, device=device) > at, -1)
    values, rows = noise.topk(min(TOP_K, tokens), dim=1)
    return {
        "q": leaf(tokens, HEADS, DIM),
        "weights": leaf(tokens, HEADS),
        "keys": leaf(tokens, DIM),
        "rows": rows.masked_fill(values < 0, -1),
        "gradient": normal(*rows.shape, generator=generator),
    }


def train(q: Tensor, weights: Tensor, keys: Tensor, rows: Tensor, gradient: Tensor) -> object:
    """Scores and all gradients."""
    scores = selected_scores(q, weights, keys, rows)
    wanted = torch.where(rows < 0, 0, gradient)
    return scores, *torch.autograd.grad(scores, (q, weights, keys), wanted)


def train_wide(**given: Tensor) -> object:
    """The same in float32: in bfloat16 the reference adds a key's gradients up 1.3% off."""
    wide = {n: given[n].detach().float().requires_grad_() for n in ("q", "weights", "keys")}
    return train(**{**given, **wide})


def training_error(given: Inputs, out: tuple[Tensor, ...]) -> float:
    """Largest error against float32 through the plainest formula, a few queries at a time."""
    q, weights, keys = (
        given[n].detach().float().requires_grad_() for n in ("q", "weights", "keys")
    )
    rows, errors = given["rows"], []
    for part in torch.arange(len(rows), device=rows.device).split(256):
        there = rows[part] >= 0
        with torch.enable_grad():
            listed = keys[rows[part].clamp(min=0)]
            dots = torch.einsum("tij,tkj->tik", q[part], listed).relu()
            scores = (dots * weights[part][..., None]).sum(1)
            scores.backward(torch.where(there, given["gradient"][part], 0))
        errors.append(relative_error(out[0][part][there], scores[there].detach()))
    grads = zip(out[1:], (q.grad, weights.grad, keys.grad), strict=True)
    return max(*errors, *(relative_error(a, b) for a, b in grads))


def training_row(tokens: int) -> Row:
    """Scores of the listed rows, forward and backward."""
    return Row(
        op="selected_scores",
        shape={"T": tokens, "K": TOP_K, "M": tokens},
        make=partial(training_inputs, tokens),
        ours=train,
        error=training_error,
        tolerance=1e-2,
        floor_bytes=4 * tokens * HEADS * DIM * 2,
        floor_flops=tokens * TOP_K * HEADS * DIM * 2 * 5,
        reference=train_wide,
        goals=(Goal("reference_ratio", 3.0),),
    )


def dense_inputs(tokens: int, entries: int, generator: torch.Generator) -> Inputs:
    """Queries and keys in bf16, as training scores them."""
    return {
        "q": normal(1, tokens, HEADS, DIM, generator=generator).bfloat16(),
        "weights": normal(1, tokens, HEADS, generator=generator).bfloat16(),
        "keys": normal(1, entries, DIM, generator=generator).bfloat16(),
    }


def dense_error(given: Inputs, out: Tensor) -> float:
    """Error of some queries' scores."""
    part = slice(0, None, out.shape[1] // 16)
    q, weights, keys = given["q"][0, part], given["weights"][0, part], given["keys"][0]
    dots = torch.einsum("tij,mj->tim", q.double(), keys.double()).relu()
    return relative_error(out[0, part], (dots * weights.double()[..., None]).sum(1))


def dense_row(tokens: int, entries: int) -> Row:
    """Scores of all keys by all queries in bf16."""
    return Row(
        op="index_scores",
        shape={"T": tokens, "L": entries},
        make=partial(dense_inputs, tokens, entries),
        ours=index_scores,
        error=dense_error,
        tolerance=1e-4,
        floor_bytes=tokens * entries * 4,
        floor_flops=tokens * entries * HEADS * DIM * 2,
    )


def rows() -> list[Row]:
    """All rows."""
    choices = [choice_row(*shape, goal) for shape, goal in CHOICES.items()]
    decode = [decode_row(*shape, goal) for shape, goal in DECODE.items()]
    return [
        decode[0],
        *choices[:3],
        prefill_row(8192, 131072, 11_960.0),
        training_row(8192),
        *decode[1:],
        *choices[3:],
        dense_row(2048, 8192),
        prefill_row(16384, 1 << 20, None),
    ]


if __name__ == "__main__":
    main(__file__)
