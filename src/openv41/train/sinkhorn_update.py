"""Momentum with Sinkhorn balancing, for token-indexed matrices. Report §2.5, Algorithm 1.

Here the two matrices that scale rows and columns are kept as vectors; the gradient is never
rewritten, so that a step needs the momentum and two vectors.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from openv41.train.processes import ALONE, Processes


class SinkhornBalanced(torch.optim.Optimizer):
    """W <- W - lr * update_rms * sqrt(columns) * balanced(Nesterov momentum), without decay.

    Rows of a parameter ``[rows, columns]`` are tokens or n-grams. One buffer is kept. A row goes on
    moving by whole steps after its last gradient, until its momentum is below ``threshold`` of the
    mean over all rows. Where ``processes`` each hold some of the rows, they exchange four numbers
    and the sums of the columns, nothing else.
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
        processes: Processes = ALONE,
    ) -> None:
        assert steps % 2 == 1, f"{steps} steps do not end on rows"
        names = {"momentum": momentum, "update_rms": update_rms, "threshold": threshold}
        super().__init__(params, {"lr": lr, "steps": steps, **names})
        self.processes = processes

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
        processes = self.processes
        live = live_rows(nesterov, group["threshold"], processes)
        scale = group["lr"] * group["update_rms"] * math.sqrt(parameter.shape[1])
        if 2 * int(live.sum()) > len(live):
            rows, columns = balance(nesterov, live, group["steps"], processes)
            parameter.addcmul_(nesterov.mul_(rows[:, None]), columns, value=-scale)
        else:  # a copy of the live rows alone costs less
            chosen = live.nonzero()[:, 0]
            part = nesterov[chosen]
            rows, columns = balance(part, live[chosen], group["steps"], processes)
            parameter.index_add_(0, chosen, part.mul_(rows[:, None]).mul_(columns), alpha=-scale)


def live_rows(
    gradient: Float[Tensor, "rows columns"], threshold: float, processes: Processes = ALONE
) -> Bool[Tensor, " rows"]:
    """Rows of a norm above ``threshold`` times the mean norm over the rows of all processes."""
    norms = (gradient / _peak(gradient, processes)).square().sum(1).sqrt()
    total = torch.stack([norms.sum(), norms.new_tensor(len(norms))])
    processes.sum_(total)
    return norms > threshold * total[0] / total[1]


def balance(
    gradient: Float[Tensor, "rows columns"],
    live: Bool[Tensor, " rows"],
    steps: int,
    processes: Processes = ALONE,
) -> tuple[Float[Tensor, " rows"], Float[Tensor, " columns"]]:
    """Scales of rows and of columns: their product with ``gradient`` has rows of norm 1.

    Odd steps bring rows to norm 1, even ones columns, over the rows of all processes. Rows that are
    not ``live`` get scale 0. A row or column of zeros keeps its scale, where the report adds 1e-20
    to a norm of 0.
    """
    peak = _peak(gradient, processes)
    square = (gradient / peak).square()
    rows = live.to(gradient.dtype)
    columns = gradient.new_ones(gradient.shape[1])
    for step in range(steps):
        if step % 2 == 0:
            rows = _divide(rows, rows * (square @ columns.square()).sqrt())
        else:
            sums = rows.square() @ square
            processes.sum_(sums)
            columns = _divide(columns, columns * sums.sqrt())
    return rows / peak, columns


def _peak(gradient: Tensor, processes: Processes) -> Tensor:
    """Largest value, by which others are divided before they are squared: small squares vanish."""
    peak = gradient.abs().amax() if len(gradient) else gradient.new_zeros(())
    processes.max_(peak)
    return peak.clamp_min(torch.finfo(gradient.dtype).tiny)


def _divide(scale: Tensor, norm: Tensor) -> Tensor:
    return scale / norm.masked_fill(norm == 0, 1)
