"""Write the list of every command, argument and option: ``python -m tests.meta.cli_options``."""

from pathlib import Path

import typer

from openv41.cli.main import app
from openv41.cli.on_demand import OnDemand

PINNED = Path(__file__).parent / "cli_options.txt"


def current_options():
    """One line per argument or option, with the environment variables the package reads."""
    lines = ["environment OPENV41_KERNELS", *_lines(typer.main.get_command(app), "openv41")]
    return "\n".join(lines) + "\n"


def _lines(command, path):
    if isinstance(command, OnDemand):
        command = command.load()
    for parameter in command.params:
        names = " ".join([*parameter.opts, *parameter.secondary_opts])
        yield f"{path} {parameter.param_type_name} {names}"
        if parameter.envvar:
            yield f"environment {parameter.envvar}"
    for name, below in sorted(getattr(command, "commands", {}).items()):
        yield from _lines(below, f"{path} {name}")


if __name__ == "__main__":
    PINNED.write_text(current_options(), encoding="utf-8")
