"""RMS normalisation. Report §2.3."""

import torch
from jaxtyping import Float
from torch import Tensor

from openv41.ops._dispatch import op
from openv41.ops.precision import cast, widened


@op
def rms_norm(x: Float[Tensor, "... D"], weight: Float[Tensor, " D"], eps: float) -> Tensor:
    """Divide each row by its root mean square, then scale: x / sqrt(mean(x^2) + eps) * weight.

    Computed in at least float32 with one rounding, to the dtype of ``x``. eps is 1e-20 in the
    language model, which float16 would flush to zero.
    """
    wide = widened(x)
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return cast(wide * inverse * cast(weight, wide.dtype), x.dtype)
