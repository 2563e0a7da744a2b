"""The optimizers of a run behind one interface: Muon, Sinkhorn-balanced, AdamW. Report §2.5."""

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from openv41.model.causal_encoder_decoder import CausalEncoderDecoder
from openv41.train.config import OptimizerConfig
from openv41.train.muon import Muon
from openv41.train.parameter_rules import Part, Rule, num_blocks, rule_of
from openv41.train.sinkhorn_update import SinkhornBalanced

NS_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Optimizers:
    """One torch optimizer per update rule; a group holds parameters of one rule.

    Besides the settings of its optimizer a group carries its ``name``, ``lr_factor`` and ``part``.
    """

    def __init__(self, model: CausalEncoderDecoder, config: OptimizerConfig) -> None:
        groups = _groups(model, config)
        self.parts = tuple(_make(update, groups[update], config) for update in sorted(groups))
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
        """Every parameter that an optimizer updates."""
        yield from self._owner

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
        for group in self.groups:
            moved = [p for p in group["params"] if p in before]
            square = sum(float((p - before[p]).double().square().sum()) for p in moved)
            if moved and group["lr"]:
                count = sum(p.numel() for p in moved)
                found[group["name"]] = math.sqrt(square / count) / group["lr"]
        return found

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for part in self.parts:
            part.zero_grad(set_to_none=True)


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
    }


def _make(
    update: str, groups: list[dict[str, Any]], config: OptimizerConfig
) -> torch.optim.Optimizer:
    if update == "muon":
        return Muon(
            groups,
            momentum=config.momentum,
            update_rms=config.update_rms,
            dtype=NS_DTYPES[config.ns_dtype],
        )
    if update == "sinkhorn":
        return SinkhornBalanced(
            groups,
            momentum=config.momentum,
            update_rms=config.update_rms,
            steps=config.sinkhorn_steps,
            threshold=config.sinkhorn_threshold,
        )
    return torch.optim.AdamW(groups, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)


def _groups(
    model: CausalEncoderDecoder, config: OptimizerConfig
) -> dict[str, list[dict[str, Any]]]:
    """Parameter groups by update rule; what follows the load rule asks for no gradient."""
    members: dict[Rule, list[nn.Parameter]] = defaultdict(list)
    for name, parameter in model.named_parameters():
        rule = choose_rule(name, config)
        parameter.requires_grad_(rule.update != "load balance")
        members[replace(rule, is_open=False)].append(parameter)
    factors = lr_factors(config)
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for rule in sorted(members, key=group_name):
        if rule.update != "load balance":
            group = {
                "name": group_name(rule),
                "params": members[rule],
                "part": rule.part,
                "lr_factor": factors.get(rule.part, 1.0),
            }
            if rule.update == "muon":
                group["blocks"] = num_blocks(rule, model.config)
            if rule.update != "sinkhorn":
                group["weight_decay"] = config.weight_decay if rule.decays else 0.0
            groups[rule.update].append(group)
    return groups


def group_name(rule: Rule) -> str:
    """Name of the parameters that share a rule, for logs and tables."""
    blocks = "" if rule.blocks == "one" else f" by {rule.blocks}"
    decay = " without decay" if rule.update == "adamw" and not rule.decays else ""
    return f"{rule.part}: {rule.update}{blocks}{decay}"
