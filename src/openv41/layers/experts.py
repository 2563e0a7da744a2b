"""Mixture of experts with one routing bias for text and one for images. Report §2.1.1."""

from typing import ClassVar, Unpack

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from openv41 import ops
from openv41.config import MoeConfig, NumericsConfig
from openv41.layers.context import ForwardContext
from openv41.layers.factory import Factory
from openv41.layers.islands import Float32Islands, island
from openv41.layers.quantized_linear import QuantizedLinear, QuantizedWeight
from openv41.layers.rounding import round_expert_weight
from openv41.ops._dispatch import wants_gradient
from openv41.ops.precision import cast, widened

FEW_PAIRS = 4096  # of tokens and experts, that one kernel sorts


class Gate(Float32Islands):
    """Router: raw scores, and the biases that steer the choice of experts."""

    islands: ClassVar[tuple[str, ...]] = ("bias", "bias_vl")

    def __init__(
        self,
        dim: int,
        moe: MoeConfig,
        **made: Unpack[Factory],
    ) -> None:
        super().__init__()
        num, wide = moe.num_experts, island(made)
        self.weight = nn.Parameter(torch.empty(num, dim, **made))
        self.bias = nn.Parameter(torch.empty(num, **wide), requires_grad=False)
        self.bias_vl = nn.Parameter(torch.empty(num, **wide), requires_grad=False)


def _is_read_by_host(x: Float[Tensor, "T D"]) -> bool:
    """Whether the host asks for the experts of a single token: on a GPU that would wait."""
    return len(x) == 1 and not x.is_cuda


class RoutedExperts(nn.Module):
    """The feed-forward weights of all experts, stacked: w1 gate, w3 up, w2 down."""

    def __init__(
        self,
        dim: int,
        moe: MoeConfig,
        numerics: NumericsConfig,
        **made: Unpack[Factory],
    ) -> None:
        super().__init__()
        num, width = moe.num_experts, moe.expert_dim
        self.moe, self.numerics = moe, numerics
        self.w1 = QuantizedWeight(num, width, dim, weight_format="fp4", **made)
        self.w3 = QuantizedWeight(num, width, dim, weight_format="fp4", **made)
        self.w2 = QuantizedWeight(num, dim, width, weight_format="fp4", **made)

    def stacks(self) -> tuple[QuantizedWeight, QuantizedWeight, QuantizedWeight]:
        """Gate, up and down weights."""
        return self.w1, self.w3, self.w2

    def values(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """The stacks as they are multiplied with numbers of a dtype."""
        w1, w3, w2 = (self._value(stack, dtype) for stack in self.stacks())
        return w1, w3, w2

    def forward(
        self, x: Float[Tensor, "T D"], expert_ids: Int[Tensor, "T A"], weights: Float[Tensor, "T A"]
    ) -> Float[Tensor, "T D"]:
        """Sum of the chosen experts' weighted outputs, at least float32."""
        if not len(x):
            return widened(x)
        if _is_read_by_host(x):
            return self._run_for_one(x, expert_ids[0].tolist(), weights[0])
        few = x.is_cuda and expert_ids.numel() <= FEW_PAIRS
        sort = ops.order_pairs if few else ops.sort_by_expert
        order, counts = sort(expert_ids, self.moe.num_experts)
        inputs = ops.take_pairs(x, order, self.moe.top_k)
        shares = weights.flatten().index_select(0, order)
        return ops.combine(self.feed(inputs, counts, shares), order, self.moe.top_k)

    def feed(
        self,
        rows: Float[Tensor, "pairs D"],
        counts: Int[Tensor, " E"],
        weights: Float[Tensor, " pairs"],
    ) -> Float[Tensor, "pairs D"]:
        """Weighted outputs for rows that are sorted by expert, ``counts`` of them for each."""

        def product(inputs: Tensor, stack: QuantizedWeight) -> Tensor:
            weight, deterministic = self._value(stack, rows.dtype), self.numerics.deterministic
            out = ops.grouped_linear(inputs, weight, counts, deterministic=deterministic)
            return cast(out, rows.dtype)

        w1, w3, w2 = self.stacks()
        inputs = ops.rounded_input(rows, self.numerics.linear_input)
        hidden = self._activated(product(inputs, w1), product(inputs, w3), weights)
        return product(ops.rounded_input(hidden, self.numerics.linear_input), w2)

    def _run_for_one(
        self, x: Float[Tensor, "1 D"], experts: list[int], weights: Float[Tensor, " A"]
    ) -> Float[Tensor, "1 D"]:
        """The same for a single token, whose row all its experts share: nothing to sort."""
        w1, w3, w2 = (_pick(self._value(stack, x.dtype), experts) for stack in self.stacks())
        gate, up = (torch.cat([self._product(x, w) for w in stack]) for stack in (w1, w3))
        hidden = self._activated(gate, up, weights).split(1)
        outputs = [self._product(*pair) for pair in zip(hidden, w2, strict=True)]
        return widened(torch.cat(outputs)).sum(dim=0, keepdim=True)

    def _activated(
        self,
        gate: Float[Tensor, "pairs F"],
        up: Float[Tensor, "pairs F"],
        weights: Float[Tensor, " pairs"],
    ) -> Float[Tensor, "pairs F"]:
        limit, deterministic = self.moe.swiglu_limit, self.numerics.deterministic
        return ops.clamped_swiglu(gate, up, limit, weights, deterministic=deterministic)

    def _value(self, stack: QuantizedWeight, dtype: torch.dtype) -> Float[Tensor, "..."]:
        """Weights of all experts, rounded where the numerics say so and they are not already."""
        value = stack.value(dtype)
        return value if stack.is_stored else round_expert_weight(value, self.numerics)

    def _product(self, rows: Tensor, weight: Tensor) -> Tensor:
        numerics = self.numerics
        return ops.quantized_linear(
            rows, weight, numerics.linear_input, deterministic=numerics.deterministic
        )


class SharedExpert(nn.Module):
    """The expert that every token takes, unweighted and unscaled."""

    def __init__(
        self,
        dim: int,
        moe: MoeConfig,
        numerics: NumericsConfig,
        **made: Unpack[Factory],
    ) -> None:
        super().__init__()
        self.limit, self.numerics = moe.swiglu_limit, numerics
        self.w1 = QuantizedLinear(dim, moe.expert_dim, numerics, **made)
        self.w3 = QuantizedLinear(dim, moe.expert_dim, numerics, **made)
        self.w2 = QuantizedLinear(moe.expert_dim, dim, numerics, **made)

    def values(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Gate, up and down weights as they are multiplied with numbers of a dtype."""
        return self.w1.value(dtype), self.w3.value(dtype), self.w2.value(dtype)

    def forward(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "T D"]:
        """Apply the clamped SwiGLU."""
        hidden = ops.clamped_swiglu(
            self.w1(x), self.w3(x), self.limit, deterministic=self.numerics.deterministic
        )
        out: Tensor = self.w2(hidden)
        return out


class MixtureOfExperts(nn.Module):
    """One feed-forward sub-layer: routed experts plus the shared one."""

    def __init__(
        self,
        layer: int,
        dim: int,
        moe: MoeConfig,
        numerics: NumericsConfig,
        **made: Unpack[Factory],
    ) -> None:
        super().__init__()
        self.layer, self.moe, self.numerics = layer, moe, numerics
        self.gate = Gate(dim, moe, **made)
        self.experts = RoutedExperts(dim, moe, numerics, **made)
        self.shared = SharedExpert(dim, moe, numerics, **made)

    def forward(self, x: Float[Tensor, "T D"], ctx: ForwardContext) -> Float[Tensor, "T D"]:
        """Route every token, run its experts, add the shared expert in float32, round once."""
        if ctx.has_fixed_sizes:  # of a few tokens, whose calls are what they cost
            experts, shared = self.experts.values(x.dtype), self.shared.values(x.dtype)
            rounding, routed = self.numerics.linear_input, self._route_few(x)
            return ops.expert_mixture(x, routed, experts, shared, self.moe.swiglu_limit, rounding)
        expert_ids, weights = self._route(x, ctx)
        routed, shared = self.experts(x, expert_ids, weights), self.shared(x)
        if x.is_cuda and not wants_gradient(routed, shared):  # the sum is rounded as it is stored
            return torch.add(routed, shared, out=torch.empty_like(x))
        out: Tensor = routed + shared
        return out.to(x.dtype)

    def _route_few(self, x: Float[Tensor, "T D"]) -> ops.Routed:
        gate, moe = self.gate, self.moe
        logits = ops.wide_linear(x, gate.weight)
        wide = cast(gate.bias, logits.dtype), moe.top_k, moe.gate_temperature, moe.route_scale
        return ops.route(logits, *wide, normalise=moe.norm_top_k_prob)

    def _route(
        self, x: Tensor, ctx: ForwardContext
    ) -> tuple[Int[Tensor, "T A"], Float[Tensor, "T A"]]:
        gate, moe = self.gate, self.moe
        scores = ops.router_scores(
            x, gate.weight, moe.gate_temperature, deterministic=self.numerics.deterministic
        )
        bias = gate.bias.expand_as(scores)
        if ctx.is_image is not None:
            bias = torch.where(ctx.is_image[:, None], gate.bias_vl, bias)
        if ctx.is_wanted(name := f"layers.{self.layer}.router_scores"):
            ctx.observe(name, scores + bias)
        name = f"layers.{self.layer}.expert_ids"

        def choose() -> Tensor:
            chosen = ops.choose_experts(scores.detach(), bias, moe.top_k)
            return ctx.observe(name, chosen).long()

        chosen = ctx.once(name, choose)
        self._measure(scores, chosen, ctx)
        weights = ops.expert_weights(
            scores, chosen, normalise=moe.norm_top_k_prob, scale=moe.route_scale
        )
        return chosen, ctx.observe(f"layers.{self.layer}.expert_weights", weights)

    def _measure(
        self, scores: Float[Tensor, "T E"], chosen: Int[Tensor, "T A"], ctx: ForwardContext
    ) -> None:
        """Count loads, and hand in the balance loss, of the rows that count."""
        rows, is_image, share = ctx.counted_rows(self.layer), ctx.is_image, 1.0
        if rows is not None:
            share = len(rows) / len(scores)  # the others are zeros of the mean over all tokens
            scores, chosen = scores[rows], chosen[rows]
            is_image = None if is_image is None else is_image[rows]
        if ctx.counts_loads:
            ctx.expert_counts[self.layer] = ctx.once(
                f"layers.{self.layer}.expert_counts",
                lambda: _count(chosen, is_image, self.moe.num_experts),
            )
        if ctx.losses is not None and ctx.losses.wanted.balance:
            sequences = ctx.batch.request_rows if rows is None else ctx.batch.request_rows[rows]
            loss = ops.sequence_balance(scores, chosen, sequences, len(ctx.batch.requests))
            ctx.losses.balance[self.layer] = share * loss


def _pick(stack: Float[Tensor, "E rows columns"], experts: list[int]) -> list[Tensor]:
    """Views of some experts' weights; what records a gradient needs one node for the stack."""
    each = stack.unbind(0) if torch.is_grad_enabled() else stack
    return [each[expert] for expert in experts]


def _count(chosen: Tensor, is_image: Tensor | None, num_experts: int) -> Int[Tensor, "2 E"]:
    """How many text and image tokens each expert got."""
    if is_image is not None:
        chosen = chosen + is_image[:, None].long() * num_experts
    return ops.count_ids(chosen, 2 * num_experts).view(2, -1)
