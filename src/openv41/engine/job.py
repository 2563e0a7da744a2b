"""A request on its way through the engine."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from openv41.engine.features import Features
from openv41.engine.images import JobImages
from openv41.engine.logprobs import Alternatives
from openv41.engine.prefix_tree import Node
from openv41.engine.request import Event, FinishReason, Request, TokenLogprob
from openv41.engine.sampler import Draft, Sampler
from openv41.engine.stops import TextStream
from openv41.layers.probe import join_rows
from openv41.model.prefill import PrefillMode, PromptRows

Sink = Callable[[Event], None]


@dataclass(eq=False)
class Job:
    """What the engine knows of one request.

    Positions below ``done`` are computed; the others of ``tokens`` (prompt and answer) are fed
    next. After a preemption everything is computed again, the sampler goes on where it was.
    """

    number: int
    request: Request
    sampler: Sampler
    text: TextStream
    sink: Sink
    mode: PrefillMode
    images: JobImages
    features: Features  # that the drafter has not had
    tokens: list[int] = field(default_factory=list)
    done: int = 0
    drafts: list[Draft] = field(default_factory=list)  # behind the tokens, for the next step
    rows: PromptRows | None = None  # of the prompt, while it is computed
    cached_tokens: int | None = None  # of the prompt, found when it started first
    is_approximate: bool = False  # its state after a bounded replay is not that of the model
    snapshot_at: int = 0  # position of the last snapshot of its windows
    kept_pages: int = 0  # whole pages that the prefix cache has been told of
    kept_node: Node | None = None  # where its tree has the last of them
    page_keys: list[bytes] = field(default_factory=list)  # of its whole pages on disk
    is_alone: bool = False  # runs beside nobody until its next token: a batch with it failed
    last: Event | None = None  # of its answer, until it is sent
    finished: FinishReason | None = None
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    prompt_top: list[Alternatives] = field(default_factory=list)
    choices: dict[str, list[Tensor]] = field(default_factory=dict)  # recorded, by name

    @property
    def pending(self) -> int:
        """Tokens that are not computed yet."""
        return len(self.tokens) - self.done

    @property
    def is_prefill(self) -> bool:
        """Whether more is missing than the token drawn last."""
        return self.rows is not None

    @property
    def num_output(self) -> int:
        """Tokens drawn so far."""
        return len(self.tokens) - len(self.request.prompt)

    def upcoming(self, count: int) -> list[int]:
        """What the next ``count`` positions hold: known tokens, then drafts."""
        known = self.tokens[self.done : self.done + count]
        return known + [draft.token for draft in self.drafts[: count - len(known)]]

    def keys(self, start: int, stop: int) -> list[int | bytes]:
        """What the prefix cache knows the positions ``start`` to ``stop`` - 1 by."""
        return self.images.keys(self.tokens[start:stop], start)

    @property
    def needs_all_rows(self) -> bool:
        """Whether the request asks for something of every prompt row."""
        asked = self.request
        return asked.prompt_logprobs is not None or self.uses_choices

    @property
    def uses_choices(self) -> bool:
        """Whether discrete choices are recorded or replayed."""
        return self.request.record_choices or self.request.choices is not None

    def restart(self) -> None:
        """Forget what was computed: its pages are gone."""
        self.done = self.snapshot_at = self.kept_pages = 0
        self.rows, self.kept_node, self.is_approximate = None, None, False
        self.choices.clear()
        self.drafts.clear()
        self.features.clear()

    def drop_choices(self, count: int) -> None:
        """Forget the choices recorded last: of drafts that do not hold."""
        if count:
            for parts in self.choices.values():
                parts[-1] = parts[-1][:-count]

    def all_choices(self) -> dict[str, Tensor] | None:
        """Recorded choices, a row per computed position."""
        if not self.request.record_choices:
            return None
        return {name: join_rows(parts) for name, parts in self.choices.items()}
