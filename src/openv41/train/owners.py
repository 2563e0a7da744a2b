"""Whole matrices out of rows that processes share: each matrix has an owner. Report §2.5.

Rows go to the owner and come back in one all-to-all each, so that an update that needs the whole
matrix is computed once, and never on a part.
"""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from openv41.train.processes import Processes


class Owners:
    """Owners of some matrices ``[rows, columns]`` of one step, of which each process has rows.

    The cost of a matrix is that of orthogonalising it; the costliest go first, each to the process
    with the least to do.
    """

    def __init__(
        self, processes: Processes, shapes: Sequence[torch.Size], dtype: torch.dtype
    ) -> None:
        self.processes, self.shapes, self.dtype = processes, shapes, dtype
        self.owner = [0] * len(shapes)
        load = [0] * processes.size
        for index in sorted(range(len(shapes)), key=lambda i: (-_cost(shapes[i]), i)):
            owner = load.index(min(load))
            self.owner[index] = owner
            load[owner] += _cost(shapes[index])

    def collect(self, rows: Sequence[Float[Tensor, "rows columns"]]) -> dict[int, Tensor]:
        """Give the rows of this process of every matrix; returns the whole ones it owns."""
        sizes = self._sizes()
        got = self._exchange([part.flatten() for part in rows], *sizes)
        parts = got.split([count for by_matrix in sizes[1] for count in by_matrix])
        owned = self._owned(self.processes.rank)
        return {
            index: torch.cat(parts[place :: len(owned)]).view(self.shapes[index])
            for place, index in enumerate(owned)
        }

    def give_back(self, owned: Mapping[int, Float[Tensor, "rows columns"]]) -> list[Tensor]:
        """Give the whole matrices that this process owns; returns its rows of every one."""
        send, receive = self._sizes()
        out = [
            matrix[slice(*self._rows(process, index))].flatten()
            for process in range(self.processes.size)
            for index, matrix in owned.items()
        ]
        got = self._exchange_sorted(out, receive, send)
        order = [i for process in range(self.processes.size) for i in self._owned(process)]
        parts = got.split([count for by_matrix in send for count in by_matrix])
        found = dict(zip(order, parts, strict=True))
        return [found[i].view(-1, *shape[1:]) for i, shape in enumerate(self.shapes)]

    def _exchange(
        self, rows: Sequence[Tensor], send: list[list[int]], receive: list[list[int]]
    ) -> Tensor:
        """Sort what this process has by owner, and exchange it."""
        order = [i for process in range(self.processes.size) for i in self._owned(process)]
        return self._exchange_sorted([rows[index] for index in order], send, receive)

    def _exchange_sorted(
        self, rows: Sequence[Tensor], send: list[list[int]], receive: list[list[int]]
    ) -> Tensor:
        none = torch.empty(0, dtype=self.dtype, device=self.processes.device)
        flat = torch.cat([none, *rows])
        sums = [sum(counts) for counts in send], [sum(counts) for counts in receive]
        return self.processes.exchange(flat, *sums)

    def _sizes(self) -> tuple[list[list[int]], list[list[int]]]:
        """Values of each matrix that go to every owner, and that come from every process."""
        own, every = self.processes.rank, range(self.processes.size)
        send = [[self._count(own, index) for index in self._owned(process)] for process in every]
        receive = [[self._count(process, i) for i in self._owned(own)] for process in every]
        return send, receive

    def _owned(self, process: int) -> list[int]:
        return [index for index, owner in enumerate(self.owner) if owner == process]

    def _rows(self, process: int, index: int) -> tuple[int, int]:
        return self.processes.rows_of(process, self.shapes[index][0])

    def _count(self, process: int, index: int) -> int:
        first, stop = self._rows(process, index)
        return (stop - first) * self.shapes[index][1:].numel()


def _cost(shape: torch.Size) -> int:
    rows, columns = shape
    return rows * columns * min(rows, columns)
