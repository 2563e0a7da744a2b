"""Orthogonalisation by the hybrid Newton-Schulz iteration, for Muon. Report §2.5."""

import torch
from jaxtyping import Float
from torch import Tensor

FAST, EXACT = (3.4445, -4.7750, 2.0315), (2.0, -1.5, 0.5)
COEFFICIENTS = (*[FAST] * 8, *[EXACT] * 2)  # of x, x^3 and x^5 on each singular value


def newton_schulz(
    matrices: Float[Tensor, "*batch rows columns"], dtype: torch.dtype = torch.float32
) -> Float[Tensor, "*batch rows columns"]:
    """U V^T of each matrix U S V^T: eight fast steps, then two that bring each value to 1.

    Directions whose singular value is far below 1e-4 of the norm stay near zero in float32. In
    bfloat16 their rounding noise is lifted to 1 as well: choose it for large matrices of full rank
    only. A zero matrix stays zero. Runs in ``dtype``, or in float64 where that is the input's.
    """
    rows, columns = matrices.shape[-2:]
    x: Tensor = matrices if matrices.dtype == torch.float64 else matrices.to(dtype)
    if rows > columns:
        x = x.mT
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.float64)
    norm = norm.to(torch.promote_types(x.dtype, torch.float32))
    x = (x / norm.clamp_min(torch.finfo(norm.dtype).tiny)).to(x.dtype)
    x = x.reshape(-1, *x.shape[-2:])
    for first, third, fifth in COEFFICIENTS:
        square = torch.bmm(x, x.mT)
        both = torch.baddbmm(square, square, square, beta=third, alpha=fifth)
        x = torch.baddbmm(x, both, x, beta=first)
    x = x.mT if rows > columns else x
    return x.reshape(matrices.shape).to(matrices.dtype)
