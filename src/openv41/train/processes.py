"""The processes of a run that torchrun started, and what they send each other. Report §2.5.

A run without torchrun has one process, for which all of this does nothing.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from openv41.errors import InputError, LostProcessError, OpenV41Error

CPU = torch.device("cpu")
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
T = TypeVar("T")
TIMEOUT = timedelta(minutes=10)  # for a process that no longer answers


@dataclass(frozen=True, slots=True)
class Processes:
    """This process among those of the run; each holds other rows and runs other documents."""

    rank: int = 0
    size: int = 1
    device: torch.device = CPU

    @property
    def is_restart(self) -> bool:
        """Whether torchrun has started all processes anew, after one of them died."""
        return _restarts() > 0

    @property
    def is_first(self) -> bool:
        """Whether this process writes the files of the run."""
        return self.rank == 0

    def sum_(self, *tensors: Tensor) -> None:
        """Add up tensors over all processes, in place."""
        self._reduce(dist.ReduceOp.SUM, tensors)

    def max_(self, *tensors: Tensor) -> None:
        """Take the largest value over all processes, in place."""
        self._reduce(dist.ReduceOp.MAX, tensors)

    def any(self, is_so: bool) -> bool:
        """Whether it is so in some process."""
        if self.size == 1:
            return is_so
        flag = torch.tensor(int(is_so), device=self.device)
        self.max_(flag)
        return bool(flag)

    def share_counts(self, send: Sequence[int]) -> list[int]:
        """Tell every process how many rows it will get; returns those from each of them."""
        counts = torch.tensor(send, device=self.device)
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts)
        found: list[int] = received.tolist()
        return found

    def exchange(
        self, rows: Shaped[Tensor, "out ..."], send: Sequence[int], receive: Sequence[int]
    ) -> Shaped[Tensor, "into ..."]:
        """Send consecutive rows to the processes in their order; gradients travel back."""
        got: Tensor = _Exchange.apply(rows, list(send), list(receive))
        return got

    def gather(self, value: Any) -> list[Any]:  # noqa: ANN401 -- whatever can be pickled
        """The value of every process."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def ask_first(self, look: Callable[[], T]) -> T | None:
        """What the first process finds, which alone looks; None in the others.

        Its OpenV41Error is raised in all of them.
        """
        found, problem = None, None
        if self.is_first:
            try:
                found = look()
            except OpenV41Error as error:
                problem = error
        told = self.gather(None if problem is None else str(problem))[0]
        if problem is not None:
            raise problem
        if told is not None:
            raise OpenV41Error(told)
        return found

    def rows(self, count: int) -> tuple[int, int]:
        """First and last + 1 of ``count`` rows that this process holds."""
        return self.rows_of(self.rank, count)

    def rows_of(self, rank: int, count: int) -> tuple[int, int]:
        """The same of another process; rows are cut as DTensor cuts them."""
        each = -(-count // self.size)
        return min(rank * each, count), min((rank + 1) * each, count)

    def _reduce(self, how: Any, tensors: Sequence[Tensor]) -> None:  # noqa: ANN401 -- of torch
        if self.size > 1:
            for tensor in tensors:
                dist.all_reduce(tensor, how)


ALONE = Processes()


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 -- of torch, without annotations
        rows: Tensor,
        send: list[int],
        receive: list[int],
    ) -> Tensor:
        ctx.counts = send, receive
        return _all_to_all(rows, send, receive)

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401 -- of torch, without annotations
        gradient: Tensor,
    ) -> tuple[Tensor, None, None]:
        send, receive = ctx.counts
        return _all_to_all(gradient, receive, send), None, None


def _all_to_all(rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
    got = rows.new_empty(sum(receive), *rows.shape[1:])
    dist.all_to_all_single(got, rows.contiguous(), receive, send)
    return got


@contextmanager
def join(device: torch.device) -> Iterator[Processes]:
    """Join the processes that torchrun started, if it did, on ``device`` or one of its kind.

    Raises InputError for a device that cannot be shared, and outside torchrun's processes; within
    the block LostProcessError where another process no longer answers.
    """
    size = _number("WORLD_SIZE", 1)
    if size == 1:
        yield Processes(device=device)
        return
    _number("RANK", None)
    if device.type not in BACKENDS:
        raise InputError(
            f"{size} processes on device {device.type}; processes share {' or '.join(BACKENDS)}"
        )
    if device.type == "cuda":
        device = torch.device("cuda", _number("LOCAL_RANK", None))
        torch.cuda.set_device(device)
    store, rank, size = next(rendezvous("env://", timeout=TIMEOUT))
    # Addresses of the dead are still in it.
    store = dist.PrefixStore(f"start {_restarts()}", store)  # type: ignore[attr-defined]
    backend = BACKENDS[device.type]
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    try:
        yield Processes(rank, size, device)
    except RuntimeError as error:  # also those of torch.distributed
        if isinstance(error, OpenV41Error) or not _is_of_lost_process(error):
            raise
        raise LostProcessError(
            f"another process of the run has ended (process {rank} of {size} finds: "
            f"{str(error).splitlines()[0]}); its own message says why. The last checkpoint is "
            "good: start the run again with --resume, or let torchrun do it with --max-restarts"
        ) from error
    finally:
        dist.destroy_process_group()


def _is_of_lost_process(error: RuntimeError) -> bool:
    """Whether a collective operation failed because a process is gone; gloo has no type for it."""
    closed = ("closed by peer", "reset by peer")
    return isinstance(error, dist.DistError) or any(words in str(error) for words in closed)


def _restarts() -> int:
    """How often torchrun has started all processes anew."""
    return _number("TORCHELASTIC_RESTART_COUNT", 0)


def _number(name: str, default: int | None) -> int:
    """A variable that torchrun sets for its processes."""
    text = os.environ.get(name, "" if default is None else str(default))
    if not text.isdecimal():
        raise InputError(
            f"the environment has {name}={text!r} where torchrun sets a whole number; start "
            "several processes with torchrun, or unset WORLD_SIZE"
        )
    return int(text)
