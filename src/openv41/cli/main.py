"""Entry point: one line per command; each command lives in its own file."""

from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from openv41.cli.chat import chat
from openv41.cli.compare import compare
from openv41.cli.convert import convert
from openv41.cli.data import data_app
from openv41.cli.dspark import dspark_app
from openv41.cli.dspark_regenerate import regenerate_command
from openv41.cli.evaluate import evaluate
from openv41.cli.fixture import fixture
from openv41.cli.generate import generate
from openv41.cli.inspect import inspect_app
from openv41.cli.plan import plan
from openv41.cli.report import report
from openv41.cli.serve import serve
from openv41.cli.tokenizer import tokenizer_app
from openv41.cli.trace import trace
from openv41.cli.train import train
from openv41.cli.ui import show_error, show_line
from openv41.cli.where import where
from openv41.errors import OpenV41Error


class Commands(TyperGroup):
    """Our errors and the system's become one plain message and status 2; the rest are bugs."""

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401 -- click's own signature
        """Run the command."""
        try:
            return super().invoke(ctx)
        except OpenV41Error as error:
            show_error(str(error))
            raise typer.Exit(2) from None
        except BrokenPipeError:
            raise
        except OSError as error:  # a path or a disk that refuses
            where = "" if error.filename is None else f"{error.filename}: "
            show_error(f"{where}{error.strerror or error}")
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            show_error("interrupted")
            raise typer.Exit(130) from None


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> bool:
    if wanted:
        show_line(version("openv41"))
        raise typer.Exit
    return wanted


@app.callback()
def _root(
    show_version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Independent implementation of the DeepSeek-V4.1-Flash system."""


app.add_typer(data_app, name="data")
dspark_app.command("regenerate")(regenerate_command)
app.add_typer(dspark_app, name="dspark")
app.add_typer(inspect_app, name="inspect")
app.add_typer(tokenizer_app, name="tokenizer")
app.command()(compare)
app.command()(convert)
app.command()(generate)
app.command()(chat)
app.command()(evaluate)
app.command()(fixture)
app.command()(plan)
app.command()(report)
app.command()(serve)
app.command()(trace)
app.command()(train)
app.command()(where)


def main() -> None:
    """Run the command line."""
    app()
