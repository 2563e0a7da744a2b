"""Losses of single layers, beside the language model's: indexer and balance. Report §2.1.1, §2.3.1.

A forward computes those that its caller asks for; serving and evaluation ask for none. The state
belongs to that forward alone.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from openv41 import ops
from openv41.plan import LayerPlan

Teacher = Literal["own", "mean"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Objectives:
    """Which losses a forward computes.

    ``indexer`` names the teacher of an indexer: the attention of its "own" layer, or the "mean" of
    all layers that read its selection.
    """

    indexer: Teacher | None = None
    balance: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Losses:
    """Sums over the layers, not yet weighted; None where not asked for, or without such a layer.

    ``indexer`` is the mean over tokens of KL(teacher || student) in nats; ``balance`` the balance
    of each document, averaged over tokens, 1 per layer where all is even.
    """

    indexer: Float[Tensor, ""] | None = None
    balance: Float[Tensor, ""] | None = None


class LayerLosses:
    """What the layers of one forward hand in, under their numbers.

    A layer that runs again, as activation checkpointing does, only replaces what it handed in.
    """

    def __init__(self, wanted: Objectives) -> None:
        self.wanted = wanted
        self.scores: dict[int, Float[Tensor, "T K"]] = {}  # of selections, by index source
        self.rows: dict[int, Int[Tensor, " rows"] | None] = {}  # of them, those that count
        self.masses: dict[int, dict[int, Float[Tensor, "T K"]]] = {}  # by index source, by layer
        self.balance: dict[int, Float[Tensor, ""]] = {}  # by layer

    def teaches(self, plan: LayerPlan) -> bool:
        """Whether the attention of this layer is a teacher."""
        wanted = self.wanted.indexer
        return plan.is_index_source if wanted == "own" else wanted == "mean" and plan.ratio > 0

    def total(self) -> Losses:
        """Add up what was handed in; rows that do not count are zeros of the mean."""
        divergences = [
            ops.selection_divergence(*self._pair(source)) / max(1, len(scores))
            for source, scores in self.scores.items()
        ]
        return Losses(indexer=_sum(divergences), balance=_sum(list(self.balance.values())))

    def _pair(self, source: int) -> tuple[Float[Tensor, "rows K"], Float[Tensor, "rows K"]]:
        """Student and teachers of a selection."""
        scores, share = self.scores[source], _mean_share(list(self.masses[source].values()))
        rows = self.rows.get(source)
        return (scores, share) if rows is None else (scores[rows], share[rows])


def _mean_share(masses: list[Float[Tensor, "T K"]]) -> Float[Tensor, "T K"]:
    """Mean of the teachers' distributions: a layer that looks elsewhere teaches no less."""
    if len(masses) == 1:
        return masses[0]
    tiny = torch.finfo(masses[0].dtype).tiny
    return torch.stack([F.normalize(mass, p=1, dim=1, eps=tiny) for mass in masses]).mean(dim=0)


def _sum(parts: list[Float[Tensor, ""]]) -> Float[Tensor, ""] | None:
    return torch.stack(parts).sum() if parts else None
