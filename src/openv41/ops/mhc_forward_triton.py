# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The streams between two blocks on a GPU, where CUDA C++ is not to be had. Report §2.4.1.

A program advances a tile of tokens over one slice of D: it updates and stores the streams,
collapses them, and leaves partial sums of the projection and of both squares. A second launch adds
the slices' sums, normalises the collapsed rows and computes the coefficients.

Numbers moved per token, of bf16: (2 N + 4) D; mhc.cu moves (2 N + 2) D in one launch. The
projection takes three products of bf16, whose sum is that of float32 weights exactly: 6 N D P
operations per token.
"""

import functools
from typing import NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from openv41.ops import mhc_cuda

WIDTH = 32  # of the mixes, N (N + 2) of which are used
FEW_TOKENS = 512
CHUNK = 32  # numbers of a row that a program reads at once

# The interpreter has no product of bf16.
DOT = tl.float32 if triton.knobs.runtime.interpret else tl.bfloat16


@triton.jit
@no_type_check
def _column(values, k, P: tl.constexpr):
    """Column k of [R, P] as a vector."""
    return tl.sum(tl.where(tl.arange(0, P)[None, :] == k, values, 0.0), 1)


@triton.jit
@no_type_check
def _rows(ptr, t, is_token, NUM: tl.constexpr, P: tl.constexpr):
    """NUM numbers per token, in P columns."""
    p = tl.arange(0, P)[None, :]
    mask = is_token[:, None] & (p < NUM)
    return tl.load(ptr + t[:, None] * NUM + p, mask=mask, other=0.0).to(tl.float32)


@triton.jit
@no_type_check
def _coefficients(
    b_ptr, c_ptr, a_ptr, t, is_token, N: tl.constexpr, HAS_Y: tl.constexpr, P: tl.constexpr
):
    """Coefficients of the tokens, as tuples of vectors.

    With P half the width of a tile of bf16, both have a token's numbers in the same threads.
    """
    b, c, a = (), (), ()
    values = _rows(a_ptr, t, is_token, N, P)
    for n in tl.static_range(N):
        a = a + (_column(values, n, P),)
    if HAS_Y:
        values = _rows(c_ptr, t, is_token, N, P)
        for n in tl.static_range(N):
            c = c + (_column(values, n, P),)
        values = _rows(b_ptr, t, is_token, N * N, P)
        for k in tl.static_range(N * N):
            b = b + (_column(values, k, P),)
    return b, c, a


@triton.jit
@no_type_check
def _project(mixes, new, weight, DOT: tl.constexpr):
    """Add new [BT, BD] @ weight [BD, P], exact in the float32 weight where ``new`` is bf16."""
    if new.dtype == tl.float32:
        return tl.dot(new, weight, mixes, input_precision="ieee")
    high = weight.to(tl.bfloat16)
    rest = weight - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
    mixes = tl.dot(new.to(DOT), low.to(DOT), mixes)
    mixes = tl.dot(new.to(DOT), middle.to(DOT), mixes)
    return tl.dot(new.to(DOT), high.to(DOT), mixes)


@triton.jit
@no_type_check
def _advance(
    x_ptr, y_ptr, b_ptr, c_ptr, a_ptr, fn_ptr, new_ptr, h_ptr, parts_ptr, sums_ptr,
    T, D, x_t, x_n, y_t, tile, part, SLICES,
    N: tl.constexpr, P: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, CHUNKS: tl.constexpr,
    HAS_Y: tl.constexpr, FULL: tl.constexpr, STORE_H: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Advance a slice of a tile."""
    t = tile.to(tl.int64) * BT + tl.arange(0, BT)
    is_token = t < T
    b, c, a = _coefficients(b_ptr, c_ptr, a_ptr, t, is_token, N, HAS_Y, BD // 2)
    mixes = tl.zeros([BT, P], tl.float32)
    square = tl.zeros([BT], tl.float32)
    h_square = tl.zeros([BT], tl.float32)
    p = tl.arange(0, P)
    for chunk in tl.range(CHUNKS):
        d = (part * CHUNKS + chunk) * BD + tl.arange(0, BD)
        inside = is_token[:, None] & (d < D)[None, :]
        xs = ()
        for n in tl.static_range(N):
            at = x_ptr + t[:, None] * x_t + n * x_n + d[None, :]
            xs = xs + (tl.load(at, mask=inside, other=0.0),)
        if HAS_Y:
            y = tl.load(y_ptr + t[:, None] * y_t + d[None, :], mask=inside, other=0.0)
        h = tl.zeros([BT, BD], tl.float32)
        news = ()
        for m in tl.static_range(N):
            new = xs[m]
            if HAS_Y:
                wide = c[m][:, None] * y.to(tl.float32)
                for n in tl.static_range(N):
                    wide += b[m * N + n][:, None] * xs[n].to(tl.float32)
                new = wide.to(new.dtype)
                at = new_ptr + (t[:, None] * N + m) * D + d[None, :]
                tl.store(at, new, mask=inside)
            h += a[m][:, None] * new.to(tl.float32)
            news = news + (new,)
        if FULL:
            if CHUNKS == 1:  # the weights' registers are those of the coefficients
                tl.debug_barrier()
            new_square = tl.zeros([BT, BD], tl.float32)
            is_weight = (d < D)[:, None] & (p < N * (N + 2))[None, :]
            for m in tl.static_range(N):
                wide = news[m].to(tl.float32)
                new_square += wide * wide
                at = fn_ptr + p[None, :] * (N * D) + m * D + d[:, None]
                weight = tl.load(at, mask=is_weight, other=0.0)
                mixes = _project(mixes, news[m], weight, DOT)
            square += tl.sum(new_square, 1)
        h = h.to(xs[0].dtype).to(tl.float32)
        h_square += tl.sum(h * h, 1)
        if STORE_H:
            at = h_ptr + t[:, None] * D + d[None, :]
            tl.store(at, h.to(h_ptr.dtype.element_ty), mask=inside)
    if FULL:
        row = (tile.to(tl.int64) * SLICES + part) * BT + tl.arange(0, BT)
        tl.store(parts_ptr + row[:, None] * P + p[None, :], mixes)
        tl.store(sums_ptr + row * 2, square)
        tl.store(sums_ptr + row * 2 + 1, h_square)


@triton.jit
@no_type_check
def _divided(mix, axis: tl.constexpr, N: tl.constexpr, eps):
    """A matrix of N x N vectors over its sums along an axis."""
    divisors, out = (), ()
    for i in tl.static_range(N):
        total = mix[i] if axis == 0 else mix[i * N]
        for j in tl.static_range(1, N):
            total += mix[j * N + i] if axis == 0 else mix[i * N + j]
        divisors = divisors + (1.0 / (total + eps),)
    for k in tl.static_range(N * N):
        out = out + (mix[k] * divisors[k % N if axis == 0 else k // N],)
    return out


@triton.jit
@no_type_check
def _softmax_rows(raw, N: tl.constexpr):
    """Softmax of each row of a matrix of N x N vectors."""
    out = ()
    for i in tl.static_range(N):
        largest = raw[i * N]
        for j in tl.static_range(1, N):
            largest = tl.maximum(largest, raw[i * N + j])
        total = tl.zeros_like(largest)
        for j in tl.static_range(N):
            total += tl.exp(raw[i * N + j] - largest)
        for j in tl.static_range(N):
            out = out + (tl.exp(raw[i * N + j] - largest) / total,)
    return out


@triton.jit
@no_type_check
def _store_coefficients(
    mixes, base_ptr, scale_ptr, a_ptr, b_ptr, c_ptr, t, is_token, eps,
    N: tl.constexpr, P: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """From normalised mixes [R, P] to A, B, C, all in registers of one thread per token."""
    scale_a, scale_c, scale_b = tl.load(scale_ptr), tl.load(scale_ptr + 1), tl.load(scale_ptr + 2)
    for n in tl.static_range(N):
        raw = _column(mixes, n, P) * scale_a + tl.load(base_ptr + n)
        tl.store(a_ptr + t * N + n, tl.sigmoid(raw) + eps, mask=is_token)
        raw = _column(mixes, N + n, P) * scale_c + tl.load(base_ptr + N + n)
        tl.store(c_ptr + t * N + n, 2 * tl.sigmoid(raw), mask=is_token)
    raws, mix = (), ()
    for k in tl.static_range(N * N):
        raw = _column(mixes, 2 * N + k, P) * scale_b + tl.load(base_ptr + 2 * N + k)
        raws = raws + (raw,)
    soft = _softmax_rows(raws, N)
    for k in tl.static_range(N * N):
        mix = mix + (soft[k] + eps,)
    mix = _divided(mix, 0, N, eps)
    for _ in range(STEPS - 1):
        mix = _divided(mix, 1, N, eps)
        mix = _divided(mix, 0, N, eps)
    for i in tl.static_range(N):
        for j in tl.static_range(N):
            tl.store(b_ptr + (t * N + j) * N + i, mix[i * N + j], mask=is_token)


@triton.jit
@no_type_check
def _sum_of_slices(ptr, first, i, is_row, SLICES, BT: tl.constexpr, SLICES_UP: tl.constexpr):
    """Sum one number per token, which stand in pairs, over the slices of a tile."""
    s = tl.arange(0, SLICES_UP)
    row = first + s[:, None] * BT + i[None, :]
    mask = (s < SLICES)[:, None] & is_row[None, :]
    return tl.sum(tl.load(ptr + row * 2, mask=mask, other=0.0, cache_modifier=".cg"), 0)


@triton.jit
@no_type_check
def _normalise(
    sums_ptr, norm_ptr, h_ptr, T, D, tile, part, SLICES, norm_eps,
    BT: tl.constexpr, BD: tl.constexpr, CHUNKS: tl.constexpr, SLICES_UP: tl.constexpr,
):  # fmt: skip
    """Normalise a slice of the collapsed rows."""
    first = tile.to(tl.int64) * SLICES * BT
    i = tl.arange(0, BT)
    t = tile.to(tl.int64) * BT + i
    square = _sum_of_slices(sums_ptr + 1, first, i, i < BT, SLICES, BT, SLICES_UP)
    inverse = tl.rsqrt(square / D + norm_eps)
    for chunk in range(CHUNKS):
        d = (part * CHUNKS + chunk) * BD + tl.arange(0, BD)
        inside = (t < T)[:, None] & (d < D)[None, :]
        at = h_ptr + t[:, None] * D + d[None, :]
        h = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        norm = tl.load(norm_ptr + d, mask=d < D, other=0.0).to(tl.float32)
        out = h * inverse[:, None] * norm[None, :]
        tl.store(at, out.to(h_ptr.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def _finish_coefficients(
    parts_ptr, sums_ptr, base_ptr, scale_ptr, a_ptr, b_ptr, c_ptr, mixes_ptr, inverse_ptr,
    T, D, tile, part, SLICES, eps, norm_eps,
    N: tl.constexpr, P: tl.constexpr, BT: tl.constexpr, ROWS: tl.constexpr,
    SLICES_UP: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Compute the coefficients of this program's share of the tile's tokens."""
    first = tile.to(tl.int64) * SLICES * BT
    i = part * ROWS + tl.arange(0, ROWS)
    p = tl.arange(0, P)
    s = tl.arange(0, SLICES_UP)
    t = tile.to(tl.int64) * BT + i
    is_token = (i < BT) & (t < T)
    row = first + s[:, None] * BT + i[None, :]
    mask = (s < SLICES)[:, None] & is_token[None, :]
    at = parts_ptr + row[:, :, None] * P + p[None, None, :]
    mixes = tl.sum(tl.load(at, mask=mask[:, :, None], other=0.0, cache_modifier=".cg"), 0)
    square = _sum_of_slices(sums_ptr, first, i, is_token, SLICES, BT, SLICES_UP)
    inverse = tl.rsqrt(square / (N * D) + norm_eps)
    mixes = mixes * inverse[:, None]
    tl.store(mixes_ptr + t[:, None] * P + p[None, :], mixes, mask=is_token[:, None])
    tl.store(inverse_ptr + t * 2, inverse, mask=is_token)
    square = _sum_of_slices(sums_ptr + 1, first, i, is_token, SLICES, BT, SLICES_UP)
    tl.store(inverse_ptr + t * 2 + 1, tl.rsqrt(square / D + norm_eps), mask=is_token)
    _store_coefficients(
        mixes, base_ptr, scale_ptr, a_ptr, b_ptr, c_ptr, t, is_token, eps, N, P, STEPS
    )


@triton.jit
@no_type_check
def _first_launch(
    x_ptr, y_ptr, b_ptr, c_ptr, a_ptr, fn_ptr, new_ptr, h_ptr, parts_ptr, sums_ptr,
    T, D, x_t, x_n, y_t, SLICES,
    N: tl.constexpr, P: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, CHUNKS: tl.constexpr,
    HAS_Y: tl.constexpr, FULL: tl.constexpr, STORE_H: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    tile, part = tl.program_id(0) // SLICES, tl.program_id(0) % SLICES
    _advance(
        x_ptr, y_ptr, b_ptr, c_ptr, a_ptr, fn_ptr, new_ptr, h_ptr, parts_ptr, sums_ptr,
        T, D, x_t, x_n, y_t, tile, part, SLICES, N, P, BT, BD, CHUNKS, HAS_Y, FULL, STORE_H, DOT,
    )  # fmt: skip


@triton.jit
@no_type_check
def _second_launch(
    parts_ptr, sums_ptr, base_ptr, scale_ptr, norm_ptr, h_ptr, a_ptr, b_ptr, c_ptr,
    mixes_ptr, inverse_ptr, T, D, SLICES, eps, norm_eps,
    N: tl.constexpr, P: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, CHUNKS: tl.constexpr,
    ROWS: tl.constexpr, SLICES_UP: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    tile, part = tl.program_id(0) // SLICES, tl.program_id(0) % SLICES
    _normalise(
        sums_ptr, norm_ptr, h_ptr, T, D, tile, part, SLICES, norm_eps, BT, BD, CHUNKS, SLICES_UP,
    )  # fmt: skip
    if part * ROWS < BT:
        _finish_coefficients(
            parts_ptr, sums_ptr, base_ptr, scale_ptr, a_ptr, b_ptr, c_ptr,
            mixes_ptr, inverse_ptr, T, D, tile, part, SLICES, eps, norm_eps,
            N, P, BT, ROWS, SLICES_UP, STEPS,
        )  # fmt: skip


class Tiling(NamedTuple):
    """How the work is cut: tokens and numbers per program, its loops, and its warps."""

    tokens: int
    width: int
    chunks: int = 1
    warps: int = 4
    stages: int = 2


def tiling(tokens: int, dim: int) -> Tiling:
    """Small tiles where there are few tokens, so that all of the GPU reads the weights."""
    rows = max(16, min(64, triton.next_power_of_2(tokens)))
    chunks = 2 if tokens <= FEW_TOKENS else 8
    chunks = min(chunks, triton.next_power_of_2(triton.cdiv(dim, CHUNK)))
    return Tiling(rows, CHUNK, chunks, warps=rows // 8 if rows > 32 else 4)


class Advanced(NamedTuple):
    """What the forward leaves; the last two only the backward reads."""

    new: Tensor | None  # [T, N, D], None where nothing was pending
    h: Tensor  # [T, D]
    a: Tensor  # [T, N]
    b: Tensor  # [T, N, N]
    c: Tensor  # [T, N]
    mixes: Tensor  # [T, width], normalised
    inverse: Tensor  # [T, 2], one over the rms of the streams, of h


def advance(
    x: Tensor,
    pending: tuple[Tensor, Tensor, Tensor] | None,
    a: Tensor,
    weights: tuple[Tensor, Tensor, Tensor, Tensor],
    constants: tuple[int, float, float],
    cut: Tiling | None = None,
) -> Advanced:
    """Launch the boundary.

    ``weights`` are fn, base, scale and norm; ``constants`` the steps, eps and that of the norms.
    """
    num_tokens, num, dim = x.shape
    fn, base, scale, norm = weights
    steps, eps, norm_eps = constants
    y, b, c = pending or (x, a, a)
    make = functools.partial(torch.empty, dtype=torch.float32, device=x.device)
    new = torch.empty(x.shape, dtype=x.dtype, device=x.device) if pending else None
    h = torch.empty(num_tokens, dim, dtype=x.dtype, device=x.device)
    found = Advanced(
        new, h, make(num_tokens, num), make(num_tokens, num, num), make(num_tokens, num),
        make(num_tokens, WIDTH), make(num_tokens, 2),
    )  # fmt: skip
    if num_tokens == 0:
        return found
    if cut is None and mhc_cuda.fits(x, (a, fn, norm, *(pending or ()))) and y.stride(0) % 8 == 0:
        first = x, *(pending or (None, None, None)), a, fn, base, scale, norm, new
        strides = x.stride(0), x.stride(1), y.stride(0)
        mhc_cuda.launch((*first, *found[1:]), strides, norm, constants)
        return found
    cut = cut or tiling(num_tokens, dim)
    tiles = triton.cdiv(num_tokens, cut.tokens)
    slices = triton.cdiv(dim, cut.width * cut.chunks)
    rows = tiles * slices * cut.tokens
    parts, sums = make(rows, WIDTH), make(rows, 2)
    grid = (tiles * slices,)
    sizes = {"N": num, "P": WIDTH, "BT": cut.tokens, "BD": cut.width, "CHUNKS": cut.chunks}
    launch = {"num_warps": cut.warps, "num_stages": cut.stages}
    both = sizes | launch | {"HAS_Y": pending is not None, "DOT": DOT}
    ends = {
        "ROWS": triton.next_power_of_2(triton.cdiv(cut.tokens, slices)),
        "SLICES_UP": triton.next_power_of_2(slices),
        "STEPS": steps,
    }
    streams = (x, y, b, c, a, fn, x if new is None else new, h, parts, sums)
    strides = (x.stride(0), x.stride(1), y.stride(0))
    outs = (found.a, found.b, found.c, found.mixes, found.inverse)
    _first_launch[grid](
        *streams, num_tokens, dim, *strides, slices, FULL=True, STORE_H=True, **both
    )
    _second_launch[grid](
        parts, sums, base, scale, norm, h, *outs, num_tokens, dim, slices, eps, norm_eps,
        **launch, **sizes, **ends,
    )  # fmt: skip
    return found


def update(x: Tensor, pending: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Launch X' = B X + C y alone."""
    new = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _pass_over(x, pending, pending[2], new, None)
    return new


def collapse(x: Tensor, a: Tensor) -> Tensor:
    """Launch h = a X alone."""
    h = torch.empty(len(x), x.shape[2], dtype=x.dtype, device=x.device)
    _pass_over(x, None, a, None, h)
    return h


def _pass_over(
    x: Tensor,
    pending: tuple[Tensor, Tensor, Tensor] | None,
    a: Tensor,
    new: Tensor | None,
    h: Tensor | None,
) -> None:
    num_tokens, num, dim = x.shape
    if num_tokens == 0:
        return
    y, b, c = pending or (x, a, a)
    cut = tiling(num_tokens, dim)
    slices = triton.cdiv(dim, cut.width * cut.chunks)
    _first_launch[(triton.cdiv(num_tokens, cut.tokens) * slices,)](
        x, y, b, c, a, a, x if new is None else new, x if h is None else h, a, a,
        num_tokens, dim, x.stride(0), x.stride(1), y.stride(0), slices,
        N=num, P=WIDTH, BT=cut.tokens, BD=cut.width, CHUNKS=cut.chunks, HAS_Y=pending is not None,
        FULL=False, STORE_H=h is not None, DOT=DOT, num_warps=cut.warps, num_stages=cut.stages,
    )  # fmt: skip
