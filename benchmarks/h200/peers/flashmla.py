"""FlashMLA for SM90, as sglang-kernel builds it: V4 records of 584 bytes, or bfloat16 KV."""

from pathlib import Path

import torch
from torch import Tensor

from benchmarks.h200.peers.case import Case, Shape, attended, randn
from benchmarks.h200.rows import relative_error

FOLDERS = ("",)
HEADS, WIDTH, PAGE, RECORD = 64, 512, 64, 584
SCALE = WIDTH**-0.5
WHAT = "FlashMLA SM90 (sglang-kernel 0.4.5)"


def load(folder: Path) -> None:
    """Register the operators."""
    found = sorted(folder.rglob("flashmla_ops*.so"))
    if not found:
        raise FileNotFoundError(f"no flashmla_ops*.so below {folder}")
    torch.ops.load_library(str(found[0]))


def records(rows: int) -> tuple[Tensor, Tensor]:
    """Random pages of 64 x (448 E4M3, 64 bfloat16), then 64 x (7 E8M0, 1 pad); the view of them."""
    pages, raw = rows // PAGE, PAGE * RECORD
    size = -(-raw // 576) * 576
    buffer = torch.zeros(pages, size, dtype=torch.uint8, device="cuda")
    data = buffer[:, : PAGE * 576].view(pages, PAGE, 576)
    for part in data.split(4096):
        shape = len(part), PAGE
        part[..., :448] = randn(*shape, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        part[..., 448:] = randn(*shape, 64).bfloat16().view(torch.uint8).view(*shape, 128)
    scales = buffer[:, PAGE * 576 : raw].view(pages, PAGE, 8)
    scales[..., :7] = torch.randint(124, 129, (pages, PAGE, 7), device="cuda").to(torch.uint8)
    view = buffer.as_strided((pages, PAGE, 1, RECORD), (size, RECORD, RECORD, 1))
    return buffer, view.view(torch.float8_e4m3fn)


def values(buffer: Tensor, rows: Tensor) -> Tensor:
    """Rows of the records in float64."""
    page, place = rows // PAGE, rows % PAGE
    data = buffer[:, : PAGE * 576].view(-1, PAGE, 576)[page, place]
    scales = buffer[:, PAGE * 576 : PAGE * RECORD].view(-1, PAGE, 8)[page, place][:, :7]
    plain = data[:, :448].contiguous().view(torch.float8_e4m3fn).double().view(-1, 7, 64)
    plain = plain * torch.exp2(scales.double() - 127)[..., None]
    return torch.cat(
        [plain.flatten(1), data[:, 448:].contiguous().view(torch.bfloat16).double()], 1
    )


def decode(shape: Shape) -> Case:
    """512 keys of main KV and 128 of the window, from two caches."""
    tokens = int(shape["T"])
    operator = torch.ops.sgl_kernel.sparse_decode_fwd.default
    count = max(65_536, min(tokens * 16_384, 1 << 21))
    main, main_view = records(count)
    window, window_view = records(max(4096, tokens * 128))
    sink, q = randn(HEADS), randn(tokens, 1, HEADS, WIDTH).bfloat16()
    chosen = [torch.randperm(count, device="cuda")[:512].sort().values for _ in range(tokens)]
    main_rows = torch.stack(chosen).int()[:, None]
    near = torch.arange(tokens * 128, device="cuda").view(tokens, 1, 128).int()

    def call(meta: Tensor | None, splits: Tensor | None) -> tuple[Tensor, ...]:
        caches = sink, meta, splits, main_view, main_rows, None, WIDTH, SCALE
        return operator(q, window_view, near, None, *caches)

    meta, splits = call(None, None)[2:4]
    t = tokens // 2
    keys = [values(window, near[t, 0].long()), values(main, main_rows[t, 0].long())]
    want = attended(q[t, 0], torch.cat(keys), sink, SCALE)
    return Case(
        what=f"{WHAT} sparse decode, 584-byte records, planned before",
        run=lambda: call(meta, splits)[0],
        error=lambda out: relative_error(out[t, 0], want),
        tolerance=0.02,
    )


def prefill(shape: Shape) -> Case:
    """640 keys of each query out of bfloat16 KV."""
    tokens, rows = int(shape["T"]), int(shape.get("rows", 16_384))
    operator = torch.ops.sgl_kernel.sparse_prefill_fwd.default
    kv, q = randn(rows, 1, WIDTH).bfloat16(), randn(tokens, HEADS, WIDTH).bfloat16()
    sink, behind = randn(HEADS), rows - tokens
    top = torch.randint(0, max(behind, 512), (tokens, 512), device="cuda").sort(1).values
    near = torch.arange(tokens, device="cuda")[:, None] + behind - 127
    near = (near + torch.arange(128, device="cuda")).clamp_min(0)
    listed = torch.cat([near, top], 1).int()[:, None].contiguous()
    t = tokens // 2
    want = attended(q[t], kv[listed[t, 0].long(), 0].double(), sink, SCALE)
    return Case(
        what=f"{WHAT} sparse prefill, bfloat16 KV",
        run=lambda: operator(q, kv, listed, SCALE, WIDTH, sink, None)[0],
        error=lambda out: relative_error(out[t], want),
        tolerance=0.02,
    )


CASES = {"decode": decode, "prefill": prefill}
