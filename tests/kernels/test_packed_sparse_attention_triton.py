"""Attention over packed rows: against loops in float64, and what the dequantised rows give."""

import math

import numpy as np
import pytest
import torch

from openv41 import ops
from openv41.model.cache_formats import PACKINGS, RowFormat
from tests.close import assert_close
from tests.oracles import attention as oracle


@pytest.fixture
def kernels(device):
    """The kernel file, imported once the interpreter is on."""
    from openv41.ops import packed_sparse_attention_triton  # noqa: PLC0415

    return packed_sparse_attention_triton


def packed(kind, rows):
    """Rows as the cache of a kind stores them, and the numbers that they stand for."""
    packing, width = PACKINGS[kind], rows.shape[1]
    stored = RowFormat(
        width=width, columns=packing.row_bytes(width), dtype=torch.uint8, packing=packing
    )
    found = stored.pack(rows)
    return found, stored.unpack(found, torch.float32)


def case(device, T=3, H=2, C=64, S=9, M=7, W=3, K=5, dtype=torch.float32, spread=3.0):
    """Arguments of the op, and both stores as numbers; scales differ from block to block."""
    q = torch.randn(T, H, C).to(dtype)
    window, window_kv = packed("window", torch.randn(S, C) * torch.randn(S, C).mul(spread).exp2())
    main, main_kv = packed("main", torch.randn(M, C) * torch.randn(M, C).mul(spread).exp2())
    window_rows, main_rows = torch.randint(-1, S, (T, W)), torch.randint(-1, max(M, 1), (T, K))
    args = q, window, window_rows, main, main_rows, torch.randn(H)
    return [x.to(device) for x in args] + [C**-0.5], (window_kv, main_kv)


def wanted(args, stores):
    """Attention over the numbers that the rows stand for, as loops in float64."""
    q, _, window_rows, _, main_rows, sink, scale = (
        x.cpu() if torch.is_tensor(x) else x for x in args
    )
    out = np.zeros(tuple(q.shape))
    for t in range(len(q)):
        keys = [stores[0][r] for r in window_rows[t] if r >= 0]
        keys += [stores[1][r] for r in main_rows[t] if r >= 0]
        if keys:
            parts = (x.double().numpy() for x in (q[t], torch.stack(keys), sink))
            out[t] = oracle.attend(*parts, scale)
    return torch.from_numpy(out)


SIZES = [
    {"T": 2, "H": 17, "C": 64, "W": 17, "K": 40},
    {"T": 1, "H": 1, "C": 64, "W": 1, "K": 1},
    {"T": 2, "H": 3, "C": 64, "W": 4, "K": 0, "M": 0},
    {"T": 2, "H": 3, "C": 64, "W": 0, "K": 20, "S": 0},
]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reference_matches_oracle(size, dtype):
    args, stores = case("cpu", dtype=dtype, **size)
    assert_close("reference", ops.packed_sparse_attention(*args), wanted(args, stores), ulps=16)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_kernel_matches_oracle(kernels, device, size, deterministic):
    """Lists are cut into parts, or read by one program."""
    args, stores = case(device, **size)
    got = kernels.packed_sparse_attention.run(*args, deterministic=deterministic)
    assert_close("kernel", got, wanted(args, stores), ulps=16)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_rotated(kernels, device, deterministic, dtype):
    """By what joins the parts, or behind it."""
    args, _ = case(device, dtype=dtype, **SIZES[0])
    turn = ops.rope_table(torch.arange(2) + 7, ops.rope_frequencies(24, 1e3)).to(device)
    made = kernels.tiling_of(args[0], 57, deterministic=deterministic)
    assert (made.parts > 1) != deterministic
    run, options = kernels.packed_sparse_attention.run, {"deterministic": deterministic}
    plain, turned = run(*args, **options), run(*args, turn, **options)
    with ops.kernels("reference"):
        want = ops.rotate(plain, turn)
    assert_close("turned", turned, want, ulps=4)
    assert torch.equal(turned[..., :-24], plain[..., :-24])


@pytest.mark.parametrize("kind", ["window", "main"])
def test_every_code_and_scale(kernels, device, kind):
    """A list of one row with all weight gives the row back, whatever its codes and scales."""
    width, packing = 512, PACKINGS[kind]
    codes, scales = packing.code_bytes(width), width // packing.block
    rows = torch.arange(256)[:, None]
    stored = torch.cat([(rows + torch.arange(codes)) % 256, (rows + torch.arange(scales)) % 256], 1)
    low, high = (105, 140) if kind == "window" else (0, 127)  # without NaN
    stored[:, codes:] = stored[:, codes:].clamp(low, high - 1)
    if kind == "window":
        nan = (stored[:, :codes] & 127) == 127
        stored[:, :codes] = torch.where(nan, 0, stored[:, :codes])
    stored = stored.to(torch.uint8)
    form = RowFormat(width=width, columns=codes + scales, dtype=torch.uint8, packing=packing)
    numbers = form.unpack(stored, torch.float32)
    step = 1 if torch.cuda.is_available() else 51
    rows = rows[::step]
    none = torch.full_like(rows, -1)
    lists = (rows, none) if kind == "window" else (none, rows)
    other = torch.zeros(1, width + 16 if kind == "main" else 288, dtype=torch.uint8)
    stores = (stored, other) if kind == "window" else (other, stored)
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    q, sink = torch.zeros(len(rows), 1, width, dtype=dtype), torch.tensor([-math.inf])
    args = q, stores[0], lists[0], stores[1], lists[1], sink
    got = kernels.packed_sparse_attention.run(*(x.to(device) for x in args), 1.0)
    assert torch.equal(got[:, 0].cpu().float(), numbers[::step].to(dtype).float())


def test_a_scale_of_nan_is_nan_and_hidden_rows_are_not_read(kernels, device):
    args, _ = case(device, T=2)
    args[2][:], args[4][:] = 1, 1
    want = kernels.packed_sparse_attention.run(*args)
    args[1][0], args[3][0] = 255, 255
    assert torch.equal(kernels.packed_sparse_attention.run(*args), want)
    for store, lists in ((1, 2), (3, 4)):
        poisoned = list(args)
        poisoned[lists] = args[lists].clone()
        poisoned[lists][1] = 0
        got = kernels.packed_sparse_attention.run(*poisoned)
        assert got[1].isnan().all(), store
        assert torch.equal(got[0], want[0]), store


@pytest.mark.parametrize("sink", [0.5, -math.inf, math.inf])
@pytest.mark.parametrize("deterministic", [False, True])
def test_query_without_rows_gives_zero(kernels, device, sink, deterministic):
    args, _ = case(device, W=20, K=20)
    args[2][1], args[4][1] = -1, -1
    args[2][0, :-1], args[4][0] = -1, -1
    args[2][0, -1] = 0
    args[5][:] = sink
    got = kernels.packed_sparse_attention.run(*args, deterministic=deterministic)
    assert not got[1].any()
    assert got[0].any() == (sink != math.inf)


def test_no_query_and_strided_inputs(kernels, device):
    args, _ = case(device)
    want = kernels.packed_sparse_attention.run(*args)
    args[0] = args[0].mT.contiguous().mT
    args[1], args[3] = (torch.cat([x, x[:, :16]], 1)[:, :-16] for x in (args[1], args[3]))
    args[2], args[4] = (x.mT.contiguous().mT for x in (args[2], args[4]))
    assert kernels.packed_sparse_attention.refuse(*args) is None
    assert torch.equal(kernels.packed_sparse_attention.run(*args), want)
    for i in (0, 2, 4):
        args[i] = args[i][:0]
    assert kernels.packed_sparse_attention.run(*args).shape == (0, 2, 64)


def test_refuses_what_it_cannot_take(kernels, device):
    args, _ = case(device)
    refuse = kernels.packed_sparse_attention.refuse
    assert "float64" in refuse(args[0].double(), *args[1:])
    assert "48 channels" in refuse(args[0].new_zeros(3, 2, 48), *args[1:])
    assert "66 and 35 bytes" in refuse(*args[:3], args[3][:, :-1], *args[4:])
    assert "apart" in refuse(args[0], args[1].mT.contiguous().mT, *args[2:])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 64), (8, 64), (64, 64), (131, 64), (5, 40), (9, 16)])
def test_released_widths(kernels, device, shape):
    """128 + 512 packed rows: within 2 ulp of the dequantised rows, and twice the same bits."""
    T, H = shape
    size = {"T": T, "H": H, "C": 512, "S": 300, "M": 3000, "W": 128, "K": 512}
    args, stores = case(device, dtype=torch.bfloat16, spread=0.5, **size)
    with ops.kernels("required"):
        got = ops.packed_sparse_attention(*args)
        assert torch.equal(got, ops.packed_sparse_attention(*args))
        alone = ops.packed_sparse_attention(*args, deterministic=True)
    q, _, window_rows, _, main_rows, sink, scale = args
    near, far = ops.plan_keys(window_rows), ops.plan_keys(main_rows)
    kv = [x.to(device).double() for x in stores]
    want = ops.sparse_attention.reference(q.double(), kv[0], near, kv[1], far, sink, scale)
    assert_close("packed", got, want, ulps=2)
    turn = ops.rope_table(torch.arange(T) + 7, ops.rope_frequencies(64, 1e4)).to(device)
    with ops.kernels("required"):
        turned = ops.packed_sparse_attention(*args, turn)
        assert_close("turned", turned, ops.rotate(got, turn), ulps=1)
    assert_close("deterministic", alone, want, ulps=2)
