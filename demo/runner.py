"""Runs the stages of the demo: says what it does, times it, explains failures."""

import itertools
import shlex
import subprocess
import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from openv41.errors import OpenV41Error


class StageError(OpenV41Error):
    """A stage of the demo that failed: which, how, and what to do."""


class Runner:
    """Shows and times stages; commands run as a user would type them."""

    def __init__(self, console: Console, num_stages: int) -> None:
        self.console = console
        self.num_stages = num_stages
        self.seconds: dict[str, float] = {}
        self._start = time.perf_counter()

    @property
    def total_seconds(self) -> float:
        """Seconds since the runner was made."""
        return time.perf_counter() - self._start

    @contextmanager
    def stage(self, name: str, what: str) -> Iterator[None]:
        """Announce a stage, time it, and name it in the error if it fails."""
        number = len(self.seconds) + 1
        self.console.print(f"[bold cyan]\\[{number}/{self.num_stages}][/] [bold]{name}[/]  {what}")
        start = time.perf_counter()
        try:
            yield
        except StageError:
            raise
        except OpenV41Error as error:
            raise StageError(f"stage {name!r} failed: {error}") from error
        self.seconds[name] = time.perf_counter() - start
        self.say(f"{self.seconds[name]:.1f} s")

    def say(self, text: str) -> None:
        """Print one indented line of plain text."""
        self.console.print(f"      [dim]{escape(text)}[/]", soft_wrap=True)

    def command(self, *words: str | Path, capture: bool = False) -> str:
        """Run ``openv41 ...``; its progress stays visible, its output is returned on request."""
        arguments = [str(word) for word in words]
        self.say(f"$ openv41 {shown(words)}")
        done = subprocess.run(
            [Path(sysconfig.get_path("scripts")) / "openv41", *arguments],
            stdout=subprocess.PIPE if capture else None,
            text=True,
            encoding="utf-8",
            check=False,
        )
        if done.returncode:
            raise StageError(
                f"'openv41 {shown(words)}' ended with status {done.returncode}; its message "
                "stands above. Run that line alone to look closer."
            )
        return done.stdout or ""


def shown(words: Sequence[str | Path]) -> str:
    """Write a command as a shell reads it; several files of one folder become a pattern."""
    pieces = []
    for pattern, group in itertools.groupby(words, _pattern):
        members = [shlex.quote(str(word)) for word in group]
        pieces += [pattern] if pattern and len(members) > 2 else members
    return " ".join(pieces)


def _pattern(word: str | Path) -> str:
    return f"{word.parent}/*{word.suffix}" if isinstance(word, Path) and word.suffix else ""
