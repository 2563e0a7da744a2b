"""What an adapter gives for one peer at one shape, and formulas that adapters check with."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from benchmarks.h200.rows import relative_error

Shape = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A call that is repeatable, and the error of what it returns."""

    what: str  # project, version and kernel, for the tables
    run: Callable[[], Any]
    error: Callable[[Any], float]
    tolerance: float
    graph: bool = True  # False: eager launches


class Adapter(Protocol):
    """A module of this package: where its peer lies, and its cases."""

    FOLDERS: tuple[str, ...]  # of the folder of peers, for the import path
    CASES: Mapping[str, Callable[[Shape], Case]]


def randn(*size: int) -> Tensor:
    """Random numbers on the GPU."""
    return torch.randn(*size, device="cuda")


def attended(q: Tensor, kv: Tensor, sink: Tensor, scale: float) -> Tensor:
    """Attention of one query's heads [H, C] over its keys [K, C] with a sink, in float64."""
    scores = (q.double() @ kv.T) * scale
    largest = scores.amax(1, keepdim=True)
    weights = torch.exp(scores - largest)
    total = weights.sum(1) + torch.exp(sink.double() - largest[:, 0])
    return (weights @ kv) / total[:, None]


def index_scores(q: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """Scores of one query [I, J] for keys [M, J], in float64."""
    return (torch.relu(q.double() @ keys.T) * weights.double()[:, None]).sum(0)


STREAMS, WIDTH, MIXES, TINY = 4, 5120, 24, 1e-6


def mix_coefficients(x: Tensor, fn: Tensor, scale: Tensor, base: Tensor) -> tuple[Tensor, ...]:
    """A [T, 4], C [T, 4] and B [T, 4, 4] of streams [T, 4, d]."""
    flat = x.flatten(1).to(fn.dtype)
    mixed = (flat @ fn.t()) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-20)
    a = torch.sigmoid(mixed[:, :4] * scale[0] + base[:4]) + TINY
    c = 2 * torch.sigmoid(mixed[:, 4:8] * scale[1] + base[4:8])
    b = torch.softmax((mixed[:, 8:] * scale[2] + base[8:]).view(-1, 4, 4), -1) + TINY
    b = b / (b.sum(-2, keepdim=True) + TINY)
    for _ in range(19):
        b = b / (b.sum(-1, keepdim=True) + TINY)
        b = b / (b.sum(-2, keepdim=True) + TINY)
    return a, c, b


@dataclass(frozen=True)
class Boundary:
    """Inputs of one mHC boundary: streams, block output, coefficients, weights."""

    x: Tensor  # [T, 4, d]
    y: Tensor  # [T, d]
    a: Tensor
    c: Tensor
    b: Tensor
    fn: Tensor  # [24, 4 d]
    scale: Tensor
    base: Tensor
    weight: Tensor  # [d]

    @classmethod
    def random(cls, tokens: int) -> "Boundary":
        """Inputs of realistic sizes."""
        fn, base = randn(MIXES, STREAMS * WIDTH) * 0.02, randn(MIXES) * 0.5
        scale = torch.tensor([0.7, 0.9, 1.1], device="cuda")
        streams = [randn(tokens, STREAMS, WIDTH).bfloat16() for _ in range(2)]
        a, c, b = (m.contiguous() for m in mix_coefficients(streams[1], fn, scale, base))
        weight = (1 + 0.1 * randn(WIDTH)).bfloat16()
        return cls(streams[0], randn(tokens, WIDTH).bfloat16(), a, c, b, fn, scale, base, weight)

    def wanted(self, rows: int = 256, *, own_mix: bool = False) -> tuple[Tensor, ...]:
        """New streams, normed input, A, C, B of the first rows in float64.

        ``own_mix``: the input is mixed with the coefficients just predicted, as V4 has it.
        """
        x, y, a, c, b = (t[:rows].double() for t in (self.x, self.y, self.a, self.c, self.b))
        new = c[:, :, None] * y[:, None] + torch.einsum("tij,tid->tjd", b, x)
        wide = self.fn.double(), self.scale.double(), self.base.double()
        predicted = mix_coefficients(new, *wide)
        mixed = ((predicted[0] if own_mix else a)[:, :, None] * new).sum(1)
        inverse = torch.rsqrt(mixed.square().mean(-1, keepdim=True) + 1e-20)
        return new, mixed * inverse * self.weight.double(), *predicted


def boundary_error(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> float:
    """The largest error of all outputs."""
    pairs = zip(got, want, strict=True)
    return max(
        relative_error(g.reshape(-1, w[0].numel())[: len(w)], w.flatten(1)) for g, w in pairs
    )
