"""``openv41 train PRESET --explain``: which parameter takes which update rule. Report §2.5."""

from collections import Counter
from collections.abc import Sequence

from openv41.cli.ui import show_line, show_table
from openv41.config import ModelConfig
from openv41.model.causal_encoder_decoder import CausalEncoderDecoder
from openv41.train.config import TrainConfig
from openv41.train.contrastive import ContrastiveModel
from openv41.train.freezing import FROZEN, is_frozen
from openv41.train.optimizer import choose_rule, lr_factors
from openv41.train.parameter_rules import CONTRASTIVE_RULES, Rule, num_blocks, pattern_of
from openv41.train.stages import Stage

COLUMNS = ("parameter", "tensors", "shape", "update", "matrices", "lr", "decay", "source")


def show_update_rules(model: ModelConfig, stages: Sequence[Stage]) -> None:
    """Print the rule of every parameter of a run, tensors of equal name and shape together.

    Settings are those of the first stage that trains the whole model.
    """
    train = next(stage.train for stage in stages if not stage.makes_encoder)
    optimizer = train.optimizer
    parameters = list(CausalEncoderDecoder(model, device="meta").named_parameters())
    if any(stage.is_contrastive for stage in stages):
        both = ContrastiveModel(model, device="meta").named_parameters()
        parameters += [(n, p) for n, p in both if pattern_of(n) in CONTRASTIVE_RULES]
    found: dict[tuple[str, tuple[int, ...]], Rule] = {}
    counts: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for name, parameter in parameters:
        key = pattern_of(name), tuple(parameter.shape)
        found[key] = choose_rule(name, optimizer)
        counts[key] += 1
    sizes = Counter[str]()
    for name, parameter in parameters:
        sizes[choose_rule(name, optimizer).update] += parameter.numel()
    rows = [
        (name, counts[name, shape], _shape(shape), *_cells(rule, shape, model, train))
        for (name, shape), rule in found.items()
    ]
    show_table(COLUMNS, rows)
    show_line("")
    show_table(("update", "values"), [(k, f"{v:,}") for k, v in sorted(sizes.items())])


def _cells(
    rule: Rule, shape: tuple[int, ...], model: ModelConfig, train: TrainConfig
) -> tuple[object, ...]:
    """Update, matrices, learning rate, decay and source of one row."""
    source = "ours" if rule.is_open else "report"
    if rule.update == "load balance":
        return rule.update, "", "", "", source
    decay = train.optimizer.weight_decay if rule.decays else 0
    lr = f"x {lr_factors(train.optimizer).get(rule.part, 1.0):g}"
    if rule.part == FROZEN and is_frozen(train, 0):
        lr += " from decay"  # until then it is frozen
    matrices = ""
    if rule.update == "muon":
        blocks = num_blocks(rule, model)
        *batch, rows, columns = shape
        count = blocks * (batch[0] if batch else 1)
        matrices = f"{count} x ({rows // blocks}, {columns})"
    return rule.update, matrices, lr, decay, source


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
