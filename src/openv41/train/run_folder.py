"""The folder of a run: where it goes on, and who may write there."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from openv41.errors import ConfigError, InputError, OpenV41Error
from openv41.io.file_lock import take_lock
from openv41.train.checkpoint import FOLDER as RESUME_FOLDER
from openv41.train.checkpoint import Checkpoints, Description, State, describe_differences, has_run
from openv41.train.metrics import LOG_FILE
from openv41.train.processes import Processes

RUN_FILE = "run.json"
LOCK_FILE = ".lock"  # locked by the run's first process; the system unlocks it where that dies

logger = logging.getLogger(__name__)


class RunFolder:
    """The folder of one run, which all of its processes ask; the first one looks and locks."""

    def __init__(self, path: Path, processes: Processes, description: Description) -> None:
        self.path, self.processes, self.description = path, processes, description
        self._seen: object = None

    def find_state(self, checkpoints: Checkpoints, *, resume: bool) -> State | None:
        """Where the run goes on; None at its beginning.

        Raises InputError where there is a run and none was to be resumed, the other way round, or
        while another run writes there; ConfigError for another run's folder.
        """
        found = self.processes.ask_first(lambda: self._look(checkpoints, resume=resume))
        state: State | None = self.processes.gather(found)[0]
        return state

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keep all other runs out; InputError where one is at work, or was since ``find_state``."""
        file = self.processes.ask_first(self._lock)
        try:
            yield
        finally:
            if file is not None:
                self._seen = self._content()
                file.close()

    def _lock(self) -> IO[bytes]:
        self.path.mkdir(parents=True, exist_ok=True)
        file = (self.path / LOCK_FILE).open("ab")
        try:
            _lock_or_refuse(file, self.path)
            if self._content() != self._seen:
                raise InputError(
                    f"{self.path}: another run has written there in the meantime; start again, "
                    "with --resume to go on with it"
                )
        except OpenV41Error:
            file.close()
            raise
        return file

    def _check_unlocked(self) -> None:
        """Find out at once what ``hold`` would find only after a model was made."""
        if (self.path / LOCK_FILE).exists():
            with (self.path / LOCK_FILE).open("ab") as file:
                _lock_or_refuse(file, self.path)

    def _content(self) -> object:
        """What changes with each step and with each checkpoint of a run."""
        log, checkpoints = self.path / LOG_FILE, self.path / RESUME_FOLDER
        about = log.stat() if log.exists() else None
        return about and (about.st_size, about.st_mtime_ns), sorted(checkpoints.glob("step-*"))

    def _look(self, checkpoints: Checkpoints, *, resume: bool) -> State | None:
        out = self.path
        self._check_unlocked()
        self._seen = self._content()
        has_begun = has_run(out) or (out / LOG_FILE).exists()
        if self.processes.is_restart and not resume:  # torchrun started the command once more
            resume = has_begun and self._is_own(out / RUN_FILE)
        if not resume:
            if has_begun:
                raise InputError(
                    f"{out} holds a run already; add --resume to go on with it, or name a new "
                    "folder"
                )
            return None
        if not has_begun:
            files = f"{LOG_FILE} and no {RESUME_FOLDER}/step-*"
            found = f"there is no {files}" if out.is_dir() else "there is no such folder"
            raise InputError(
                f"{out} holds no run to resume: {found}; name the folder of a run, or leave out "
                "--resume to start a new one there"
            )
        state = checkpoints.newest()
        if state is None:
            logger.warning("%s holds no checkpoint yet; the run starts from the beginning", out)
        elif problems := describe_differences(state.description, self.description):
            raise ConfigError(f"{out} cannot be resumed: it is another run", problems)
        return state

    def _is_own(self, file: Path) -> bool:
        """Whether a folder's description is that of this run."""
        return file.exists() and json.loads(file.read_bytes()) == json.loads(
            json.dumps(self.description)
        )


def _lock_or_refuse(file: IO[bytes], folder: Path) -> None:
    if not take_lock(file, folder / LOCK_FILE):
        raise InputError(
            f"{folder}: another process is at work on this run; wait for its end or stop it, or "
            "name another folder with --out"
        )
