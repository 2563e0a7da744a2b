"""Muon and head-wise Muon: momentum, orthogonalised block by block. Report §2.5."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from openv41.train.newton_schulz import newton_schulz

VALUES_AT_ONCE = 1 << 26  # of the blocks that are orthogonalised together
_Member = tuple[nn.Parameter, dict[str, Any]]  # with its group


class Muon(torch.optim.Optimizer):
    """W <- W (1 - lr * weight_decay) - lr * update, with an update of RMS ``update_rms``.

    M <- momentum * M + G; the update is newton_schulz(momentum * M + G) * sqrt(max(rows, columns))
    * update_rms. A parameter is one matrix, a batch of them ``[experts, rows, columns]``, or has
    its rows cut into ``blocks`` equal blocks (heads) that are matrices of their own; rows and
    columns are those of a block. Blocks with a side below ``float32_below``, and batches, whose
    gradients have no full rank, are orthogonalised in float32, all others in ``dtype``.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        *,
        lr: float = 1e-3,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        update_rms: float = 0.18,
        blocks: int = 1,
        dtype: torch.dtype = torch.float32,
        float32_below: int = 512,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "weight_decay": weight_decay,
                "update_rms": update_rms,
                "blocks": blocks,
            },
        )
        self.dtype, self.float32_below = dtype, float32_below
        for group in self.param_groups:
            for parameter in group["params"]:
                as_blocks(parameter, group["blocks"])

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None, "Muon takes no closure"
        alike: dict[tuple[torch.Size, torch.dtype, torch.device], list[_Member]] = defaultdict(list)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    blocks = as_blocks(parameter, group["blocks"])
                    key = blocks.shape[-2:], self._dtype(parameter, blocks), parameter.device
                    alike[key].append((parameter, group))
        for (_, dtype, _), members in alike.items():
            for some in _chunks(members):
                parts = [_Part(p, group, self.state[p]) for p, group in some]
                together = newton_schulz(torch.cat([part.nesterov for part in parts]), dtype)
                counts = [len(part.nesterov) for part in parts]
                for part, update in zip(parts, together.split(counts), strict=True):
                    part.apply(update)

    def _dtype(self, parameter: Tensor, blocks: Tensor) -> torch.dtype:
        small = min(blocks.shape[-2:]) < self.float32_below
        return torch.float32 if small or parameter.ndim > 2 else self.dtype


class _Part:
    """A parameter in the step at hand: its Nesterov gradient in blocks, and its update."""

    def __init__(
        self, parameter: nn.Parameter, group: dict[str, Any], state: dict[str, Tensor]
    ) -> None:
        assert parameter.grad is not None, "a part needs a gradient"
        self.parameter, self.group = parameter, group
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter.grad)
        momentum = state["momentum"].mul_(group["momentum"]).add_(parameter.grad)
        nesterov = parameter.grad.add(momentum, alpha=group["momentum"])
        self.nesterov = as_blocks(nesterov, group["blocks"])

    def apply(self, update: Float[Tensor, "blocks rows columns"]) -> None:
        """Decay the parameter and move it against ``update``."""
        lr, group = self.group["lr"], self.group
        scale = group["update_rms"] * math.sqrt(max(update.shape[-2:]))
        self.parameter.mul_(1 - lr * group["weight_decay"])
        self.parameter.add_(update.view_as(self.parameter), alpha=-lr * scale)


def as_blocks(
    matrix: Float[Tensor, "*batch rows columns"], blocks: int
) -> Float[Tensor, "all_blocks block_rows columns"]:
    """View of a matrix or batch as the matrices that Muon sees."""
    rows, columns = matrix.shape[-2:]
    assert rows % blocks == 0, f"{rows} rows do not split into {blocks} heads"
    assert blocks == 1 or matrix.ndim == 2, f"a batch {tuple(matrix.shape)} has no heads"
    assert min(rows // blocks, columns) > 1, f"blocks of {rows // blocks} x {columns} are vectors"
    return matrix.reshape(-1, rows // blocks, columns)


def _chunks(members: list[_Member]) -> Iterator[list[_Member]]:
    """Consecutive parameters of at most ``VALUES_AT_ONCE`` values together, or one parameter."""
    some: list[_Member] = []
    count = 0
    for member in members:
        if some and count + member[0].numel() > VALUES_AT_ONCE:
            yield some
            some, count = [], 0
        some.append(member)
        count += member[0].numel()
    yield some
