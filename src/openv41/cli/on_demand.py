"""Commands whose files are imported once they are invoked: a list of them needs no torch."""

import importlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand


class Place(NamedTuple):
    """Where a command is, and its line in the list."""

    line: str  # the first paragraph of the function's docstring
    module: str | None = None  # in openv41.cli; None where it has the command's name
    function: str | None = None  # likewise


class OnDemand(TyperCommand):
    """Stands for a command in lists, and gives way to it where it is invoked."""

    def __init__(self, name: str, place: Place) -> None:
        super().__init__(name, help=place.line)
        self._module, self._function = place.module or name, place.function or name

    def load(self) -> TyperCommand:
        """Import the command."""
        module = importlib.import_module(f"openv41.cli.{self._module}")
        app = typer.Typer(add_completion=False)
        app.command(self.name)(getattr(module, self._function))
        command = typer.main.get_command(app)
        assert isinstance(command, TyperCommand), f"{self.name} is {command}"
        return command

    def make_context(self, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401 -- of click
        """Import the command and read its arguments; the context runs it."""
        return self.load().make_context(*arguments, **options)


def on_demand(table: Mapping[str, Place]) -> dict[str, Any]:
    """Commands of a group, by name."""
    return {name: OnDemand(name, place) for name, place in table.items()}
