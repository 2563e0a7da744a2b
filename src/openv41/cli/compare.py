"""``openv41 compare``: where two traces part, and by how much."""

from pathlib import Path
from typing import Annotated

import typer

from openv41.cli.ui import show_json, show_line, show_table
from openv41.io.compare import BOUNDS, Comparison, TensorDifference, compare_files

COLUMNS = ("tensor", "status", "max abs", "mean abs", "mean/std", "rows", "ties", "")


def compare(
    a: Annotated[Path, typer.Argument(help="A trace or golden file.", show_default=False)],
    b: Annotated[Path, typer.Argument(help="Another one of the same case.", show_default=False)],
    bounds: Annotated[
        str | None,
        typer.Option(help=f"What counts as equal: {', '.join(BOUNDS)}; else as the files say."),
    ] = None,
    common: Annotated[bool, typer.Option(help="Leave out what only one file has.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare two traces in forward order. Exit status: 0 equal, 1 different, 2 unusable."""
    result = compare_files(a, b, bounds=bounds, common=common)
    if as_json:
        show_json(result.as_dict())
    else:
        _show(result)
    raise typer.Exit(0 if result.is_equal else 1)


def _show(result: Comparison) -> None:
    show_table(COLUMNS, [_row(t) for t in result.tensors if t.status != "equal"])
    equal = sum(t.status == "equal" for t in result.tensors)
    show_line(f"{equal} of {len(result.tensors)} tensors are identical (bounds: {result.bounds})")
    if result.first is None:
        show_line("no divergence" if result.is_equal else "tensors are missing")
        return
    what = "exact ties fell another way" if result.first.status == "tie" else result.first.reason
    show_line(f"first divergence: {result.first.name}: {what}")
    for row in result.first.rows:
        margin = "no margin known" if row.margin is None else f"margin {row.margin:.3g}"
        kind = "a tie" if row.is_tie else margin
        show_line(f"  row {row.row}: {list(row.only_a)} against {list(row.only_b)}, {kind}")


def _row(tensor: TensorDifference) -> list[object]:
    numbers = (tensor.max_abs, tensor.mean_abs, tensor.mean_over_std)
    cells: list[object] = [tensor.name, tensor.status]
    cells += ["" if value is None else f"{value:.2e}" for value in numbers]
    cells += ["" if value is None else value for value in (tensor.rows_differing, tensor.ties)]
    return [*cells, tensor.reason]
