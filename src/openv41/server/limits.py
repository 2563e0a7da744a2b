"""How much a client, and all clients together, may ask for. Needs no optional extra."""

from dataclasses import dataclass, fields

from openv41.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Bounds of one request and of the server. Every refusal names the bound it met."""

    max_prompt_tokens: int | None = None  # None: what the model holds
    max_output_tokens: int | None = None
    max_choices: int = 128  # prompts times n of one HTTP request
    max_messages: int = 8192  # of one chat
    max_images: int = 64  # likewise
    max_concurrency: int = 256  # sequences handed to the engine at once
    max_queue: int = 1024  # sequences that wait for that
    max_body_bytes: int = 16 << 20
    body_seconds: float = 30.0  # for the body to arrive
    request_seconds: float = 600.0  # for the whole answer
    drain_seconds: float = 30.0  # for running answers, once asked to stop

    def __post_init__(self) -> None:
        problems = []
        for field in fields(self):
            value = getattr(self, field.name)
            least = 1 if field.name.startswith("max_") and field.name != "max_queue" else 0
            if value is not None and not least <= value < float("inf"):
                problems.append(f"{field.name} is {value}, must be at least {least} and finite")
        if problems:
            raise ConfigError("limits of the server", problems)
