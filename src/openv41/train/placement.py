"""Where the parameters of a run are; for several processes see train/parallel.py. Report §2.5."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from openv41.config import ModelConfig
from openv41.model.causal_encoder_decoder import CausalEncoderDecoder
from openv41.train.contrastive import ContrastiveModel
from openv41.train.processes import ALONE, Processes

ExpertPlacement = Literal["sharded", "parallel"]
StageModel = CausalEncoderDecoder | ContrastiveModel


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Placed:
    """A parameter of the model as one process holds it."""

    name: str
    parameter: nn.Parameter  # of the module
    local: nn.Parameter  # the rows that this process updates, in the same memory
    shape: torch.Size  # of the whole
    first: int = 0  # row of the whole that ``local`` begins with
    is_split: bool = False  # other processes hold the other rows

    def take_gradient(self) -> None:
        """Give ``local`` the gradient that the last backward pass left in the module."""
        is_missing = self.local.grad is None and self.local.requires_grad
        if self.is_split and is_missing:  # no row was asked for
            self.local.grad = torch.zeros_like(self.local)

    def own_rows(self, whole: Tensor) -> Tensor:
        """Rows of a whole tensor that this process holds."""
        return whole[self.first : self.first + len(self.local)] if self.is_split else whole


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """All parameters of a model, and the processes that share them."""

    config: ModelConfig
    processes: Processes
    parameters: tuple[Placed, ...]

    def whole(self, placed: Placed) -> Tensor:
        """A parameter with the rows of all processes, which must all ask for it."""
        return placed.local.detach()

    def as_distributed(self, placed: Placed, local: Tensor) -> Tensor:
        """A tensor of own rows as a part of the whole one, such as a buffer of an optimizer."""
        return local

    def sum_copies(self) -> None:
        """Add up the gradients of parameters that every process holds whole."""


def whole_value(parameter: nn.Parameter) -> Tensor:
    """A parameter with the rows of all processes, without a gradient; all must ask for it."""
    value = parameter.detach()
    whole: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return whole


def distribute(
    model: StageModel,
    processes: Processes = ALONE,
    experts: ExpertPlacement = "sharded",
) -> Placement:
    """Distribute a model that every process has made with the same values.

    Raises ConfigError for a mix that cannot be: see ``check_placement``.
    """
    if processes.size > 1:
        from openv41.train.parallel import share  # noqa: PLC0415 -- slow; one process needs none

        return share(model, processes, experts)
    whole = tuple(
        Placed(name=name, parameter=p, local=p, shape=p.shape)
        for name, p in model.named_parameters()
    )
    return Placement(model.config, processes, whole)
