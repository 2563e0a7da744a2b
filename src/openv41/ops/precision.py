"""Changes of precision that cost nothing where nothing changes.

``Tensor.to`` is a call even then, and a decode step would make hundreds of them.
"""

import torch
from torch import Tensor

WIDE = (torch.float32, torch.float64)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in this dtype, itself if it has it."""
    return x if x.dtype == dtype else x.to(dtype)


def widened(x: Tensor) -> Tensor:
    """The tensor in at least float32."""
    return x if x.dtype in WIDE else x.to(torch.promote_types(x.dtype, torch.float32))
