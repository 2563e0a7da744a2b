"""What the engine is asked, and what it answers."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from torch import Tensor

from openv41.config import ModelConfig
from openv41.engine.constraint import Constraint
from openv41.engine.paged_store import CacheConfig
from openv41.engine.sampler import SamplingConfig
from openv41.errors import ConfigError, OpenV41Error
from openv41.io.image_processor import ProcessedImage
from openv41.model.recorded_choices import problems_of

MAX_STOP = 1024  # characters of a stop string: each one's table is made before it can be found


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"  # EOS, a stop id or a stop string
    LENGTH = "length"  # max_tokens, or the model's last position
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and the natural logarithm of its probability."""

    token: int
    logprob: float


@dataclass(frozen=True, eq=False, kw_only=True)
class Request:
    """One prompt and how to go on from it.

    ``images`` stand in the order of the prompt, which holds the image token once for each position
    of their spans. ``logprobs`` and ``prompt_logprobs`` count the alternatives listed beside each
    token's own log-probability; None lists nothing. ``choices`` are discrete choices to replay, as
    recorded by ``record_choices``. ``constraint`` says which tokens the answer may hold.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    images: tuple[ProcessedImage, ...] = ()
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    constraint: Constraint | None = None
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    record_choices: bool = False
    choices: Mapping[str, Tensor] | None = None

    def __post_init__(self) -> None:
        problems = []
        if not self.prompt:
            problems.append("the prompt holds no token; give at least BOS")
        if self.max_tokens < 1:
            problems.append(f"max_tokens is {self.max_tokens}, must be at least 1")
        if any(not s for s in self.stop):
            problems.append("stop holds an empty string; leave it out")
        if (longest := max(map(len, self.stop), default=0)) > MAX_STOP:
            problems.append(
                f"stop holds a string of {longest} characters, must be at most {MAX_STOP}"
            )
        problems += [
            f"{name} is {count}, must be at least 0"
            for name in ("logprobs", "prompt_logprobs")
            if (count := getattr(self, name)) is not None and count < 0
        ]
        if problems:
            raise ConfigError("request", problems)


def check_room(request: Request, config: ModelConfig, cache: CacheConfig) -> None:
    """Raise ConfigError for a request that a model cannot read or its cache cannot hold."""
    problems = []
    if outside := [t for t in request.prompt if not 0 <= t < config.vocab_size]:
        problems.append(
            f"the prompt holds token {outside[0]}; the vocabulary has {config.vocab_size}"
        )
    positions = cache.num_pages * cache.page_size
    wanted = len(request.prompt) + request.max_tokens - 1
    room = min(config.max_position, positions)
    if len(request.prompt) > room:
        problems.append(f"the prompt has {len(request.prompt)} tokens; there is room for {room}")
    elif wanted > positions:
        problems.append(
            f"prompt and answer may take {wanted} positions; the cache has {positions}: lower "
            "max_tokens or give it more pages"
        )
    length = len(request.prompt) + request.max_tokens
    found = problems_of(request.choices or {}, config, length)
    problems += [f"choices: {problem}; give the record of this model and text" for problem in found]
    if problems:
        raise ConfigError("request", problems)


@dataclass(frozen=True, kw_only=True)
class Event:
    """A step of an answer: a new token, the end, or both.

    ``text`` is what became readable: bytes of an unfinished character and of a possible stop
    string wait for what follows. The first event tells about the prompt, the last one has a
    ``finish_reason``.
    """

    token: int | None = None
    text: str = ""
    logprob: TokenLogprob | None = None
    top: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None
    is_own_fault: bool = False  # of the request, not of the engine
    cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    prompt_top: tuple[tuple[TokenLogprob, ...], ...] = ()
    choices: Mapping[str, Tensor] | None = None  # of the last event, where they are recorded


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A finished request. ``tokens`` hold neither EOS nor a stop id; ``text`` no stop string."""

    tokens: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] = ()
    top: tuple[tuple[TokenLogprob, ...], ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()  # None for the first token
    prompt_top: tuple[tuple[TokenLogprob, ...], ...] = ()
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    choices: Mapping[str, Tensor] | None = None
    error: str | None = None


def refuse_failed(answers: Iterable[Answer], what: str) -> None:
    """Raise OpenV41Error for the first answer that failed; ``what`` says what it was for."""
    for answer in answers:
        if answer.finish_reason is FinishReason.ERROR:
            raise OpenV41Error(f"{what} failed: {answer.error}")
