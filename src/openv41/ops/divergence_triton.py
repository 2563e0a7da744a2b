"""Divergence of the indexer's choice from the attention that teaches it. Report §2.3.1."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

LEAST: tl.constexpr = tl.constexpr(-3.4028234663852886e38)  # stands for -inf: its share is 0
TINY: tl.constexpr = tl.constexpr(1.1754943508222875e-38)


@triton.jit
@no_type_check
def _shares(scores, mass, token, K, WIDTH: tl.constexpr):
    """Teacher's shares, the student's logarithms, and which scores are finite."""
    place = tl.arange(0, WIDTH)
    there = place < K
    score = tl.load(scores + token * K + place, mask=there, other=float("-inf")).to(tl.float32)
    given = tl.load(mass + token * K + place, mask=there, other=0.0).to(tl.float32)
    teacher = given / tl.maximum(tl.sum(tl.abs(given), 0), TINY)
    is_finite = score >= LEAST
    score = tl.maximum(score, LEAST)
    top = tl.max(score, 0)
    student = score - top - tl.log(tl.sum(tl.where(there, tl.exp(score - top), 0.0), 0))
    return teacher, student, is_finite & there, place


@triton.jit
@no_type_check
def _divergence(scores, mass, out, K, WIDTH: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    teacher, student, _, _ = _shares(scores, mass, token, K, WIDTH)
    known = teacher * (tl.log(tl.maximum(teacher, TINY)) - student)
    tl.store(out + token, tl.sum(tl.where(teacher > 0, known, 0.0), 0))


@triton.jit
@no_type_check
def _to_scores(scores, mass, grad, out, K, WIDTH: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    teacher, student, is_finite, place = _shares(scores, mass, token, K, WIDTH)
    slope = tl.exp(student) * tl.sum(teacher, 0) - teacher
    slope = tl.where(is_finite, slope * tl.load(grad).to(tl.float32), 0.0)
    tl.store(out + token * K + place, slope.to(out.dtype.element_ty), mask=place < K)


def _width(scores: Tensor) -> int:
    return max(16, int(triton.next_power_of_2(scores.shape[1])))


class SelectionDivergence(torch.autograd.Function):
    """A number per query, summed in one order; the gradient is for the scores alone."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any,
        scores: Float[Tensor, "T K"],
        mass: Float[Tensor, "T K"],
    ) -> Float[Tensor, ""]:
        scores, mass = scores.contiguous(), mass.contiguous()
        ctx.save_for_backward(scores, mass)
        out = torch.zeros(len(scores), dtype=torch.float32, device=scores.device)
        if scores.numel():
            _divergence[(len(scores),)](scores, mass, out, scores.shape[1], WIDTH=_width(scores))
        return out.sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Float[Tensor, ""]) -> tuple[Tensor, None]:  # noqa: D102
        scores, mass = ctx.saved_tensors
        out = torch.empty_like(scores)
        if scores.numel():
            given = scores, mass, grad.contiguous(), out, scores.shape[1]
            _to_scores[(len(scores),)](*given, WIDTH=_width(scores))
        return out, None
