"""``openv41 train PRESET --explain``: which parameter takes which update rule. Report §2.5."""

from collections import Counter

from openv41.cli.ui import show_line, show_table
from openv41.config import ModelConfig
from openv41.model.causal_encoder_decoder import CausalEncoderDecoder
from openv41.train.config import OptimizerConfig
from openv41.train.optimizer import choose_rule, lr_factors
from openv41.train.parameter_rules import Rule, num_blocks, pattern_of

COLUMNS = ("parameter", "tensors", "shape", "update", "matrices", "lr", "decay", "source")


def show_update_rules(model: ModelConfig, optimizer: OptimizerConfig) -> None:
    """Print the rule of every parameter of a model, tensors of equal name and shape together."""
    parameters = list(CausalEncoderDecoder(model, device="meta").named_parameters())
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
        (name, counts[name, shape], _shape(shape), *_cells(rule, shape, model, optimizer))
        for (name, shape), rule in found.items()
    ]
    show_table(COLUMNS, rows)
    show_line("")
    show_table(("update", "values"), [(k, f"{v:,}") for k, v in sorted(sizes.items())])


def _cells(
    rule: Rule, shape: tuple[int, ...], model: ModelConfig, optimizer: OptimizerConfig
) -> tuple[object, ...]:
    """Update, matrices, learning rate, decay and source of one row."""
    source = "ours" if rule.is_open else "report"
    if rule.update == "load balance":
        return rule.update, "", "", "", source
    decay = optimizer.weight_decay if rule.decays else 0
    factor = lr_factors(optimizer).get(rule.part, 1.0)
    matrices = ""
    if rule.update == "muon":
        blocks = num_blocks(rule, model)
        *batch, rows, columns = shape
        count = blocks * (batch[0] if batch else 1)
        matrices = f"{count} x ({rows // blocks}, {columns})"
    return rule.update, matrices, f"x {factor:g}", decay, source


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
