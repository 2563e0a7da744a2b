"""``openv41 where``: from a section of the report to files and lines."""

from typing import Annotated

import typer

from openv41.cli.ui import note, out, show_line
from openv41.report_map import PENDING, as_markdown, mentions_of


def where(
    section: Annotated[str, typer.Argument(help="Section of the report, such as 2.3.2.")] = "2",
    markdown: Annotated[bool, typer.Option(help="Print the page docs/report_map.md.")] = False,
) -> None:
    """Print the files that implement a section of the report, with line numbers."""
    if markdown:
        out.out(as_markdown(), end="", highlight=False)
        return
    number = section.removeprefix("§").rstrip(".")
    for mention in mentions_of(number):
        name = f"{mention.name}: " if mention.name else ""
        show_line(f"§{mention.section}  src/{mention.path}:{mention.line}  {name}{mention.summary}")
    if number in PENDING:
        note(f"pending: {PENDING[number]}")
