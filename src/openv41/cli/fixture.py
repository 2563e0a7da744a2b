"""``openv41 fixture``: a random checkpoint that does not let a wrong port pass by luck."""

from pathlib import Path
from typing import Annotated

import typer

from openv41.cli.ui import note
from openv41.io.fixture import DEFAULT, FixtureOptions, make_fixture
from openv41.presets import NAMES


def fixture(
    folder: Annotated[Path, typer.Argument(help="New folder.", show_default=False)],
    *,
    seed: Annotated[int, typer.Option(help="Same seed and sizes, same bytes.")] = 0,
    preset: Annotated[str, typer.Option(help=f"{DEFAULT}, {NAMES}.")] = DEFAULT,
    quantised: Annotated[
        bool, typer.Option("--quantised/--plain", help="Released FP8 and FP4, or bfloat16.")
    ] = True,
    ties: Annotated[bool, typer.Option(help="Exact ties in index scores.")] = True,
    length: Annotated[int, typer.Option(help="Tokens of the text.")] = 127,
    vocab_size: Annotated[int | None, typer.Option(help="Instead of the preset's.")] = None,
    hidden_size: Annotated[int | None, typer.Option(help="Instead of the preset's.")] = None,
    num_experts: Annotated[int | None, typer.Option(help="Instead of the preset's.")] = None,
    drafter: Annotated[
        bool | None,
        typer.Option(
            "--drafter/--no-drafter", help="Tensors mtp.* too; else as the preset has a drafter."
        ),
    ] = None,
    outputs: Annotated[bool, typer.Option(help="Compute float64 outputs.")] = True,
) -> None:
    """Write a random checkpoint with tokenizer, inputs, outputs and README."""
    options = FixtureOptions(
        seed=seed,
        preset=preset,
        quantised=quantised,
        ties=ties,
        length=length,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_experts=num_experts,
        drafter=drafter,
        outputs=outputs,
    )
    rules = make_fixture(folder, options)
    for rule in rules:
        if not rule.is_met:
            note(f"not exercised: {rule.name}: {rule.value:g}, must be at least {rule.at_least:g}")
    met = f"{sum(rule.is_met for rule in rules)} of {len(rules)} rules are met"
    note(f"{folder}: {met if rules else 'written without outputs, no rule is measured'}")
