"""A peer in its own process: loads, checks itself, then takes samples when it is told to.

A process stays for the rows of a module; one that failed ends, and the next row starts another. The
child writes one JSON line when it is ready and one for every request, on a pipe of its own;
what it prints itself goes to a log beside the peers.
"""

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.h200.candidates import NotRunError
from benchmarks.record import REPOSITORY

ANSWER_SECONDS = 60.0


class PeerProcess:
    """Looks to the harness like a candidate of this process, from ``begin`` to ``rest``."""

    error, mode, what = 0.0, "", ""  # of the case that has begun

    def __init__(
        self, name: str, folder: Path, limit: float, module: str = "benchmarks.h200.peers.child"
    ) -> None:
        """A case may take ``limit`` seconds to begin."""
        self.name = f"peer {name}"
        self.is_lost = False
        self._limit = limit
        self._end, child_end = os.pipe()
        self._rest = b""
        log = folder / f"{name.replace(':', '_')}.log"
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, name, str(child_end), str(folder.resolve())],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                pass_fds=(child_end,),
                cwd=REPOSITORY,
            )
        os.close(child_end)

    def begin(self, shape: Mapping[str, Any]) -> None:
        """Make and check the case of a shape. Raises NotRunError, and is lost then."""
        self._send({"shape": dict(shape)})
        ready = self._answer(self._limit)
        self.error, self.mode, self.what = ready["error"], ready["mode"], ready["what"]

    def rest(self) -> None:
        """Free what the case held."""
        self._send({"rest": True})

    def count(self, clock: object, seconds: float) -> int:
        """Samples of one turn."""
        self._send({"count": seconds})
        return int(self._answer(ANSWER_SECONDS)["count"])

    def sample(self, clock: object, count: int) -> list[float]:
        """Microseconds, by the child's own clock, which works as ours."""
        self._send({"sample": count})
        return list(self._answer(ANSWER_SECONDS)["samples"])

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._end)

    def _send(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None, "the process has a pipe"
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the answer says so

    def _answer(self, seconds: float) -> dict[str, Any]:
        """The next answer; whoever does not give one is lost."""
        try:
            return self._next_answer(seconds)
        except NotRunError:
            self.is_lost = True
            raise

    def _next_answer(self, seconds: float) -> dict[str, Any]:
        until = time.monotonic() + seconds
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self._end], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise NotRunError(f"no answer within {seconds:.0f} s")
            more = os.read(self._end, 1 << 16)
            if not more:
                raise NotRunError(f"ended with code {self._process.wait()}")
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "not_run" in answer:
            raise NotRunError(answer["not_run"])
        return answer


class Peers:
    """The processes of a module's peers."""

    def __init__(self, folder: Path | None, limit: float) -> None:
        self._folder, self._limit = folder, limit
        self._running: dict[str, PeerProcess] = {}

    def begin(self, name: str, shape: Mapping[str, Any]) -> PeerProcess:
        """A peer whose case of this shape is ready to be timed. Raises NotRunError."""
        if self._folder is None:
            raise NotRunError("no folder of peers was named")
        if name in self._running and self._running[name].is_lost:
            self._running.pop(name).close()
        if name not in self._running:
            self._running[name] = PeerProcess(name, self._folder, self._limit)
        self._running[name].begin(shape)
        return self._running[name]

    def close(self) -> None:
        """End all processes."""
        while self._running:
            self._running.popitem()[1].close()
