"""Lines that take long to make: kept as they come, and a file once all are there."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from openv41.errors import DataError, InputError
from openv41.io.atomic import atomic_path
from openv41.io.file_lock import take_lock

SUFFIX = ".partial"


class ResumableLines:
    """Rounds of lines beside the file to write, each whole or not there; used in a with block.

    ``about`` is everything that the lines depend on. Rounds that a process left behind which was
    killed are taken over if they are about the same.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        if path.is_dir():
            raise InputError(f"{path} is a folder; name a file")
        self.path, self.partial = path, path.with_name(path.name + SUFFIX)
        self._head = json.dumps({"about": dict(about)}).encode() + b"\n"
        self._about = json.loads(self._head)["about"]
        self.rounds = 0  # that are there

    def __enter__(self) -> "ResumableLines":
        self._file = self.partial.open("a+b")
        try:
            if not take_lock(self._file, self.partial):
                raise InputError(
                    f"{self.partial}: another process is writing it; wait for its end, or name "
                    "another file"
                )
            self._take_over()
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self.rounds:
            self.partial.unlink(missing_ok=True)
        self._file.close()

    def add(self, lines: Sequence[str]) -> None:
        """Keep one more round; it is on the disk afterwards."""
        self._file.write(json.dumps(list(lines)).encode() + b"\n")
        _sync(self._file)
        self.rounds += 1

    def finish(self) -> None:
        """Write all lines into the file, which appears whole; nothing else is left."""
        self._file.seek(0)
        self._file.readline()  # what the lines are about
        with atomic_path(self.path) as temporary, temporary.open("wb") as file:
            for content in self._file:
                file.writelines(line.encode() + b"\n" for line in json.loads(content))
        self.rounds = 0

    def _take_over(self) -> None:
        """Count the rounds that are there, and drop a half-written last one."""
        self._file.seek(0)
        if (head := self._file.readline()).endswith(b"\n"):
            self._check(head)
            whole = len(head)
            for content in self._file:
                if not content.endswith(b"\n"):
                    break
                whole, self.rounds = whole + len(content), self.rounds + 1
            self._file.truncate(whole)
        else:
            self._file.truncate(0)
            self._file.write(self._head)
        _sync(self._file)

    def _check(self, head: bytes) -> None:
        """Raise for rounds that are about something else."""
        try:
            about = dict(json.loads(head)["about"])
        except (ValueError, KeyError, TypeError):
            raise DataError(f"{self.partial} was not written by this command; remove it") from None
        differing = [
            f"{key}: {about.get(key)!r}, now {self._about.get(key)!r}"
            for key in sorted({*about, *self._about})
            if about.get(key) != self._about.get(key)
        ]
        if differing:
            raise InputError(
                f"{self.partial} holds what an interrupted command has made, and this one differs "
                f"({'; '.join(differing)}); give the same options to go on, or remove it"
            )


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
