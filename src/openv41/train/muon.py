"""Muon and head-wise Muon: momentum, orthogonalised block by block. Report §2.5."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from openv41.train.newton_schulz import newton_schulz
from openv41.train.owners import Owners
from openv41.train.processes import Processes

VALUES_AT_ONCE = 1 << 26  # of the blocks that are orthogonalised together
_Member = tuple[nn.Parameter, dict[str, Any]]  # with its group


class Shared(NamedTuple):
    """Whole shapes of parameters of which each process holds some rows."""

    processes: Processes
    shapes: Mapping[nn.Parameter, torch.Size]


ALONE = Shared(Processes(), {})


class Muon(torch.optim.Optimizer):
    """W <- W (1 - lr * weight_decay) - lr * update, with an update of RMS ``update_rms``.

    M <- momentum * M + G; the update is newton_schulz(momentum * M + G) * sqrt(max(rows, columns))
    * update_rms. A parameter is one matrix, a batch of them ``[experts, rows, columns]``, or has
    its rows cut into ``blocks`` equal blocks (heads) that are matrices of their own; rows and
    columns are those of a block. Blocks with a side below ``float32_below``, and batches, whose
    gradients have no full rank, are orthogonalised in float32, all others in ``dtype``.

    Where ``processes`` each hold some of the rows of a parameter, ``shapes`` says of which whole.
    Blocks that no process border cuts stay where they are; every other matrix goes to an owner.
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
        shared: Shared = ALONE,
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
        self.dtype, self.float32_below, self.shared = dtype, float32_below, shared
        for group in self.param_groups:
            for parameter in group["params"]:
                block_shape(self._shape(parameter), group["blocks"])

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None, "Muon takes no closure"
        alike: dict[tuple[torch.Size, torch.dtype, torch.device], list[_Member]] = defaultdict(list)
        cut: list[_Member] = []
        for group in self.param_groups:
            for parameter in group["params"]:
                shape = block_shape(self._shape(parameter), group["blocks"])
                if parameter.grad is None:
                    continue
                if self._is_cut(parameter, shape):
                    cut.append((parameter, group))
                else:
                    key = shape, self._dtype(parameter, shape), parameter.device
                    alike[key].append((parameter, group))
        for (shape, dtype, _), members in alike.items():
            for some in _chunks([(member, member[0].numel()) for member in members]):
                parts = [_Part(p, group, self.state[p], shape) for p, group in some]
                together = newton_schulz(torch.cat([part.blocks() for part in parts]), dtype)
                counts = [len(part.blocks()) for part in parts]
                for part, update in zip(parts, together.split(counts), strict=True):
                    part.apply(update)
        for some in _chunks([(member, self._share(member[0])) for member in cut]):
            self._update_cut(some)

    def _update_cut(self, members: list[_Member]) -> None:
        """Update parameters whose blocks lie in several processes."""
        shapes = [self._shape(parameter) for parameter, _ in members]
        blocks = [
            block_shape(shape, g["blocks"]) for shape, (_, g) in zip(shapes, members, strict=True)
        ]
        parts = [
            _Part(p, group, self.state[p], shape)
            for (p, group), shape in zip(members, blocks, strict=True)
        ]
        owners = Owners(self.shared.processes, shapes, members[0][0].dtype)
        whole = owners.collect([part.nesterov for part in parts])
        updates = {
            index: newton_schulz(
                matrix.view(-1, *blocks[index]), self._dtype(matrix, blocks[index])
            ).view_as(matrix)
            for index, matrix in whole.items()
        }
        for part, update in zip(parts, owners.give_back(updates), strict=True):
            part.apply(update)

    def _share(self, parameter: nn.Parameter) -> int:
        """Values of a cut parameter for one process, the same number in all of them."""
        return self._shape(parameter).numel() // self.shared.processes.size

    def _shape(self, parameter: nn.Parameter) -> torch.Size:
        """Shape of the whole that a parameter has rows of."""
        return self.shared.shapes.get(parameter, parameter.shape)

    def _is_cut(self, parameter: nn.Parameter, block: torch.Size) -> bool:
        """Whether a border between processes runs through a block; batches hold whole matrices."""
        rows = self._shape(parameter)[0]
        _, each = self.shared.processes.rows_of(0, rows)
        is_split = parameter in self.shared.shapes and parameter.ndim == 2
        return is_split and each < rows and each % block[0] > 0

    def _dtype(self, parameter: Tensor, block: torch.Size) -> torch.dtype:
        small = min(block) < self.float32_below
        return torch.float32 if small or parameter.ndim > 2 else self.dtype


class _Part:
    """A parameter in the step at hand: its Nesterov gradient, and its update."""

    def __init__(
        self,
        parameter: nn.Parameter,
        group: dict[str, Any],
        state: dict[str, Tensor],
        block: torch.Size,
    ) -> None:
        self.parameter, self.group, self.block = parameter, group, block
        gradient = parameter.grad
        assert gradient is not None, "a part needs a gradient"
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(gradient)
        momentum = state["momentum"].mul_(group["momentum"]).add_(gradient)
        self.nesterov = gradient.add(momentum, alpha=group["momentum"])

    def blocks(self) -> Float[Tensor, "blocks rows columns"]:
        """The gradient as the matrices that Muon sees."""
        return self.nesterov.view(-1, *self.block)

    def apply(self, update: Float[Tensor, "... rows columns"]) -> None:
        """Decay the parameter and move it against ``update``."""
        lr, group = self.group["lr"], self.group
        scale = group["update_rms"] * math.sqrt(max(self.block))
        self.parameter.mul_(1 - lr * group["weight_decay"])
        self.parameter.add_(update.view_as(self.parameter), alpha=-lr * scale)


def block_shape(shape: torch.Size, blocks: int) -> torch.Size:
    """Rows and columns of the matrices that Muon sees in a matrix or batch of this shape."""
    rows, columns = shape[-2:]
    assert rows % blocks == 0, f"{rows} rows do not split into {blocks} heads"
    assert blocks == 1 or len(shape) == 2, f"a batch {tuple(shape)} has no heads"
    assert min(rows // blocks, columns) > 1, f"blocks of {rows // blocks} x {columns} are vectors"
    return torch.Size((rows // blocks, columns))


def _chunks(members: list[tuple[_Member, int]]) -> Iterator[list[_Member]]:
    """Consecutive parameters of at most ``VALUES_AT_ONCE`` values together, or one parameter."""
    some: list[_Member] = []
    total = 0
    for member, count in members:
        if some and total + count > VALUES_AT_ONCE:
            yield some
            some, total = [], 0
        some.append(member)
        total += count
    if some:
        yield some
