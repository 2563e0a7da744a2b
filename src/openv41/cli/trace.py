"""``openv41 trace``: what a checkpoint computes, tensor by tensor."""

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from openv41.cli.numerics import TracedNumerics
from openv41.cli.ui import note
from openv41.errors import InputError
from openv41.io.checkpoint import load_model
from openv41.io.tensor_files import write_tensors
from openv41.io.trace import TRACE_DTYPES, TRACE_NUMERICS, read_feed, run_case
from openv41.io.trace_inputs import Inputs


class Case(StrEnum):
    """Cases of an inputs file."""

    PREFILL = "prefill"
    DECODE = "decode"
    BATCH = "batch"
    REPLAY = "replay"
    IMAGE = "image"


def trace(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint folder.", show_default=False)],
    *,
    inputs: Annotated[Path, typer.Option(help="Inputs file.", show_default=False)],
    out: Annotated[Path, typer.Option(help="File to write.", show_default=False)],
    case: Annotated[Case, typer.Option(help="What to run.")] = Case.PREFILL,
    numerics: Annotated[TracedNumerics, typer.Option(help="Where to round.")] = TracedNumerics.F32,
    feed: Annotated[
        Path | None,
        typer.Option(help="A prefill_released file: each layer starts from its tensors."),
    ] = None,
) -> None:
    """Run a case and write its tensors under the names that the golden files use."""
    if feed is not None and (case, numerics) != (Case.PREFILL, TracedNumerics.RELEASED):
        raise InputError("--feed works with --case prefill --numerics released")
    _check_free(out, checkpoint, [inputs] if feed is None else [inputs, feed])
    given = Inputs.read(inputs)
    model = load_model(checkpoint, numerics=TRACE_NUMERICS[numerics], dtype=TRACE_DTYPES[numerics])
    fed = None if feed is None else read_feed(feed, model, given)
    tensors = run_case(model, given, case.value, numerics.value, fed)
    about = {"case": case.value, "numerics": numerics.value, "fed": str(feed is not None).lower()}
    write_tensors(out, tensors, {"format": "pt", **about})
    note(f"{out}: {len(tensors)} tensors")


def _check_free(out: Path, checkpoint: Path, read: Sequence[Path]) -> None:
    """Refuse to overwrite what the command reads."""
    place = out.resolve()
    if place in {path.resolve() for path in read}:
        raise InputError(f"{out} is read by this command; name another file for --out")
    inside = out.exists() and place.is_relative_to(checkpoint.resolve())
    if inside or place in {path.resolve() for path in checkpoint.glob("*")}:
        raise InputError(f"{out} belongs to the checkpoint; name another file for --out")
