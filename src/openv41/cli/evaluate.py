"""``openv41 evaluate``: tasks of lm-eval on a checkpoint."""

import json
from pathlib import Path
from typing import Annotated

import typer

from openv41.cli.device import resolve_device
from openv41.cli.numerics import Numerics
from openv41.cli.ui import progress, show_table
from openv41.engine.engine import Engine
from openv41.engine.harness import run_tasks, scores
from openv41.engine.scoring import Scorer
from openv41.errors import InputError
from openv41.io.atomic import write_atomic

COLUMNS = ("task", "metric", "filter", "value", "standard error", "samples")


def evaluate(
    checkpoint: Annotated[Path, typer.Argument(help="Folder of the checkpoint.")],
    *,
    tasks: Annotated[
        list[str], typer.Option("--tasks", help="Name of a task, or a YAML file; may be repeated.")
    ],
    limit: Annotated[int | None, typer.Option(min=1, help="Only this many samples each.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write all results as JSON here.")] = None,
    numerics: Annotated[
        Numerics | None, typer.Option(help="Where to round; else as it is stored.")
    ] = None,
    device: Annotated[str, typer.Option(help="Where to run, such as cpu or cuda.")] = "cpu",
) -> None:
    """Run tasks of lm-eval and print their figures."""
    names = [name.strip() for word in tasks for name in word.split(",") if name.strip()]
    if not names:
        raise InputError("--tasks names no task; give the name of one, or a YAML file")
    if out is not None and not out.absolute().parent.is_dir():
        raise InputError(f"{out}: there is no folder {out.absolute().parent}; make it first")
    rounding = None if numerics is None else numerics.value
    engine = Engine.load(checkpoint, numerics=rounding, device=resolve_device(device))
    with progress() as bar:
        task = bar.add_task("requests", total=None)
        found = run_tasks(Scorer(engine, lambda count: bar.advance(task, count)), names, limit)
    if out is not None:
        write_atomic(out, json.dumps(found, indent=2, default=str).encode() + b"\n")
    rows = [
        (s.task, s.metric, s.filter, s.value, "" if s.error is None else s.error, s.samples)
        for s in scores(found)
    ]
    show_table(COLUMNS, rows)
