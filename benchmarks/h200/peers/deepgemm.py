"""DeepGEMM (sgl-deep-gemm): FP8 index logits, paged for decoding and ragged for prefill."""

import torch

from benchmarks.h200.peers.case import Case, Shape, index_scores, randn
from benchmarks.h200.rows import relative_error

FOLDERS = ("ffi11", "dg", "pure")
HEADS, WIDTH, PAGE, CHECKED = 32, 128, 64, 16
WHAT = "DeepGEMM 0.1.4.post1"
FP8 = torch.float8_e4m3fn


def paged_logits(shape: Shape) -> Case:
    """Logits of T queries, each over L paged keys of 132 bytes."""
    import deep_gemm  # noqa: PLC0415

    tokens, length = int(shape["T"]), int(shape["L"])
    blocks, codes = length // PAGE, PAGE * WIDTH
    pool = tokens * blocks if tokens * length <= 1 << 23 else max(blocks, (1 << 23) // PAGE)
    cache = torch.empty(pool, PAGE * (WIDTH + 4), dtype=torch.uint8, device="cuda")
    for part in cache.split(4096):
        part[:, :codes] = randn(len(part), codes).to(FP8).view(torch.uint8)
        part[:, codes:] = (randn(len(part), PAGE).abs() + 0.5).view(torch.uint8)
    kv = cache.view(pool, PAGE, 1, WIDTH + 4)
    table = [torch.randperm(pool, device="cuda")[:blocks] for _ in range(tokens)]
    table = torch.stack(table).int()
    q, weights = randn(tokens, 1, HEADS, WIDTH).to(FP8), randn(tokens, HEADS)
    lengths = torch.full((tokens, 1), length, dtype=torch.int32, device="cuda")
    sms = deep_gemm.get_num_sms()
    meta = deep_gemm.get_paged_mqa_logits_metadata(lengths, PAGE, sms)
    t = tokens // 2
    pages = cache[table[t, :CHECKED].long()]
    keys = pages[:, :codes].contiguous().view(FP8).double().view(-1, WIDTH)
    scales = pages[:, codes:].contiguous().view(torch.float32).double().view(-1)
    want = index_scores(q[t, 0], keys, weights[t]) * scales
    return Case(
        what=f"{WHAT} fp8_paged_mqa_logits, 132-byte rows",
        run=lambda: deep_gemm.fp8_paged_mqa_logits(
            q, kv, weights, lengths, table, meta, length, False
        ),
        error=lambda out: relative_error(out.reshape(tokens, -1)[t, : len(want)], want),
        tolerance=0.02,
    )


def logits(shape: Shape) -> Case:
    """Logits of a prefill chunk: query t sees L - T + t + 1 keys; written out in float32."""
    import deep_gemm  # noqa: PLC0415

    tokens, length = int(shape["T"]), int(shape["L"])
    q, weights = randn(tokens, HEADS, WIDTH).to(FP8), randn(tokens, HEADS)
    keys, scales = randn(length, WIDTH).to(FP8), randn(length).abs() + 0.5
    first = torch.zeros(tokens, dtype=torch.int32, device="cuda")
    last = (torch.arange(tokens, device="cuda") + length - tokens + 1).int()
    t, seen = tokens // 2, min(4096, length - tokens)
    want = index_scores(q[t], keys[:seen].double(), weights[t]) * scales[:seen].double()
    return Case(
        what=f"{WHAT} fp8_mqa_logits",
        run=lambda: deep_gemm.fp8_mqa_logits(q, (keys, scales), weights, first, last, False),
        error=lambda out: relative_error(out[t, :seen], want),
        tolerance=0.02,
    )


CASES = {"paged_logits": paged_logits, "logits": logits}
