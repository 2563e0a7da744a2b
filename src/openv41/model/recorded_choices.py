"""Which recorded choices a model can have made: experts and entries. Report §2.1.1, §2.3.1."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from openv41.config import ModelConfig
from openv41.plan import plan_layers


@dataclass(frozen=True, kw_only=True, slots=True)
class _Choice:
    """What a layer chooses: ``top_k`` of ``num_experts``, or entries of ``ratio`` tokens each."""

    name: str
    top_k: int = 0
    num_experts: int = 0
    ratio: int = 0

    def problem(self, rows: object, num_tokens: int) -> str | None:
        """Why rows of positions 0, 1, ... cannot have been chosen."""
        if not isinstance(rows, Tensor) or rows.ndim != 2 or rows.is_floating_point():
            return "must be a tensor [rows, chosen] of whole numbers"
        if len(rows) > num_tokens:
            return f"has {len(rows)} rows, its document {num_tokens} tokens"
        if not self._allows(rows.long()):
            return "holds ids that this model cannot choose there"
        return None

    def _allows(self, rows: Tensor) -> bool:
        ordered = rows.sort(dim=1).values
        again = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
        if again.any():
            return False
        if self.ratio:
            visible = (torch.arange(len(rows), device=rows.device) + 1) // self.ratio
            return bool(((rows >= -1) & (rows < visible[:, None])).all())
        in_range = ((rows >= 0) & (rows < self.num_experts)).all()
        return rows.shape[1] == self.top_k and bool(in_range)


def problems_of(record: Mapping[str, object], config: ModelConfig, num_tokens: int) -> list[str]:
    """What keeps a record from being one of this model and of a text of ``num_tokens``."""
    choices = {choice.name: choice for choice in _choices(config)}
    found = []
    for name, rows in record.items():
        if name not in choices:
            found.append(f"{name} is nothing that this model chooses ({', '.join(choices)})")
        elif (problem := choices[name].problem(rows, num_tokens)) is not None:
            found.append(f"{name} {problem}")
    return found


def _choices(config: ModelConfig) -> Iterator[_Choice]:
    moe = config.moe
    for plan in plan_layers(config):
        name = f"layers.{plan.layer}"
        yield _Choice(name=f"{name}.expert_ids", top_k=moe.top_k, num_experts=moe.num_experts)
        if plan.is_index_source:
            yield _Choice(name=f"{name}.topk_indices", ratio=plan.ratio)
