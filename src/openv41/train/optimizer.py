"""The optimizers of a run behind one interface: Muon, Sinkhorn-balanced, AdamW. Report §2.5."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from openv41.train.config import OptimizerConfig
from openv41.train.muon import Muon, Shared
from openv41.train.parameter_rules import (
    Part,
    Rule,
    is_adapter,
    is_drafter,
    num_blocks,
    rule_of,
)
from openv41.train.placement import Placed, Placement
from openv41.train.sinkhorn_update import SinkhornBalanced

NS_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Optimizers:
    """One torch optimizer per update rule; a group holds parameters of one rule.

    Besides the settings of its optimizer a group carries its ``name``, ``lr_factor`` and ``part``.
    """

    def __init__(self, placement: Placement, config: OptimizerConfig) -> None:
        self.placement, self.processes = placement, placement.processes
        groups = _groups(placement, config)
        self.parts = tuple(
            _make(update, groups[update], config, placement) for update in sorted(groups)
        )
        self._owner = {
            parameter: part
            for part in self.parts
            for group in part.param_groups
            for parameter in group["params"]
        }

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Parameter groups of all optimizers."""
        return [group for part in self.parts for group in part.param_groups]

    def parameters(self) -> Iterator[nn.Parameter]:
        """What the optimizers update: of every parameter the rows of this process."""
        yield from self._owner

    def take_gradients(self) -> None:
        """Collect the gradients of the last backward passes from the model."""
        for placed in self._placed():
            placed.take_gradient()
        self.placement.sum_copies()

    def clip_gradients(self, max_norm: float) -> float:
        """Norm of all gradients together; they are scaled down to ``max_norm`` unless it is 0.

        The drafter's are scaled apart, so that the model moves as it would without one; their norm
        is returned where nothing else has a gradient.
        """
        drafter = [p.local for p in self._placed() if is_drafter(p.name)]
        own = _norm(drafter)
        clip_grads_with_norm_(drafter, max_norm or math.inf, own)
        rest = [p for p in self._placed() if not is_drafter(p.name)]
        if not any(p.local.grad is not None for p in rest):
            return float(own)
        split = [p.local for p in rest if p.is_split]
        copied = [p.local for p in rest if not p.is_split]
        norm = _norm(copied)
        if self.processes.size > 1:
            square = _norm(split).square()
            self.processes.sum_(square)
            norm = (square + norm.square()).sqrt()
        clip_grads_with_norm_([p.local for p in rest], max_norm or math.inf, norm)
        return float(norm)

    def state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """What is kept about a parameter between steps; may be changed in place."""
        state: dict[str, Tensor] = self._owner[parameter].state[parameter]
        return state

    def set_lr(self, lr: float) -> None:
        """Give every group ``lr`` times its factor."""
        for group in self.groups:
            group["lr"] = lr * group["lr_factor"]

    def step(self) -> None:
        """Update every parameter that has a gradient."""
        for part in self.parts:
            part.step()

    @torch.no_grad()
    def measured_step(self) -> dict[str, float]:
        """Update, and return the RMS of each group's step over its learning rate.

        Decay counts as a part of the step. Needs a copy of the parameters for the time of the step.
        """
        before = {p: p.detach().clone() for p in self.parameters() if p.grad is not None}
        self.step()
        found = {}
        split = {placed.local for placed in self._placed() if placed.is_split}
        for group in self.groups:
            moved = [p for p in group["params"] if p in before]
            sums = torch.zeros(2, 2, dtype=torch.float64)  # of split ones, of others
            for p in moved:
                square = (p - before[p]).double().square().sum()
                sums[int(p not in split)] += torch.tensor([square, p.numel()])
            sums = sums.to(self.processes.device)
            self.processes.sum_(sums[0])
            square, count = sums.sum(dim=0).tolist()
            if count and group["lr"]:
                found[group["name"]] = math.sqrt(square / count) / group["lr"]
        return found

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for placed in self._placed():
            placed.local.grad = placed.parameter.grad = None

    def _placed(self) -> Iterator[Placed]:
        return (p for p in self.placement.parameters if p.local in self._owner)


def choose_rule(name: str, config: OptimizerConfig) -> Rule:
    """Rule of a parameter under the settings that comparisons change."""
    rule = rule_of(name)
    if rule.update == "muon" and config.matrix_update == "adamw":
        return replace(rule, update="adamw", blocks="one")
    if rule.update == "muon" and not config.head_wise and rule.blocks.endswith("heads"):
        return replace(rule, blocks="one")
    if rule.update == "sinkhorn" and config.token_update == "adamw":
        return replace(rule, update="adamw")
    return rule


def lr_factors(config: OptimizerConfig) -> dict[Part, float]:
    """Learning rates of parts of the model, as factors of the run's."""
    return {
        "tokens": config.token_lr_factor,
        "engram table": config.engram_table_lr_factor,
        "vision encoder": config.vision_lr_factor,
        "drafter": config.drafter_lr_factor,
    }


def _make(
    update: str, groups: list[dict[str, Any]], config: OptimizerConfig, placement: Placement
) -> torch.optim.Optimizer:
    if update == "muon":
        shapes = {p.local: p.shape for p in placement.parameters if p.is_split}
        return Muon(
            groups,
            momentum=config.momentum,
            update_rms=config.update_rms,
            dtype=NS_DTYPES[config.ns_dtype],
            shared=Shared(placement.processes, shapes),
        )
    if update == "sinkhorn":
        return SinkhornBalanced(
            groups,
            momentum=config.momentum,
            update_rms=config.update_rms,
            steps=config.sinkhorn_steps,
            threshold=config.sinkhorn_threshold,
            processes=placement.processes,
        )
    return torch.optim.AdamW(groups, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)


def _groups(placement: Placement, config: OptimizerConfig) -> dict[str, list[dict[str, Any]]]:
    """Parameter groups by update rule; all others ask for no gradient.

    Those are the ones that follow the load rule and, beside an adapter, the whole model.
    """
    members: dict[Rule, list[nn.Parameter]] = defaultdict(list)
    is_adapted = any(is_adapter(placed.name) for placed in placement.parameters)
    for placed in placement.parameters:
        rule = choose_rule(placed.name, config)
        trains = is_adapter(placed.name) if is_adapted else rule.update != "load balance"
        for parameter in (placed.parameter, placed.local):
            parameter.requires_grad_(trains)
        if trains:
            members[replace(rule, is_open=False)].append(placed.local)
    factors = lr_factors(config)
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for rule in sorted(members, key=group_name):
        group = {
            "name": group_name(rule),
            "params": members[rule],
            "part": rule.part,
            "lr_factor": factors.get(rule.part, 1.0),
        }
        if rule.update == "muon":
            group["blocks"] = num_blocks(rule, placement.config)
        if rule.update != "sinkhorn":
            group["weight_decay"] = config.weight_decay if rule.decays else 0.0
        groups[rule.update].append(group)
    return groups


def _norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    return get_total_norm(p.grad for p in parameters if p.grad is not None)


def group_name(rule: Rule) -> str:
    """Name of the parameters that share a rule, for logs and tables."""
    blocks = "" if rule.blocks == "one" else f" by {rule.blocks}"
    decay = " without decay" if rule.update == "adamw" and not rule.decays else ""
    return f"{rule.part}: {rule.update}{blocks}{decay}"
