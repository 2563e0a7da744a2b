"""Hashed n-gram memory: row ids and the gate. Report §2.4.2."""

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from openv41.ops._dispatch import op
from openv41.ops.deterministic import elementwise
from openv41.ops.quantize import dequantize_fp8_rows

DEAD = -1  # compressed id of an image position, and of what stands before the sequence


@op
def hash_ngrams(
    recent: Int[Tensor, "T reach"],
    multipliers: Int[Tensor, " reach"],
    primes: Int[Tensor, "G Q"],
    offsets: Int[Tensor, "G Q"],
    pad_id: int,
) -> Int[Tensor, "T G*Q"]:
    """Hash the n-grams that end at each position into table rows, order-major.

    ``recent`` holds the compressed ids of positions p, p-1, ..., DEAD where there is none. A dead
    id blocks itself and everything older: they count as ``pad_id``. int64 throughout; legal ids
    cannot overflow.
    """
    blocked = (recent == DEAD).cumsum(dim=1) > 0
    terms = recent.masked_fill(blocked, pad_id) * multipliers  # [T, G+1]
    rows, mixed = [], terms[:, 0]
    for order in range(len(primes)):
        mixed = mixed ^ terms[:, order + 1]
        rows.append(mixed[:, None] % primes[order] + offsets[order])
    return torch.cat(rows, dim=1)


@op
def lookup_ngrams(  # noqa: PLR0917 -- the arguments of hash_ngrams, then the table
    recent: Int[Tensor, "T reach"],
    multipliers: Int[Tensor, " reach"],
    primes: Int[Tensor, "G Q"],
    offsets: Int[Tensor, "G Q"],
    pad_id: int,
    codes: Float[Tensor, "rows W"],
    scales: Shaped[Tensor, "rows blocks"],
    dtype: torch.dtype,
) -> Float[Tensor, "T G*Q*W"]:
    """Values of the table rows that ``hash_ngrams`` gives, joined; E4M3 codes in blocks of 32."""
    rows = hash_ngrams(recent, multipliers, primes, offsets, pad_id).flatten()
    found, scale = (
        x.view(torch.uint8).index_select(0, rows).view(x.dtype) for x in (codes, scales)
    )
    values = dequantize_fp8_rows(found, scale, dtype)
    return values.view(len(recent), primes.numel() * codes.shape[1])


@op
def engram_gate(
    x: Float[Tensor, "T N D"],
    key: Float[Tensor, "T N D"],
    q_weight: Float[Tensor, "N D"],
    k_weight: Float[Tensor, "N D"],
    eps: float,
    *,
    deterministic: bool = False,
) -> Float[Tensor, "T N"]:
    """Gate of each stream: sigmoid of the signed root of a normalised dot product.

    dot = sum_d x_d q_d k_d key_d / (rms(x) rms(key)) / sqrt(D);
    gate = sigmoid(copysign(sqrt(max(|dot|, 1e-6)), dot)), so +0 and -0 differ. At least float32.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    x, key = x.to(wide), key.to(wide)
    weight = q_weight.to(wide) * k_weight.to(wide)
    inverse = torch.rsqrt(x.square().mean(-1) + eps) * torch.rsqrt(key.square().mean(-1) + eps)
    dot = (x * weight * key).sum(-1) * inverse * x.shape[-1] ** -0.5
    root = torch.copysign(dot.abs().clamp(min=1e-6).sqrt(), dot)
    return elementwise(root, torch.sigmoid) if deterministic else root.sigmoid()


@op
def add_gated(
    x: Float[Tensor, "T N D"], gate: Float[Tensor, "T N"], value: Float[Tensor, "T D"]
) -> Float[Tensor, "T N D"]:
    """Add the same value to every stream, each through its own gate; rounded once."""
    return (x.to(gate.dtype) + gate[..., None] * value.to(gate.dtype)[:, None]).to(x.dtype)


@op
def engram_update(  # noqa: PLR0917 -- the arguments of engram_gate and add_gated
    x: Float[Tensor, "T N D"],
    key: Float[Tensor, "T N D"],
    value: Float[Tensor, "T D"],
    q_weight: Float[Tensor, "N D"],
    k_weight: Float[Tensor, "N D"],
    eps: float,
    is_image: Bool[Tensor, " T"] | None = None,
    *,
    deterministic: bool = False,
) -> Float[Tensor, "T N D"]:
    """Add the value to every stream through ``engram_gate``; image rows pass unchanged."""
    gate = engram_gate(x, key, q_weight, k_weight, eps, deterministic=deterministic)
    if is_image is not None:
        gate = gate.masked_fill(is_image[:, None], 0)
    return add_gated(x, gate, value)
