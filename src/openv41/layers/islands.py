"""Parameters that stay at least float32 whatever the model is cast to. Report §2.4.1."""

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from openv41.layers.factory import Factory


def island(made: Factory) -> Factory:
    """Make an island of a module that is made like this: at least float32."""
    dtype = made.get("dtype") or torch.get_default_dtype()
    return {"device": made.get("device"), "dtype": torch.promote_types(dtype, torch.float32)}


class Float32Islands(nn.Module):
    """A module whose own parameters named in ``islands`` refuse to become narrower."""

    islands: ClassVar[tuple[str, ...]] = ()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Float32Islands":
        kept = {name: getattr(self, name).data for name in self.islands}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, before in kept.items():
            after = getattr(self, name)
            if after.dtype.itemsize < 4:
                after.data = before.to(after.device)
        return self
