"""Momentum with Sinkhorn balancing, for token-indexed matrices. Report §2.5, Algorithm 1.

Here the two matrices that scale rows and columns are kept as vectors; the gradient is never
rewritten, so that a step needs the momentum and two vectors.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn


class SinkhornBalanced(torch.optim.Optimizer):
    """W <- W - lr * update_rms * sqrt(columns) * balanced(Nesterov momentum), without decay.

    Rows of a parameter ``[rows, columns]`` are tokens or n-grams. One buffer is kept. A row goes on
    moving by whole steps after its last gradient, until its momentum is below ``threshold`` of the
    mean over all rows.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        *,
        lr: float = 1e-3,
        momentum: float = 0.95,
        update_rms: float = 0.18,
        steps: int = 11,
        threshold: float = 1e-3,
    ) -> None:
        assert steps % 2 == 1, f"{steps} steps do not end on rows"
        names = {"momentum": momentum, "update_rms": update_rms, "threshold": threshold}
        super().__init__(params, {"lr": lr, "steps": steps, **names})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None, "SinkhornBalanced takes no closure"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        state, beta = self.state[parameter], group["momentum"]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        momentum = state["momentum"].lerp_(gradient, 1 - beta)
        nesterov = torch.lerp(gradient, momentum, beta)
        rows, columns = balance(nesterov, group["steps"], group["threshold"])
        scale = group["lr"] * group["update_rms"] * math.sqrt(parameter.shape[1])
        parameter.addcmul_(nesterov.mul_(rows[:, None]), columns, value=-scale)


def balance(
    gradient: Float[Tensor, "rows columns"], steps: int, threshold: float
) -> tuple[Float[Tensor, " rows"], Float[Tensor, " columns"]]:
    """Scales of rows and of columns: their product with ``gradient`` has rows of norm 1.

    Odd steps bring rows to norm 1, even ones columns. Rows of a norm of at most ``threshold``
    times the mean norm get scale 0. A row or column of zeros keeps its scale, where the report adds
    1e-20 to a norm of 0.
    """
    peak = gradient.abs().amax().clamp_min(torch.finfo(gradient.dtype).tiny)
    square = (gradient / peak).square()  # of values near 1, since small ones vanish when squared
    norms = square.sum(1).sqrt()
    live = norms > threshold * norms.mean()
    rows = live.to(gradient.dtype)
    columns = torch.ones_like(gradient[0])
    for step in range(steps):
        if step % 2 == 0:
            rows = _divide(rows, rows * (square @ columns.square()).sqrt())
        else:
            columns = _divide(columns, columns * (rows.square() @ square).sqrt())
    return rows / peak, columns


def _divide(scale: Tensor, norm: Tensor) -> Tensor:
    return scale / norm.masked_fill(norm == 0, 1)
