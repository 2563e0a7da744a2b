"""A plain table of vectors. Report §2.4.3."""

from typing import Unpack

import torch
from torch import nn

from openv41.layers.factory import Factory


class Embedding(nn.Module):
    """A plain [V, D] weight: the token embedding, and the drafter's for previous tokens."""

    def __init__(
        self,
        num: int,
        dim: int,
        **made: Unpack[Factory],
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num, dim, **made))
