"""How a module declares what is measured of its op.

A module ``benchmarks/h200/NAME.py`` holds

- ``rows() -> list[Row]``, cheap and without a GPU: tensors are made by ``Row.make`` only;
- ``TRIED``, notes of what was tried for a goal that is not met, by ``Row.name``;
- ``if __name__ == "__main__": main(__file__)`` with ``main`` of ``benchmarks.h200.harness``.

``reference`` compositions that are declared here run eagerly on the GPU, in the mode "reference".
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

Inputs = dict[str, Any]
Measure = Literal[
    "over_floor",  # our time / floor, at most
    "net_over_floor",  # (our time - that of an empty graph) / floor, at most; for a few us
    "over_empty_us",  # our time - that of an empty graph, at most
    "us",  # our time, at most
    "reference_ratio",  # time of the reference / ours, at least
    "peer_ratio",  # time of the fastest peer, or of the peer named, / ours, at least
]
AT_LEAST = ("reference_ratio", "peer_ratio")


@dataclass(frozen=True)
class Goal:
    """A bound on the median of our time, such as ``Goal("over_floor", 1.25)``."""

    measure: Measure
    bound: float
    peer: str = ""  # of peer_ratio; empty: the fastest peer that ran


@dataclass(frozen=True, kw_only=True)
class Row:
    """One op at one shape.

    ``ours``, ``reference`` and each of ``variants`` are called as ``f(**inputs)``. They must be
    repeatable: a second call on the same inputs gives the same results. Whatever tensors they
    return are filled with NaN (integers: 0xA5 bytes) before the checked run, so they return each
    tensor that they write and none that they read. ``error`` compares what came back with a float32
    or float64 result, element by element where that is exact, and returns one number; a result
    above ``tolerance`` or NaN is not timed.
    """

    op: str  # its name in openv41.ops
    shape: Mapping[str, int | str]  # as in the tables: T tokens, L entries, keys, d, n
    make: Callable[[torch.Generator], Inputs]  # fresh random inputs on the generator's device
    ours: Callable[..., Any]  # runs in the mode "required"
    error: Callable[[Inputs, Any], float]
    tolerance: float
    floor_bytes: int  # each input read once, each output written once
    floor_flops: int = 0  # multiply and add are two
    flop_rate: Literal["bf16", "fp8"] = "bf16"
    reference: Callable[..., Any] | None = None  # None where it does not fit into memory
    variants: Mapping[str, Callable[..., Any]] = field(default_factory=dict)  # configurations
    peers: tuple[str, ...] = ()  # names in benchmarks/h200/peers, as "flashmla:decode"
    goals: tuple[Goal, ...] = ()

    @property
    def name(self) -> str:
        """Op and shape in words, such as ``mega_mhc T=8192 d=5120 n=4``."""
        return " ".join([self.op, *(f"{key}={value}" for key, value in self.shape.items())])


def relative_error(got: Tensor, want: Tensor) -> float:
    """``|got - want| / |want|`` over all elements in float64; infinite where one is not finite."""
    got, want = got.double(), want.double()
    if got.shape != want.shape:
        return math.inf
    error = (got - want).norm() / want.norm().clamp_min(1e-30)
    return error.item() if error.isfinite() else math.inf


def unequal(got: Tensor, want: Tensor) -> float:
    """Number of elements that differ, for packed bytes and indices."""
    return float((got != want).sum()) if got.shape == want.shape else math.inf


def tensors_of(value: object) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists, mappings and named tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_of(part)
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors_of(part)


def poison(value: object) -> None:
    """Fill every tensor so that an element that is not written again is seen."""
    for tensor in tensors_of(value):
        with torch.no_grad():
            if tensor.is_floating_point() and tensor.element_size() > 1:
                tensor.detach().fill_(math.nan)
            elif tensor.is_floating_point():
                tensor.detach().view(torch.uint8).fill_(0xFF)  # NaN in FP8
            else:
                tensor.detach().fill_(True if tensor.dtype == torch.bool else 0x55)
