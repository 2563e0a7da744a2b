"""Write the list of every command, argument and option: ``python -m tests.meta.cli_options``."""

from pathlib import Path

import typer

from openv41.cli.main import app

PINNED = Path(__file__).parent / "cli_options.txt"


def current_options():
    """One line per argument or option, with the environment variables the package reads."""
    lines = ["environment OPENV41_KERNELS"]
    group = typer.main.get_command(app)
    commands = {"": group, **group.commands}
    for name, command in sorted(commands.items()):
        for parameter in command.params:
            kind = parameter.param_type_name
            names = " ".join([*parameter.opts, *parameter.secondary_opts])
            lines.append(f"openv41 {name} {kind} {names}".replace("  ", " "))
            lines += [f"environment {variable}" for variable in [parameter.envvar] if variable]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PINNED.write_text(current_options(), encoding="utf-8")
