"""Every error a user can cause. Internal invariants use assert instead."""

from collections.abc import Sequence


class OpenV41Error(Exception):
    """Base class: the CLI prints these without a traceback."""


class ConfigError(OpenV41Error, ValueError):
    """A configuration that cannot work, with every problem listed."""

    def __init__(self, where: str, problems: Sequence[str]) -> None:
        lines = "\n".join(f"  - {p}" for p in problems)
        super().__init__(f"{where}: {len(problems)} problem(s)\n{lines}")
        self.where = where
        self.problems = tuple(problems)


class CheckpointError(OpenV41Error):
    """A checkpoint that cannot be read or written: names the file, the tensor and the reason."""


class InputError(OpenV41Error, ValueError):
    """Arguments, prompts or batches that the program cannot take."""


class DataError(OpenV41Error):
    """Text, token shards or a tokenizer that cannot be used."""


class ImageError(OpenV41Error):
    """An image that cannot be read or is beyond the limits: names the image."""


class KernelUnavailableError(OpenV41Error, RuntimeError):
    """A fast kernel was required and cannot run on these inputs."""


class LostProcessError(OpenV41Error, RuntimeError):
    """Another process of a run of several has ended, and this one cannot go on without it."""


class OverloadedError(OpenV41Error, RuntimeError):
    """The engine cannot take another request now; a later one may find room."""


class PromptError(OpenV41Error, ValueError):
    """A conversation that cannot be encoded, or an answer that is not in the prompt format.

    ``param`` is the field of a request that it is about, where one alone is.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param
