"""Work of fixed sizes, captured as CUDA graphs and replayed. Report §2.2."""

import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Generic, TypeVar

import torch

logger = logging.getLogger(__name__)

Size = TypeVar("Size", bound=Hashable)
Computed = TypeVar("Computed")


@contextmanager
def computing(device: torch.device) -> Iterator[None]:
    """Compute without gradients where a model is; kernels and graphs run on the current device."""
    place = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with torch.inference_mode(), place:
        yield


class Captured(Generic[Size, Computed]):
    """Computes work by its size: call by call at first, then captured, then replayed.

    What ``compute`` reads must lie where it lay when it was captured; its answer is written to one
    place per size, and stays there until the next work is asked for: sizes share their memory.
    """

    def __init__(
        self, compute: Callable[[Size], Computed], device: torch.device, *, captures: bool
    ) -> None:
        """Without ``captures`` all work runs call by call."""
        self.captures = captures
        self.replays = 0
        self._compute = compute
        self._met: set[Size] = set()
        self._graphs: dict[Size, tuple[torch.cuda.CUDAGraph, Computed]] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    @property
    def graphs(self) -> int:
        """Sizes that are captured."""
        return len(self._graphs)

    def answers(self) -> list[Computed]:
        """What captured work is answered with, size by size."""
        return [computed for _, computed in self._graphs.values()]

    def prepare(self, sizes: Iterable[Size]) -> None:
        """Capture work of these sizes now, whatever is described."""
        for size in sizes:
            if self.captures and size not in self._graphs:
                self._compute(size)  # what is compiled or chosen by trials is so before a capture
                self._met.add(size)
                self(size)

    def __call__(self, size: Size) -> Computed:
        """Replay work of this size, or run it and capture the next one."""
        if size not in self._graphs:
            if not (self.captures and size in self._met):
                self._met.add(size)
                return self._compute(size)
            try:
                self._graphs[size] = self._capture(size)
            except Exception:
                logger.exception("steps are not captured: the engine goes on without")
                self.captures = False
                return self._compute(size)
        graph, computed = self._graphs[size]
        graph.replay()
        self.replays += 1
        return computed

    def _capture(self, size: Size) -> tuple[torch.cuda.CUDAGraph, Computed]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            computed = self._compute(size)
        logger.info("captured a step of size %s", size)
        return graph, computed


class Staged:
    """Numbers on the device that describe the rows of a step, and where the host writes them."""

    def __init__(
        self, kinds: int, most: int, device: torch.device, dtype: torch.dtype = torch.int64
    ) -> None:
        self.there = torch.zeros(kinds, most, dtype=dtype, device=device)
        self._here = torch.zeros(kinds, most, dtype=dtype, pin_memory=device.type == "cuda")

    def tell(self, rows: Sequence[Sequence[float]], count: int) -> None:
        """Describe ``count`` rows, the last of those given over and over.

        The device must have read those told before.
        """
        padded = [*rows, *[rows[-1]] * (count - len(rows))]
        self._here[:, :count] = torch.tensor(padded, dtype=self._here.dtype).T
        self.there.copy_(self._here, non_blocking=True)


def sizes_up_to(most: int) -> list[int]:
    """All sizes that work on at most so many rows is padded to."""
    return sorted({rounded(count, most) for count in range(1, most + 1)})


def rounded(count: int, most: int) -> int:
    """The size that work on ``count`` rows is padded to: 1, 2, 3, 4, 6, 8, 12, 16, 24, ..."""
    power = 1 << (count - 1).bit_length()
    return min(most, power if 4 * count > 3 * power or power < 4 else 3 * power // 4)
