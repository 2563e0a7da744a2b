"""How parameters are made: on which device and in which dtype."""

from typing import TypedDict

import torch


class Factory(TypedDict, total=False):
    """Keyword arguments that a module hands down to its parts."""

    device: torch.device | str | None
    dtype: torch.dtype | None
