"""Terminal output: data goes to stdout, progress and errors to stderr."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

# Of a draft: training measures each one by itself, the engine's figures count whole prefixes.
GIVEN = "accepted if those before are"
PIPED_WIDTH = 200  # columns of a table that goes into a file or another program

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def show_line(text: str) -> None:
    """Print one line of data as it is: no markup, no wrapping."""
    out.print(escape(text), soft_wrap=True)


def show_json(data: Any) -> None:  # noqa: ANN401 -- whatever json can write
    """Print data as indented JSON."""
    out.out(json.dumps(data, indent=2, ensure_ascii=False))


def show_table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str | None = None
) -> None:
    """Print a table; columns that hold only numbers are aligned to the right."""
    cells = [[_cell(value) for value in row] for row in rows]
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for index, column in enumerate(columns):
        numeric = bool(cells) and all(_is_number(row[index]) for row in cells)
        table.add_column(escape(column), justify="right" if numeric else "left", no_wrap=True)
    for row in cells:
        table.add_row(*map(escape, row))
    wide = out if out.is_terminal else Console(file=out.file, width=PIPED_WIDTH, highlight=False)
    wide.print(table)


def show_error(message: str) -> None:
    """Print one plain error message, also where nothing else is shown."""
    err.quiet = False
    err.print(f"[bold red]error:[/] {escape(message)}", soft_wrap=True)


def note(message: str) -> None:
    """Say on stderr what is going on."""
    err.print(escape(message), soft_wrap=True)


def progress(*, quiet: bool = False) -> Progress:
    """Progress bars on stderr, to be used as a context manager."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=err, disable=quiet, transient=not err.is_terminal)


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _is_number(cell: str) -> bool:
    return cell.replace(",", "").replace(".", "").lstrip("-").isdigit()
