"""Sparse attention that reads packed caches: FP8 window KV, FP4 main KV. Report §2.3.1, §2.4.4."""

import torch
from jaxtyping import Complex, Float, Int, UInt8
from torch import Tensor

from openv41.ops import quantize
from openv41.ops._dispatch import op
from openv41.ops.rope import rotate
from openv41.ops.sparse_attention import plan_keys, sparse_attention


@op
def packed_sparse_attention(  # noqa: PLR0917 -- two stores with their rows
    q: Float[Tensor, "T H C"],
    window: UInt8[Tensor, "S window_bytes"],
    window_rows: Int[Tensor, "T W"],
    main: UInt8[Tensor, "M main_bytes"],
    main_rows: Int[Tensor, "T K"],
    sink: Float[Tensor, " H"],
    scale: float,
    turn: Complex[Tensor, "T pairs"] | None = None,
    *,
    deterministic: bool = False,
) -> Float[Tensor, "T H C"]:
    """``sparse_attention`` over listed rows of packed stores; -1 is none.

    A stored row is its codes followed by its scales, as the caches hold it: C + C/32 bytes of
    window KV (E4M3 codes, E8M0 scales), C/2 + C/16 bytes of main KV (E2M1 codes, two a byte, and
    E4M3 scales). The result is what the dequantised rows give, rotated by ``turn`` if there is one.
    It has no gradient.
    """
    width = q.shape[2]
    codes, scales = (part.contiguous() for part in (window[:, :width], window[:, width:]))
    window_kv = quantize.dequantize_fp8(
        codes.view(torch.float8_e4m3fn), scales.view(torch.float8_e8m0fnu), q.dtype
    )
    codes, scales = main[:, : width // 2], main[:, width // 2 :].contiguous()
    main_kv = quantize.dequantize_fp4_e4m3(codes, scales.view(torch.float8_e4m3fn), q.dtype)
    near, far = (plan_keys(r, deterministic=deterministic) for r in (window_rows, main_rows))
    with torch.no_grad():
        out = sparse_attention.reference(
            q, window_kv, near, main_kv, far, sink, scale, deterministic=deterministic
        )
        return out if turn is None else rotate(out, turn, deterministic=deterministic)
