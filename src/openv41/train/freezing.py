"""What rests: a vision encoder until the decay, and a model whose drafter learns. Report §2.1.1.

The encoder's final norm, the projector and the delimiters learn from the first step on; they are of
another part (see train/parameter_rules.py).
"""

from openv41.train.config import TrainConfig
from openv41.train.optimizer import Optimizers
from openv41.train.parameter_rules import Part, is_drafter
from openv41.train.placement import Placement
from openv41.train.schedule import decays

FROZEN: Part = "vision encoder"


def is_frozen(config: TrainConfig, step: int) -> bool:
    """Whether the encoder rests in a step."""
    return bool(config.freeze_vision) and not decays(config, step)


def freeze(optimizer: Optimizers, config: TrainConfig, step: int) -> None:
    """Let the encoder learn in a step, or rest.

    What asks for no gradient gets none: autograd keeps nothing of the encoder's forward, and the
    optimizers pass it by, with its momentum and its decay.
    """
    learns = not is_frozen(config, step)
    for group in optimizer.groups:
        if group["part"] == FROZEN:
            for parameter in group["params"]:
                parameter.requires_grad_(learns)


def freeze_all_but_drafter(placement: Placement) -> None:
    """Let nothing but the drafter learn."""
    for placed in placement.parameters:
        if not is_drafter(placed.name):
            for parameter in (placed.parameter, placed.local):
                parameter.requires_grad_(False)
