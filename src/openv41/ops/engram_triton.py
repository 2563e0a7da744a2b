"""The kernels of Engram: hash, gather and dequantise; the gated update and its gradients.

8192 tokens look up 24 rows of 264 bytes each and write them as bf16: 152 MB, 35 us at 4.3 TB/s. The
update reads and writes the streams once, (3 N + 1) D values a token: 1.09 GB, 254 us for N = 4 and
D = 5120; its backward reads keys and streams a second time for the weights' gradients, (7 N + 2) D,
585 us; ``engram_cuda``, a variant for many tokens, reads them once. All sums have one order.
Report §2.4.2.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from openv41.ops import engram_cuda
from openv41.ops._dispatch import kernel, wants_gradient
from openv41.ops.engram import DEAD

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDEST = 8192  # channels that a program holds
MANY = 4096  # tokens from which half the warps of a program of the update are faster
SPLITS = 32  # parts of the tokens whose weights' gradients are summed at the end
NO_ID: tl.constexpr = tl.constexpr(DEAD)
LEAST_DOT: tl.constexpr = tl.constexpr(1e-6)


@triton.jit
@no_type_check
def _hash(recent, multipliers, primes, offsets, token, pad_id, lookup, L, Q, REACH: tl.constexpr):
    """Table rows of a token's lookups."""
    mixed = tl.zeros(lookup.shape, tl.int64)
    is_blocked = token < 0
    for shift in tl.static_range(REACH):
        recent_id = tl.load(recent + token * REACH + shift)
        is_blocked = is_blocked | (recent_id == NO_ID)
        term = tl.where(is_blocked, pad_id, recent_id) * tl.load(multipliers + shift)
        mixed = mixed ^ tl.where(lookup // Q + 1 >= shift, term, 0)
    prime = tl.load(primes + lookup, mask=lookup < L, other=1)
    return mixed % prime + tl.load(offsets + lookup, mask=lookup < L, other=0)


@triton.jit
@no_type_check
def _hash_ngrams(
    recent,
    multipliers,
    primes,
    offsets,
    out,
    pad_id,
    L,
    Q,
    REACH: tl.constexpr,
    LOOKUPS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    lookup = tl.arange(0, LOOKUPS)
    row = _hash(recent, multipliers, primes, offsets, token, pad_id, lookup, L, Q, REACH)
    tl.store(out + token * L + lookup, row, mask=lookup < L)


@triton.jit
@no_type_check
def _lookup(
    recent,
    multipliers,
    primes,
    offsets,
    codes,
    scales,
    out,
    pad_id,
    L,
    Q,
    W,
    REACH: tl.constexpr,
    LOOKUPS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    lookup = tl.arange(0, LOOKUPS)
    row = _hash(recent, multipliers, primes, offsets, token, pad_id, lookup, L, Q, REACH)
    column = tl.arange(0, BLOCKS * 32)
    block = tl.arange(0, BLOCKS)
    there = (lookup < L)[:, None]
    code = tl.load(
        codes + row[:, None] * W + column[None, :], mask=there & (column < W)[None, :], other=0
    )
    blocks = W // 32
    byte = tl.load(
        scales + row[:, None] * blocks + block[None, :],
        mask=there & (block < blocks)[None, :],
        other=0,
    ).to(tl.int32)
    bits = tl.where(byte == 0, 1 << 22, byte << 23)  # the least power of two is subnormal
    scale = tl.where(byte == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)
    scale = tl.reshape(
        tl.broadcast_to(scale[:, :, None], LOOKUPS, BLOCKS, 32), LOOKUPS, BLOCKS * 32
    )
    value = code.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale
    to = out + (token * L + lookup)[:, None] * W + column[None, :]
    tl.store(to, value.to(out.dtype.element_ty), mask=there & (column < W)[None, :])


@triton.jit
@no_type_check
def _dot(x, key, weight, eps, D):
    """What the gate is made of: the product and both inverse norms."""
    x_inverse = tl.rsqrt(tl.sum(x * x, 0) / D + eps)
    key_inverse = tl.rsqrt(tl.sum(key * key, 0) / D + eps)
    dot = tl.sum(x * weight * key, 0) * (x_inverse * key_inverse) * tl.rsqrt(D * 1.0)
    return dot, x_inverse, key_inverse


@triton.jit
@no_type_check
def _gate_of(dot):
    """Sigmoid of the signed root; the sign bit decides at zero."""
    root = tl.sqrt(tl.maximum(tl.abs(dot), LEAST_DOT))
    is_negative = dot.to(tl.int32, bitcast=True) < 0
    return 1 / (1 + tl.exp(tl.where(is_negative, root, -root)))


@triton.jit
@no_type_check
def _update(
    x,
    key,
    value,
    q_weight,
    k_weight,
    is_image,
    out,
    gates,
    T,
    N,
    D,
    key_stride,
    value_stride,
    eps,
    HAS_IMAGE: tl.constexpr,
    ADDS: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    stream = tl.program_id(0) % N
    first = (tl.program_id(0) // N).to(tl.int64) * TOKENS
    column = tl.arange(0, WIDTH)
    there = column < D
    of_stream = stream * D + column
    weight = tl.load(q_weight + of_stream, mask=there, other=0.0).to(tl.float32)
    weight *= tl.load(k_weight + of_stream, mask=there, other=0.0).to(tl.float32)
    for number in range(TOKENS):
        token = first + number
        inside = there & (token < T)
        at = token * N * D + of_stream
        row = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        own = tl.load(key + token * key_stride + of_stream, mask=inside, other=0.0).to(tl.float32)
        dot, _, _ = _dot(row, own, weight, eps, D)
        gate = _gate_of(dot)
        if HAS_IMAGE:
            shown = tl.load(is_image + token, mask=token < T, other=0)
            gate = tl.where(shown != 0, 0.0, gate)
        tl.store(gates + token * N + stream, gate, mask=token < T)
        if ADDS:
            more = tl.load(value + token * value_stride + column, mask=inside, other=0.0)
            row += gate * more.to(tl.float32)
            tl.store(out + at, row.to(out.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def _add(x, gate, value, out, N, D, value_stride, WIDTH: tl.constexpr):
    stream = tl.program_id(0) % N
    token = (tl.program_id(0) // N).to(tl.int64)
    column = tl.arange(0, WIDTH)
    at = (token * N + stream) * D + column
    row = tl.load(x + at, mask=column < D, other=0.0).to(tl.float32)
    more = tl.load(value + token * value_stride + column, mask=column < D, other=0.0)
    row += tl.load(gate + token * N + stream).to(tl.float32) * more.to(tl.float32)
    tl.store(out + at, row.to(out.dtype.element_ty), mask=column < D)


@triton.jit
@no_type_check
def _backward(
    grad,
    x,
    key,
    value,
    q_weight,
    k_weight,
    is_image,
    to_x,
    to_key,
    to_value,
    shares,
    N,
    D,
    key_stride,
    value_stride,
    eps,
    HAS_IMAGE: tl.constexpr,
    STREAMS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    there = column < D
    more = tl.load(value + token * value_stride + column, mask=there, other=0.0).to(tl.float32)
    sum_value = tl.zeros((WIDTH,), tl.float32)
    passes = 1.0
    if HAS_IMAGE:
        passes = tl.where(tl.load(is_image + token) != 0, 0.0, 1.0)
    for stream in range(STREAMS):
        of_stream = stream * D + column
        at = token * N * D + of_stream
        weight = tl.load(q_weight + of_stream, mask=there, other=0.0).to(tl.float32)
        weight *= tl.load(k_weight + of_stream, mask=there, other=0.0).to(tl.float32)
        row = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
        own = tl.load(key + token * key_stride + of_stream, mask=there, other=0.0).to(tl.float32)
        given = tl.load(grad + at, mask=there, other=0.0).to(tl.float32)
        dot, x_inverse, key_inverse = _dot(row, own, weight, eps, D)
        gate = _gate_of(dot)
        sum_value += (gate * passes) * given
        to_root = tl.sum(given * more, 0) * gate * (1 - gate) * passes
        size = tl.abs(dot)
        to_dot = tl.where(
            size >= LEAST_DOT, to_root / (2 * tl.sqrt(tl.maximum(size, LEAST_DOT))), 0.0
        )
        share = to_dot * x_inverse * key_inverse * tl.rsqrt(D * 1.0)
        tl.store(shares + token * N + stream, share)
        by_x = given + share * weight * own - (to_dot * dot * x_inverse * x_inverse / D) * row
        tl.store(to_x + at, by_x.to(to_x.dtype.element_ty), mask=there)
        by_key = share * weight * row - (to_dot * dot * key_inverse * key_inverse / D) * own
        tl.store(to_key + at, by_key.to(to_key.dtype.element_ty), mask=there)
    tl.store(to_value + token * D + column, sum_value.to(to_value.dtype.element_ty), mask=there)


@triton.jit
@no_type_check
def _weight_sums(
    x, key, shares, partial, T, N, D, key_stride, steps, TOKENS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Sum of share x key over a part of the tokens."""
    stream, split = tl.program_id(1), tl.program_id(2)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    of_stream = stream * D + column
    total = tl.zeros((COLUMNS,), tl.float32)
    step = 0
    while step < steps:
        token = ((split * steps + step) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
        inside = (token < T)[:, None] & (column < D)[None, :]
        row = tl.load(x + token[:, None] * N * D + of_stream[None, :], mask=inside, other=0.0)
        own = tl.load(
            key + token[:, None] * key_stride + of_stream[None, :], mask=inside, other=0.0
        )
        share = tl.load(shares + token * N + stream, mask=token < T, other=0.0)
        total += tl.sum(share[:, None] * row.to(tl.float32) * own.to(tl.float32), 0)
        step += 1
    tl.store(partial + (split * N + stream) * D + column, total, mask=column < D)


def _refuse_hash(recent, multipliers, primes, offsets, pad_id, *_) -> str | None:
    """Say what the hashing kernels cannot take."""
    if recent.dtype != torch.int64 or primes.numel() > 256:
        return f"ids are {recent.dtype}, and there are {primes.numel()} lookups"
    return None


@kernel(refuse=_refuse_hash)
def hash_ngrams(
    recent: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor, pad_id: int
) -> Tensor:
    """A program for each token."""
    out = torch.empty(len(recent), primes.numel(), dtype=torch.int64, device=recent.device)
    if out.numel():
        inputs = (x.contiguous() for x in (recent, multipliers, primes, offsets))
        _hash_ngrams[(len(recent),)](
            *(*inputs, out, pad_id, primes.numel(), primes.shape[1]),
            REACH=recent.shape[1],
            LOOKUPS=triton.next_power_of_2(primes.numel()),
            num_warps=1,
        )
    return out


def _refuse_lookup(
    recent, multipliers, primes, offsets, pad_id, codes, scales, dtype
) -> str | None:
    """Say what the lookup kernel cannot take."""
    if codes.dtype != torch.float8_e4m3fn or codes.shape[1] % 32 or codes.shape[1] > 1024:
        return f"the table holds {codes.shape[1]} numbers a row, {codes.dtype}"
    if dtype not in DTYPES:
        return f"values are wanted as {dtype}"
    if not (codes.is_contiguous() and scales.is_contiguous()):
        return "the table is not contiguous"
    return _refuse_hash(recent, multipliers, primes, offsets, pad_id)


@kernel(refuse=_refuse_lookup)
@torch.no_grad()
def lookup_ngrams(
    recent: Tensor,
    multipliers: Tensor,
    primes: Tensor,
    offsets: Tensor,
    pad_id: int,
    codes: Tensor,
    scales: Tensor,
    dtype: torch.dtype,
    *,
    warps: int = 4,
) -> Tensor:
    """A program for each token hashes, reads all its rows and writes their values."""
    lookups, width = primes.numel(), codes.shape[1]
    out = torch.empty(len(recent), lookups * width, dtype=dtype, device=codes.device)
    if out.numel():
        inputs = (x.contiguous() for x in (recent, multipliers, primes, offsets))
        tables = codes.view(torch.uint8), scales.view(torch.uint8)
        _lookup[(len(recent),)](
            *(*inputs, *tables, out, pad_id, lookups, primes.shape[1], width),
            REACH=recent.shape[1],
            LOOKUPS=triton.next_power_of_2(lookups),
            BLOCKS=triton.next_power_of_2(width // 32),
            num_warps=warps,
        )
    return out


def _refuse_gate(x, key, *others, deterministic=False, **_) -> str | None:
    """Say what the gating kernels cannot take."""
    if deterministic:
        return "the deterministic mode has its own sigmoid"
    tensors = [t for t in (x, key, *others) if isinstance(t, Tensor) and t.is_floating_point()]
    if any(t.dtype not in DTYPES for t in tensors):
        return f"streams and keys are {x.dtype} and {key.dtype}"
    if x.shape[2] > WIDEST:
        return f"a stream has {x.shape[2]} channels, more than {WIDEST}"
    return None


@kernel(refuse=_refuse_gate)
@torch.no_grad()
def engram_gate(
    x: Tensor,
    key: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    *,
    deterministic: bool = False,
) -> Tensor:
    """The gate alone."""
    gates = forward((x, key, x, q_weight, k_weight, None), eps, adds=False)[1]
    assert gates is not None, "the gates are asked for"
    return gates


@kernel(refuse=lambda x, gate, value: _refuse_gate(x, value, gate))
@torch.no_grad()
def add_gated(x: Tensor, gate: Tensor, value: Tensor) -> Tensor:
    """A program for each stream of each token."""
    x, value = x.contiguous(), _rows(value)
    tokens, num, dim = x.shape
    out = torch.empty_like(x)
    if out.numel():
        width = triton.next_power_of_2(dim)
        _add[(tokens * num,)](
            *(x, gate.contiguous(), value, out, num, dim, value.stride(0)),
            WIDTH=width,
            num_warps=_warps(width),
        )
    return out


@kernel(refuse=_refuse_gate, has_backward=True)
def engram_update(
    x: Tensor,
    key: Tensor,
    value: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    is_image: Tensor | None = None,
    *,
    deterministic: bool = False,
) -> Tensor:
    """Gate and add in one pass over the streams."""
    if wants_gradient(x, key, value, q_weight, k_weight):
        out: Tensor = _EngramUpdate.apply(x, key, value, q_weight, k_weight, is_image, eps)
        return out
    return forward((x, key, value, q_weight, k_weight, is_image), eps)[0]


def forward(
    given: tuple[Tensor | None, ...],
    eps: float,
    *,
    adds: bool = True,
    tokens_at_once: int | None = None,
    warps: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Streams and gates; without ``adds`` the gates alone, in CUDA C++ the streams alone."""
    x, key, value, q_weight, k_weight, is_image = ready = _ready(given)
    tokens, num, dim = x.shape
    if adds and tokens_at_once is None and engram_cuda.fits(ready):
        return engram_cuda.forward(ready, eps), None
    gates = torch.empty(tokens, num, dtype=torch.float32, device=x.device)
    out = torch.empty_like(x) if adds else x
    if gates.numel():
        width = triton.next_power_of_2(dim)
        group = tokens_at_once or 1
        _update[(triton.cdiv(tokens, group) * num,)](
            *(x, key, value, q_weight, k_weight, is_image, out, gates),
            *(tokens, num, dim, key.stride(0), value.stride(0), eps),
            HAS_IMAGE=is_image is not None,
            ADDS=adds,
            TOKENS=group,
            WIDTH=width,
            num_warps=warps or max(1, _warps(width) // (2 if adds and tokens >= MANY else 1)),
        )
    return out, gates


def backward(
    given: tuple[Tensor | None, ...], grad: Tensor, eps: float, *, warps: int | None = None
) -> tuple[Tensor, ...]:
    """Gradients of streams, keys, values and both weights, each in its tensor's dtype."""
    ready, grad = _ready(given), grad.contiguous()
    if warps is None and engram_cuda.fits(ready, grad):
        to_x, to_key, to_value, partial = engram_cuda.backward(ready, grad, eps)
    else:
        to_x, to_key, to_value, partial = _gradients(ready, grad, eps, warps)
    _, _, _, q_weight, k_weight, _ = ready
    both = partial.sum(dim=0)
    to_q = (both * k_weight).to(q_weight.dtype)
    return to_x, to_key, to_value, to_q, (both * q_weight).to(k_weight.dtype)


def _gradients(
    ready: tuple[Any, ...], grad: Tensor, eps: float, warps: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, key, value, q_weight, k_weight, is_image = ready
    tokens, num, dim = x.shape
    to_x = torch.empty_like(x)
    to_key = torch.empty(tokens, num, dim, dtype=key.dtype, device=x.device)
    to_value = torch.empty(tokens, dim, dtype=value.dtype, device=x.device)
    shares = torch.empty(tokens, num, dtype=torch.float32, device=x.device)
    partial = torch.zeros(SPLITS, num, dim, dtype=torch.float32, device=x.device)
    if x.numel():
        width = triton.next_power_of_2(dim)
        _backward[(tokens,)](
            *(grad, x, key, value, q_weight, k_weight, is_image),
            *(to_x, to_key, to_value, shares, num, dim, key.stride(0), value.stride(0), eps),
            HAS_IMAGE=is_image is not None,
            STREAMS=num,
            WIDTH=width,
            num_warps=warps or 2 * _warps(width),
        )
        columns = min(256, width)
        _weight_sums[(triton.cdiv(dim, columns), num, SPLITS)](
            *(x, key, shares, partial, tokens, num, dim, key.stride(0)),
            triton.cdiv(tokens, SPLITS * 8),
            TOKENS=8,
            COLUMNS=columns,
        )
    return to_x, to_key, to_value, partial


class _EngramUpdate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs) -> Tensor:
        ctx.save_for_backward(*inputs[:-1])
        ctx.eps = inputs[-1]
        return forward(inputs[:-1], ctx.eps)[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad) -> tuple[Tensor | None, ...]:
        return (*backward(ctx.saved_tensors, grad, ctx.eps), None, None)


def _ready(given: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
    x, key, value, q_weight, k_weight, is_image = given
    dense = (t if t is None else t.contiguous() for t in (q_weight, k_weight, is_image))
    assert x is not None and key is not None and value is not None, "an input is missing"  # noqa: PT018
    return x.contiguous(), _rows(key), _rows(value), *dense


def _rows(x: Tensor) -> Tensor:
    """The tensor, each of whose rows is contiguous."""
    return x if x[:1].is_contiguous() else x.contiguous()


def _warps(width: int) -> int:
    return max(1, min(8, width // 512))
