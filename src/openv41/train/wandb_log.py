"""Figures of a run in Weights & Biases, where it is asked for; its own settings decide where to."""

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from openv41.errors import InputError
from openv41.io.atomic import write_atomic

ID_FILE = "wandb_id.txt"  # a run that is resumed goes on under the id that it has there


class WandbLog:
    """One wandb run for the run in ``folder``, of the project of this name.

    Raises InputError where wandb is not installed or does not begin.
    """

    def __init__(self, project: str, folder: Path, settings: Mapping[str, Any]) -> None:
        try:
            import wandb  # noqa: PLC0415 -- an optional extra
        except ImportError:
            raise InputError(
                "--wandb needs the wandb package; pip install 'openv41[wandb]', or leave out "
                "--wandb: log.jsonl holds the same figures"
            ) from None
        try:
            self._run = wandb.init(
                project=project,
                name=folder.name,
                id=_id_of(folder),
                resume="allow",
                dir=str(folder),
                config=dict(settings),
            )
        except (wandb.Error, OSError) as error:
            raise InputError(
                f"--wandb {project}: wandb did not begin: {error}; log in with 'wandb login', or "
                "write without a network with 'wandb offline'"
            ) from None

    def add(self, values: Mapping[str, float], step: int) -> None:
        """Send the figures of a step; those of a step that was sent before stay as they are."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()


def _id_of(folder: Path) -> str:
    path = folder / ID_FILE
    if not path.is_file():
        write_atomic(path, secrets.token_hex(4).encode() + b"\n")
    return path.read_text(encoding="utf-8").strip()
