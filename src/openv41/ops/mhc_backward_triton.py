# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Gradients of the streams between two blocks on a GPU. Report §2.4.1.

Three launches, each of whose sums has a fixed order: of tokens, for the coefficients; of slices of
D over many tokens, for the weights and for the product of rows that the norm's gradient needs; of
tiles, for the streams, their new value being computed again. Sums over programs are partial in
memory, and added last. Numbers moved per token, of bf16: (4 N + 4) D.
"""

from typing import NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from openv41.ops import mhc_cuda
from openv41.ops.mhc_forward_triton import (
    DOT,
    WIDTH,
    Advanced,
    _coefficients,
    _softmax_rows,
)

FEW_TOKENS, CHUNK = 16, 32  # of a tile whose sums over D stay in registers
CHUNKS, WARPS = 16, 4
TOKENS, WIDE_CHUNK = 32, 64  # of a tile whose sums over tokens stay there
PROGRAMS = 1024  # about as many sum the weights' gradient


@triton.jit
@no_type_check
def _divisors(mix, axis: tl.constexpr, N: tl.constexpr, eps):
    """Sums of a matrix of N x N vectors along an axis, plus eps."""
    out = ()
    for i in tl.static_range(N):
        total = mix[i] if axis == 0 else mix[i * N]
        for j in tl.static_range(1, N):
            total += mix[j * N + i] if axis == 0 else mix[i * N + j]
        out = out + (total + eps,)
    return out


@triton.jit
@no_type_check
def _undivide(grad, mix, divisors, axis: tl.constexpr, N: tl.constexpr):
    """Gradient before a division, and the matrix as it was before."""
    along, new_grad, new_mix = (), (), ()
    for i in tl.static_range(N):
        total = grad[i] * mix[i] if axis == 0 else grad[i * N] * mix[i * N]
        for j in tl.static_range(1, N):
            if axis == 0:
                total += grad[j * N + i] * mix[j * N + i]
            else:
                total += grad[i * N + j] * mix[i * N + j]
        along = along + (total,)
    for k in tl.static_range(N * N):
        divisor = divisors[k % N if axis == 0 else k // N]
        new_grad = new_grad + ((grad[k] - along[k % N if axis == 0 else k // N]) / divisor,)
        new_mix = new_mix + (mix[k] * divisor,)
    return new_grad, new_mix


@triton.jit
@no_type_check
def _divide(mix, divisors_ptr, T, is_token, axis: tl.constexpr, N: tl.constexpr, eps):
    """Divide by the sums along an axis, and keep these."""
    divisors = _divisors(mix, axis, N, eps)
    out = ()
    for i in tl.static_range(N):
        tl.store(divisors_ptr + i * T, divisors[i], mask=is_token)
    for k in tl.static_range(N * N):
        out = out + (mix[k] / divisors[k % N if axis == 0 else k // N],)
    return out


@triton.jit
@no_type_check
def _kept(divisors_ptr, T, is_token, N: tl.constexpr):
    out = ()
    for i in tl.static_range(N):
        out = out + (tl.load(divisors_ptr + i * T, mask=is_token, other=1.0),)
    return out


@triton.jit
@no_type_check
def _balance_backward(
    raws, grad, divisors_ptr, T, is_token, N: tl.constexpr, STEPS: tl.constexpr, eps
):
    """Gradient of the logits of a balanced matrix; ``grad`` and ``raws`` are N x N vectors.

    Each thread keeps its token's divisors [2 STEPS - 1, N] in memory, and undoes the divisions.
    """
    soft = _softmax_rows(raws, N)
    mix = ()
    for k in tl.static_range(N * N):
        mix = mix + (soft[k] + eps,)
    mix = _divide(mix, divisors_ptr, T, is_token, 0, N, eps)
    for step in range(STEPS - 1):
        at = divisors_ptr + (2 * step + 1) * N * T
        mix = _divide(mix, at, T, is_token, 1, N, eps)
        mix = _divide(mix, at + N * T, T, is_token, 0, N, eps)
    for back in range(STEPS - 1):
        at = divisors_ptr + (2 * (STEPS - 2 - back) + 1) * N * T
        grad, mix = _undivide(grad, mix, _kept(at + N * T, T, is_token, N), 0, N)
        grad, mix = _undivide(grad, mix, _kept(at, T, is_token, N), 1, N)
    grad, mix = _undivide(grad, mix, _kept(divisors_ptr, T, is_token, N), 0, N)
    out = ()
    for i in tl.static_range(N):
        along = grad[i * N] * soft[i * N]
        for j in tl.static_range(1, N):
            along += grad[i * N + j] * soft[i * N + j]
        for j in tl.static_range(N):
            out = out + (soft[i * N + j] * (grad[i * N + j] - along),)
    return out


@triton.jit
@no_type_check
def _coefficients_backward(
    mixes_ptr, inverse_ptr, base_ptr, scale_ptr, g_a_ptr, g_b_ptr, g_c_ptr,
    g_mixes_ptr, along_ptr, sums_ptr, divisors_ptr, T, D, eps,
    N: tl.constexpr, P: tl.constexpr, BT: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Gradient of the projection, per token; and partial sums of those of base and scale."""
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    is_token = t < T
    mixes, g_raws, raws, g_comb = (), (), (), ()
    for k in tl.static_range(N * (N + 2)):
        mixes = mixes + (tl.load(mixes_ptr + t * P + k, mask=is_token, other=0.0),)
    for k in tl.static_range(2 * N):
        raw = mixes[k] * tl.load(scale_ptr + k // N) + tl.load(base_ptr + k)
        value = tl.sigmoid(raw)
        at = g_a_ptr + t * N + k if k < N else g_c_ptr + t * N + k - N
        grad = tl.load(at, mask=is_token, other=0.0) * (1 if k < N else 2)
        g_raws = g_raws + (grad * value * (1 - value),)
    for k in tl.static_range(2 * N, N * (N + 2)):
        raws = raws + (mixes[k] * tl.load(scale_ptr + 2) + tl.load(base_ptr + k),)
    for k in tl.static_range(N * N):
        at = g_b_ptr + (t * N + k % N) * N + k // N
        g_comb = g_comb + (tl.load(at, mask=is_token, other=0.0),)
    g_raws = g_raws + _balance_backward(raws, g_comb, divisors_ptr + t, T, is_token, N, STEPS, eps)
    inverse = tl.load(inverse_ptr + t * 2, mask=is_token, other=0.0)
    along = tl.zeros([BT], tl.float32)
    at = sums_ptr + tl.program_id(0) * 2 * P
    for k in tl.static_range(P):
        grad = tl.zeros([BT], tl.float32)
        if k < N * (N + 2):
            tl.store(at + k, tl.sum(g_raws[k], 0))
            tl.store(at + P + k, tl.sum(g_raws[k] * mixes[k], 0))
            grad = g_raws[k] * tl.load(scale_ptr + (k // N if k < 2 * N else 2))
            along += grad * mixes[k]
        tl.store(g_mixes_ptr + t * P + k, grad * inverse, mask=is_token)
    tl.store(along_ptr + t, along * inverse * inverse / (N * D), mask=is_token)


@triton.jit
@no_type_check
def _product(a, b, acc, DOT: tl.constexpr):
    """Add a @ b of float32 numbers, to about 16 bits of each."""
    a_high, b_high = a.to(tl.bfloat16), b.to(tl.bfloat16)
    a_low = (a - a_high.to(tl.float32)).to(tl.bfloat16)
    b_low = (b - b_high.to(tl.float32)).to(tl.bfloat16)
    acc = tl.dot(a_low.to(DOT), b_high.to(DOT), acc)
    acc = tl.dot(a_high.to(DOT), b_low.to(DOT), acc)
    return tl.dot(a_high.to(DOT), b_high.to(DOT), acc)


@triton.jit
@no_type_check
def _streams_backward(  # noqa: PLR0912, PLR0915
    x_ptr, y_ptr, b_ptr, c_ptr, a_ptr, fn_ptr, norm_ptr, inverse_ptr, g_new_ptr, g_h_ptr,
    g_mixes_ptr, along_ptr, products_ptr, g_x_ptr, g_y_ptr, parts_ptr,
    T, D, x_t, x_n, y_t, SLICES,
    N: tl.constexpr, P: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, CHUNKS: tl.constexpr,
    HAS_Y: tl.constexpr, HAS_G: tl.constexpr, MIX: tl.constexpr, FULL: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """Gradients of x and y in one slice of a tile, and partial sums of those of a, c and b."""
    tile, part = tl.program_id(0) // SLICES, tl.program_id(0) % SLICES
    t = tile.to(tl.int64) * BT + tl.arange(0, BT)
    is_token = t < T
    b, c, a = _coefficients(b_ptr, c_ptr, a_ptr, t, is_token, N, HAS_Y, BD // 2)
    p = tl.arange(0, P)
    if FULL:
        inverse = tl.load(inverse_ptr + t * 2 + 1, mask=is_token, other=0.0)
        pull = tl.load(products_ptr + t, mask=is_token, other=0.0) / D
        pull = pull * inverse * inverse * inverse
        along = tl.load(along_ptr + t, mask=is_token, other=0.0)
        g_mixes = tl.load(
            g_mixes_ptr + t[:, None] * P + p[None, :], mask=is_token[:, None], other=0.0
        )
    sums = ()
    for _ in tl.static_range(2 * N + N * N):
        sums = sums + (tl.zeros([BT], tl.float32),)
    for chunk in tl.range(CHUNKS):
        d = (part * CHUNKS + chunk) * BD + tl.arange(0, BD)
        inside = is_token[:, None] & (d < D)[None, :]
        xs, g_xs, news, new_sums = (), (), (), ()
        for n in tl.static_range(N):
            at = x_ptr + t[:, None] * x_t + n * x_n + d[None, :]
            xs = xs + (tl.load(at, mask=inside, other=0.0),)
            g_xs = g_xs + (tl.zeros([BT, BD], tl.float32),)
        if HAS_Y:
            y = tl.load(y_ptr + t[:, None] * y_t + d[None, :], mask=inside, other=0.0)
            y = y.to(tl.float32)
            g_y = tl.zeros([BT, BD], tl.float32)
        h = tl.zeros([BT, BD], tl.float32)
        for m in tl.static_range(N):
            new = xs[m].to(tl.float32)
            if HAS_Y:
                new = c[m][:, None] * y
                for n in tl.static_range(N):
                    new += b[m * N + n][:, None] * xs[n].to(tl.float32)
                new = new.to(xs[0].dtype).to(tl.float32)
            news = news + (new,)
            h += a[m][:, None] * new
        if MIX:
            at = g_h_ptr + t[:, None] * D + d[None, :]
            g_h = tl.load(at, mask=inside, other=0.0).to(tl.float32)
            if FULL:
                norm = tl.load(norm_ptr + d, mask=d < D, other=0.0).to(tl.float32)
                h = h.to(xs[0].dtype).to(tl.float32)
                g_h = g_h * norm[None, :] * inverse[:, None] - h * pull[:, None]
            for m in tl.static_range(N):
                new_sums = new_sums + (sums[m] + tl.sum(g_h * news[m], 1),)
        else:
            for m in tl.static_range(N):
                new_sums = new_sums + (sums[m],)
        c_sums, b_sums = (), ()
        for m in tl.static_range(N):
            total = tl.zeros([BT, BD], tl.float32)
            if FULL:
                at = fn_ptr + p[:, None] * (N * D) + m * D + d[None, :]
                is_weight = (p < N * (N + 2))[:, None] & (d < D)[None, :]
                total = _product(g_mixes, tl.load(at, mask=is_weight, other=0.0), total, DOT)
                total -= along[:, None] * news[m]
            if HAS_G:
                at = g_new_ptr + (t[:, None] * N + m) * D + d[None, :]
                total += tl.load(at, mask=inside, other=0.0).to(tl.float32)
            if MIX:
                total += a[m][:, None] * g_h
            if HAS_Y:
                g_y += c[m][:, None] * total
                c_sums = c_sums + (sums[N + m] + tl.sum(total * y, 1),)
                next_g_xs = ()
                for n in tl.static_range(N):
                    product = tl.sum(total * xs[n].to(tl.float32), 1)
                    b_sums = b_sums + (sums[2 * N + m * N + n] + product,)
                    next_g_xs = next_g_xs + (g_xs[n] + b[m * N + n][:, None] * total,)
                g_xs = next_g_xs
            else:
                at = g_x_ptr + (t[:, None] * N + m) * D + d[None, :]
                tl.store(at, total.to(g_x_ptr.dtype.element_ty), mask=inside)
        if HAS_Y:
            for n in tl.static_range(N):
                at = g_x_ptr + (t[:, None] * N + n) * D + d[None, :]
                tl.store(at, g_xs[n].to(g_x_ptr.dtype.element_ty), mask=inside)
            at = g_y_ptr + t[:, None] * D + d[None, :]
            tl.store(at, g_y.to(g_y_ptr.dtype.element_ty), mask=inside)
            sums = new_sums + c_sums + b_sums
        else:
            for k in tl.static_range(N, 2 * N + N * N):
                new_sums = new_sums + (sums[k],)
            sums = new_sums
    for k in tl.static_range(2 * N + N * N):
        tl.store(parts_ptr + (part * T + t) * (2 * N + N * N) + k, sums[k], mask=is_token)


@triton.jit
@no_type_check
def _weights_backward(
    new_ptr, a_ptr, norm_ptr, inverse_ptr, g_h_ptr, g_mixes_ptr, g_fn_ptr, g_norm_ptr,
    products_ptr, T, D, n_t, n_n,
    N: tl.constexpr, P: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, TILES: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """Sums over some tokens of the gradients of fn and of the norm's weight, in one slice of D.

    And each token's share of the product of h and the gradient of its normalised value.
    """
    group = tl.program_id(1)
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    p = tl.arange(0, P)
    totals = ()
    for _ in tl.static_range(N):
        totals = totals + (tl.zeros([P, BD], tl.float32),)
    norm = tl.load(norm_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    g_norm = tl.zeros([BT, BD], tl.float32)
    for tile in tl.range(TILES):
        t = (group.to(tl.int64) * TILES + tile) * BT + tl.arange(0, BT)
        is_token = t < T
        inside = is_token[:, None] & (d < D)[None, :]
        at = g_mixes_ptr + t[None, :] * P + p[:, None]
        g_mixes = tl.load(at, mask=is_token[None, :], other=0.0)
        h = tl.zeros([BT, BD], tl.float32)
        new_totals = ()
        for m in tl.static_range(N):
            at = new_ptr + t[:, None] * n_t + m * n_n + d[None, :]
            new = tl.load(at, mask=inside, other=0.0)
            a = tl.load(a_ptr + t * N + m, mask=is_token, other=0.0)
            new_totals = new_totals + (_product(g_mixes, new.to(tl.float32), totals[m], DOT),)
            h += a[:, None] * new.to(tl.float32)
            h_type = new.dtype
        totals = new_totals
        at = g_h_ptr + t[:, None] * D + d[None, :]
        g_h = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.load(inverse_ptr + t * 2 + 1, mask=is_token, other=0.0)
        product = g_h * h.to(h_type).to(tl.float32)
        g_norm += product * inverse[:, None]
        at = products_ptr + tl.program_id(0).to(tl.int64) * T + t
        tl.store(at, tl.sum(product * norm[None, :], 1), mask=is_token)
    for m in tl.static_range(N):
        at = g_fn_ptr + ((group * N * (N + 2) + p[:, None]) * N + m).to(tl.int64) * D + d[None, :]
        mask = (p < N * (N + 2))[:, None] & (d < D)[None, :]
        tl.store(at, totals[m], mask=mask)
    tl.store(g_norm_ptr + group * D + d, tl.sum(g_norm, 0), mask=d < D)


class Saved(NamedTuple):
    """What the backward reads of the forward."""

    x: Tensor
    pending: tuple[Tensor, Tensor, Tensor] | None
    a: Tensor
    weights: tuple[Tensor, Tensor, Tensor, Tensor]  # fn, base, scale, norm
    out: Advanced


def coefficients_backward(
    saved: Saved, grads: tuple[Tensor, Tensor, Tensor], steps: int, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of A, B, C to those of the projection [T, P], of base and scale; and the pull.

    The last is by how much of itself the gradient of the streams shrinks, [T].
    """
    num_tokens, num, dim = saved.x.shape
    _, base, scale, _ = saved.weights
    rows = 32
    programs = triton.cdiv(num_tokens, rows)
    g_mixes = torch.empty_like(saved.out.mixes)
    along = torch.empty(num_tokens, dtype=torch.float32, device=base.device)
    sums = torch.zeros(programs, 2, WIDTH, dtype=torch.float32, device=base.device)
    divisors = torch.empty(2 * steps - 1, num, num_tokens, dtype=torch.float32, device=base.device)
    _coefficients_backward[(programs,)](
        saved.out.mixes, saved.out.inverse, base, scale, *grads, g_mixes, along, sums, divisors,
        num_tokens, dim, eps, N=num, P=WIDTH, BT=rows, STEPS=steps, num_warps=1,
    )  # fmt: skip
    g_base, g_raw = sums.sum(0)[:, : num * (num + 2)]
    g_scale = torch.stack([part.sum() for part in g_raw.split([num, num, num * num])])
    return g_mixes, along, g_base, g_scale


def streams_backward(
    x: Tensor,
    pending: tuple[Tensor, Tensor, Tensor] | None,
    a: Tensor | None,
    g_new: Tensor | None,
    g_h: Tensor | None,
    full: tuple[Tensor, ...] | None = None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]:
    """Gradients of x, y, a, b and c; ``full`` is fn, norm, inverse, g_mixes, along, products."""
    num_tokens, num, dim = x.shape
    y, b, c = pending or (x, x, x)
    g_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    g_y = torch.empty(num_tokens, dim, dtype=y.dtype, device=x.device) if pending else None
    if full is not None and a is not None and g_h is not None:
        fn, norm, inverse, g_mixes, along, products = full
        read = a, fn, norm, g_h, *(pending or ()), *(() if g_new is None else (g_new,))
        if mhc_cuda.backward_fits(x, read) and y.stride(0) % 8 == 0:
            before = x, *(pending or (None, None, None)), a, fn, norm, inverse, g_new, g_h
            pointers = *before, g_mixes, along, products, g_x, g_y
            strides = x.stride(0), x.stride(1), y.stride(0)
            return _with_sums(g_x, g_y, mhc_cuda.launch_backward(pointers, strides, norm))
    chunks = min(CHUNKS, triton.next_power_of_2(triton.cdiv(dim, CHUNK)))
    slices = triton.cdiv(dim, CHUNK * chunks)
    size = num * (num + 2)
    parts = torch.empty(slices, num_tokens, size, dtype=torch.float32, device=x.device)
    fn, norm, inverse, g_mixes, along, products = full or (x,) * 6
    grid = (triton.cdiv(num_tokens, FEW_TOKENS) * slices,)
    _streams_backward[grid](
        x, y, b, c, c if a is None else a, fn, norm, inverse, x if g_new is None else g_new,
        x if g_h is None else g_h, g_mixes, along, products, g_x, g_x if g_y is None else g_y,
        parts, num_tokens, dim, x.stride(0), x.stride(1), y.stride(0), slices,
        N=num, P=WIDTH, BT=FEW_TOKENS, BD=CHUNK, CHUNKS=chunks, HAS_Y=pending is not None,
        HAS_G=g_new is not None, MIX=g_h is not None, FULL=full is not None, DOT=DOT,
        num_warps=WARPS, num_stages=2,
    )  # fmt: skip
    return _with_sums(g_x, g_y, parts)


def _with_sums(
    g_x: Tensor, g_y: Tensor | None, parts: Tensor
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]:
    """Add the gradients of a, b and c, of which ``parts`` are shares in the order a, c, b."""
    num = g_x.shape[1]
    g_a, g_c, g_b = parts.sum(0).split([num, num, num * num], dim=1)
    return g_x, g_y, g_a.contiguous(), g_b.reshape(-1, num, num), g_c.contiguous()


def _weights(saved: Saved, g_h: Tensor, g_mixes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of fn and norm; and the product of each h with its gradient."""
    out, (fn, _, _, norm) = saved.out, saved.weights
    new = saved.x if out.new is None else out.new
    num_tokens, num, dim = new.shape
    slices = triton.cdiv(dim, WIDE_CHUNK)
    tiles = triton.cdiv(num_tokens, TOKENS)
    loops = triton.next_power_of_2(max(1, tiles * slices // PROGRAMS))
    groups = triton.cdiv(tiles, loops)
    g_fn = torch.empty(groups, *fn.shape, dtype=torch.float32, device=fn.device)
    g_norm = torch.empty(groups, dim, dtype=torch.float32, device=fn.device)
    products = torch.empty(slices, num_tokens, dtype=torch.float32, device=fn.device)
    _weights_backward[(slices, groups)](
        new, saved.a, norm, out.inverse, g_h, g_mixes, g_fn, g_norm, products, num_tokens, dim,
        new.stride(0), new.stride(1), N=num, P=WIDTH, BT=TOKENS, BD=WIDE_CHUNK, TILES=loops,
        DOT=DOT, num_warps=8, num_stages=2,
    )  # fmt: skip
    return g_fn.sum(0), g_norm.sum(0).to(norm.dtype), products.sum(0)


def boundary_backward(
    saved: Saved,
    g_new: Tensor | None,
    g_h: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
    constants: tuple[int, float],
) -> tuple[Tensor | None, ...]:
    """Gradients of x, y, b, c, a, fn, base, scale and norm."""
    x, out = saved.x, saved.out
    fn, _, _, norm = saved.weights
    g_mixes, along, g_base, g_scale = coefficients_backward(saved, grads, *constants)
    g_fn, g_norm, products = _weights(saved, g_h, g_mixes)
    full = fn, norm, out.inverse, g_mixes, along, products
    g_x, g_y, g_a, g_b, g_c = streams_backward(x, saved.pending, saved.a, g_new, g_h, full)
    if saved.pending is None:
        return g_x, None, None, None, g_a, g_fn, g_base, g_scale, g_norm
    return g_x, g_y, g_b, g_c, g_a, g_fn, g_base, g_scale, g_norm
