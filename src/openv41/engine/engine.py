"""The inference engine: many requests, one model, packed caches. Report §2.2.

``step`` runs one batch in which prompts and decoding requests stand side by side. Every shortcut
(CED prefill, prefix reuse, the candidate pool) goes through the model's one forward.
"""

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from openv41.config import NUMERICS
from openv41.engine.answering import Collector, take, take_prompt
from openv41.engine.captured import computing
from openv41.engine.constraint import ConstraintError
from openv41.engine.decode_graph import captured_steps
from openv41.engine.drafting import Drafting
from openv41.engine.draw_graph import Draws
from openv41.engine.features import Features
from openv41.engine.fingerprint import fingerprint
from openv41.engine.images import ImageCache, JobImages, find_spans, join
from openv41.engine.job import Job, Sink
from openv41.engine.joint_sampling import Drawing
from openv41.engine.paged_store import CacheConfig, PagedStore
from openv41.engine.prefix_cache import PrefixCache, open_disk
from openv41.engine.request import Answer, Event, FinishReason, Request, check_room
from openv41.engine.sampler import Sampler
from openv41.engine.scheduler import ScheduleConfig, Scheduler
from openv41.engine.speculation import (
    Drafter,
    SpeculationConfig,
    Speculator,
    VerifyAll,
    VerifyRule,
)
from openv41.engine.stats import EngineStats, Figures
from openv41.engine.step_probe import StepProbe
from openv41.engine.stops import TextStream
from openv41.errors import ConfigError, InputError, OverloadedError
from openv41.io.checkpoint import LoadDtype, load_model
from openv41.io.engram_store import EngramPlacement
from openv41.io.hf_config import read_variant
from openv41.io.tokenizer import TextTokenizer, load_tokenizer
from openv41.layers.batch import Batch
from openv41.model.causal_encoder_decoder import CausalEncoderDecoder, Output
from openv41.model.prefill import PrefillMode, ReplayVariant, find_cut, layer_rows

logger = logging.getLogger(__name__)

WEIGHTS: dict[str, LoadDtype] = {"released": "stored", "bf16qat": torch.bfloat16}


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """How an engine runs."""

    cache: CacheConfig = field(default_factory=CacheConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    prefill: PrefillMode = PrefillMode.EXACT
    prefill_cut: int | None = None  # first layer that skips prompt rows; None: last kv source
    replay_variant: ReplayVariant = ReplayVariant.FIRST_LAYER_FULL_WINDOW
    prefix_cache: bool = True
    max_snapshots: int = 64  # of windows, for hits without a replay
    disk_folder: Path | None = None  # persistent tier of the prefix cache
    disk_bytes: int = 1 << 30
    image_cache_bytes: int = 256 << 20  # of span embeddings
    engram: EngramPlacement = "resident"  # of a model that ``Engine.load`` loads
    deterministic: bool = False  # likewise: an answer does not depend on its neighbours
    speculation: SpeculationConfig | None = field(default_factory=SpeculationConfig)  # None: off
    cuda_graphs: bool = True  # of steps that decode, on a CUDA device

    def __post_init__(self) -> None:
        problems = []
        if self.max_snapshots < 0:
            problems.append(f"max_snapshots is {self.max_snapshots}, must be at least 0")
        if self.image_cache_bytes < 0:
            problems.append(f"image_cache_bytes is {self.image_cache_bytes}, must be at least 0")
        if self.disk_folder is not None and not self.prefix_cache:
            problems.append("disk_folder is set but prefix_cache is off; switch it on")
        if problems:
            raise ConfigError("engine", problems)


class Engine:
    """Runs requests on a model; but for ``stats``, one thread at a time (see AsyncEngine)."""

    def __init__(
        self,
        model: CausalEncoderDecoder,
        tokenizer: TextTokenizer,
        config: EngineConfig = EngineConfig(),
        *,
        fingerprint: str = "",
        drafter: Drafter | None = None,
        speculator: Speculator | None = None,
    ) -> None:
        """``drafter`` None takes the model's, if it has one; ``speculator`` None verifies all."""
        self.model, self.tokenizer, self.config = model, tokenizer, config
        weight = model.norm.weight
        self.device = weight.device
        drafter = (drafter or model.drafter) if config.speculation else None
        self.store = PagedStore(
            model.config,
            model.numerics,
            config.cache,
            dtype=weight.dtype,
            device=weight.device,
            draft_stages=0 if drafter is None else drafter.num_stages,
        )
        self.num_tokens = min(tokenizer.vocab_size, model.config.vocab_size)
        self.drafting: Drafting | None = None
        if drafter is not None and config.speculation is not None:
            self.drafting = Drafting(
                drafter,
                speculator or VerifyAll(),
                model,
                self.store,
                config.speculation,
                num_tokens=self.num_tokens,
                cuda_graphs=config.cuda_graphs,
            )
        self.cut, reason = find_cut(model.config, config.prefill_cut)
        if self.cut is None and config.prefill is not PrefillMode.FULL:
            logger.warning("prefill runs every layer on every row: %s", reason)
        self.prefixes = PrefixCache(
            self.store,
            cut=self.cut,
            max_snapshots=config.max_snapshots,
            disk=open_disk(self.store, config.disk_folder, fingerprint, config.disk_bytes),
            variant=config.replay_variant,
            tail=1 if drafter is None else model.config.attention.window_size,
        )
        self.scheduler = Scheduler(
            config.schedule, self.store, prefixes=self.prefixes, admit=self._admit
        )
        self.images = ImageCache(model.vision, config.image_cache_bytes)
        self.figures = Figures()
        self.decode = captured_steps(model, self.store, drafter) if config.cuda_graphs else None
        rows = 0 if self.decode is None else self.decode.most_rows
        block = None if self.drafting is None else self.drafting.block
        self.draws = Draws(self.num_tokens, model.config.image_token_id, self.device, rows, block)
        self._is_closed = False
        self._jobs: dict[int, Job] = {}
        self._next = 0

    @classmethod
    def load(
        cls,
        checkpoint: Path,
        *,
        config: EngineConfig = EngineConfig(),
        numerics: str | None = None,
        device: torch.device | str = "cpu",
    ) -> "Engine":
        """Load a checkpoint; ``numerics`` None takes what it is: f32, or released if quantised.

        Weights are kept as stored with "released", else in float32, with "bf16qat" in bfloat16.
        """
        name = numerics or ("released" if read_variant(checkpoint) == "released" else "f32")
        if name not in NUMERICS:
            raise InputError(f"numerics is {name!r}, must be one of {', '.join(NUMERICS)}")
        if name == "released" and torch.device(device).type == "cuda":
            logger.info("weights are unpacked in every step; numerics bf16qat unpack them once")
        model = load_model(
            checkpoint,
            numerics=replace(NUMERICS[name], deterministic=config.deterministic),
            dtype=WEIGHTS.get(name, torch.float32),
            device=device,
            engram=config.engram,
        )
        return cls(
            model, load_tokenizer(checkpoint), config, fingerprint=fingerprint(checkpoint, name)
        )

    # requests

    def submit(self, request: Request, sink: Sink) -> int:
        """Queue a request; its events go to ``sink`` from ``step``. Returns its number."""
        if self._is_closed:
            raise InputError("the engine is closed; make another one")
        config = self.model.config
        check_room(request, config, self.config.cache)
        spans = find_spans(request.prompt, request.images, config)
        if len(self.scheduler.waiting) >= self.config.schedule.max_queue:
            raise OverloadedError(
                f"{len(self.scheduler.waiting)} requests wait already; try again later"
            )
        number, self._next = self._next, self._next + 1
        job = Job(
            number=number,
            request=request,
            sampler=Sampler(
                request.sampling,
                self.num_tokens,
                request.prompt,
                banned=[config.image_token_id],
                guide=None if request.constraint is None else request.constraint.begin(),
            ),
            text=TextStream(self.tokenizer, request.stop),
            sink=sink,
            mode=self.config.prefill,
            images=JobImages(spans),
            features=Features(config.attention.window_size),
            tokens=list(request.prompt),
        )
        if job.needs_all_rows or self.cut is None:
            job.mode = PrefillMode.FULL
        self._jobs[number] = job
        self.scheduler.waiting.append(job)
        self.figures.prompt_tokens += len(request.prompt)
        return number

    def cancel(self, number: int) -> None:
        """End a request now; its pages are free at once."""
        if (job := self._jobs.get(number)) is not None:
            self._end(job, FinishReason.CANCELLED)

    def cancel_all(self) -> None:
        """End every request now."""
        for number in list(self._jobs):
            self.cancel(number)

    @property
    def is_idle(self) -> bool:
        """Whether no request is left."""
        return not self._jobs

    def step(self) -> None:
        """Run one batch and send what it brings."""
        drafting = self.drafting
        step = self.scheduler.next_step(None if drafting is None else drafting.draft)
        try:
            if step:
                with computing(self.device):
                    self._run(step)
        finally:
            if drafting is not None:
                drafting.end_step()

    def capture_steps(self) -> None:
        """Capture steps as CUDA graphs now, and not when requests first need them.

        Steps of texts that are longer than most are left until they are met. Nobody may run.
        Raises InputError where the device has no room for them.
        """
        if not self.is_idle:
            raise InputError("requests run; capture steps before the first one")
        if self.decode is None:
            return
        self.prefixes.make_room(max(0, 1 - self.store.allocator.free))
        [page] = self.store.allocator.take(1)
        try:
            with computing(self.device):
                self.decode.prepare(page)
                if self.drafting is not None and self.drafting.graphs is not None:
                    self.drafting.graphs.prepare()
                if self.draws.graphs is not None:
                    self.draws.graphs.prepare()
        except torch.OutOfMemoryError as error:
            raise InputError(
                f"steps of {self.store.cache.max_requests} requests find no room on {self.device} "
                "beside the model and its cache; allow fewer requests or pages, or run without "
                f"CUDA graphs ({error})"
            ) from error
        finally:
            self.store.allocator.release([page])

    def stream(self, request: Request) -> Generator[Event, None, None]:
        """Yield the events of one request as they come; closing the iterator cancels it."""
        events: deque[Event] = deque()
        number = self.submit(request, events.append)
        try:
            while number in self._jobs or events:
                while events:
                    yield events.popleft()
                if number in self._jobs:
                    self.step()
        finally:
            self.cancel(number)

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        """Answer all requests, in their order."""
        collectors = [Collector() for _ in requests]
        numbers: list[int] = []
        try:
            for request, collector in zip(requests, collectors, strict=True):
                while len(self.scheduler.waiting) >= self.config.schedule.max_queue:
                    self.step()  # nobody else makes room
                numbers.append(self.submit(request, collector))
            while not self.is_idle:
                self.step()
        finally:
            for number in numbers:
                self.cancel(number)
        return [collector.answer() for collector in collectors]

    def stats(self) -> EngineStats:
        """Counters since the start, and what is held now; any thread may ask at any time."""
        return self.figures.stats(
            self.model,
            self.store,
            self.scheduler,
            self.prefixes,
            self.images,
            drafting=self.drafting,
        )

    def close(self) -> None:
        """End every request, take no more, and put the persistent tier on the disk."""
        self._is_closed = True
        try:
            self.cancel_all()
        finally:
            self.prefixes.close()

    # one batch

    def _run(self, step: Sequence[tuple[Job, int]]) -> None:
        """Compute a batch; if that fails, its requests start again, each alone at first.

        What a failed forward has written cannot be taken back, so that nothing of it is kept.
        """
        parts = [step] if self.decode is None else self.decode.parts(step)
        try:
            outputs = [self._forward(part) for part in parts]
        except Exception as error:
            logger.exception("a batch of %d requests failed", len(step))
            if len(step) == 1:
                self._end(step[0][0], FinishReason.ERROR, error)
            else:
                for job, _ in reversed(step):
                    job.is_alone = True
                    self.scheduler.restart(job)
            return
        if self.drafting is not None:
            self.drafting.settle()
        for part, (output, probe) in zip(parts, outputs, strict=True):
            if probe is not None:
                probe.collect()
            self._use(part, output)

    def _use(self, step: Sequence[tuple[Job, int]], output: Output) -> None:
        """Take what a batch brought: rows of prompts, next tokens, pages to remember."""
        first_rows = dict(zip(output.batch.requests, output.batch.first_rows, strict=True))
        counts = dict(zip(output.batch.requests, output.batch.counts, strict=True))
        drawing: list[tuple[Job, int]] = []  # and how many rows it draws from
        wanted: list[int] = []
        for job, count in step:
            job.done += count
            self.figures.count(job, count)
            rows = slice(first_rows[job.number], first_rows[job.number] + counts[job.number])
            if job.request.prompt_logprobs is not None and job.is_prefill:
                self._answer(job, take_prompt, self._logits(output.hidden[rows]))
            if job.pending <= 0 and job.finished is None:
                drawing.append((job, 1 + min(len(job.drafts), count - 1)))
                wanted += range(rows.stop - drawing[-1][1], rows.stop)
        if drawing:
            self._draw_all(drawing, self._drawn_from(output, wanted))
        going_on = [job for job, _ in step if job.finished is None]
        if self.drafting is not None:
            self.drafting.learn(output, going_on)
            if self.config.prefix_cache and any(map(self.prefixes.takes_snapshot, going_on)):
                self.drafting.tell()
        for job in going_on:
            self._keep(job, ends=job.last is not None)
            if job.last is not None:
                self._finish(job, job.last)

    def _forward(self, step: Sequence[tuple[Job, int]]) -> tuple[Output, StepProbe | None]:
        jobs = [job for job, _ in step]
        if self.decode is not None and self.decode.takes(step):
            return self.decode.run(step), None
        ids = [token for job, count in step for token in job.upcoming(count)]
        batch = Batch(
            torch.tensor(ids, dtype=torch.int64, device=self.device),
            tuple(job.number for job in jobs),
            tuple(job.done for job in jobs),
            tuple(count for _, count in step),
            image_embeds=join(
                [
                    rows
                    for job, count in step
                    for rows in job.images.embeds(job.done, job.done + count, self.images)
                ]
            ),
        )
        config = self.model.config
        rows = layer_rows(config, {j.number: j.rows for j in jobs if j.rows is not None})
        probe = StepProbe(jobs, batch) if any(j.uses_choices for j in jobs) else None
        return self.model(batch, self.store, rows=rows, probe=probe), probe

    def _logits(self, hidden: Float[Tensor, "T D"]) -> Float[Tensor, "T V"]:
        return self.model.logits(hidden)[:, : self.num_tokens]

    def _drawn_from(self, output: Output, wanted: Sequence[int]) -> Float[Tensor, "rows V"]:
        """Logits of some rows."""
        if output.logits is None:
            return self._logits(output.hidden[wanted])
        whole = len(wanted) == len(output.logits)
        return (output.logits if whole else output.logits[wanted])[:, : self.num_tokens]

    def _draw_all(
        self, drawing: Sequence[tuple[Job, int]], logits: Float[Tensor, "rows V"]
    ) -> None:
        """Draw the tokens of each job from its rows of logits, at once where that is possible."""
        sizes = [count for _, count in drawing]
        drawings = []
        for (job, count), stop in zip(drawing, accumulate(sizes), strict=True):
            job.drafts = job.drafts[: count - 1]
            drawings.append(Drawing(job.sampler, job.drafts, stop - count))
        speculation = self.config.speculation
        is_block = speculation is not None and speculation.rule is VerifyRule.BLOCK
        drawn: Sequence[list[int] | None] = [None] * len(drawings)
        if not is_block:
            drawn = self.draws(logits, drawings)
        for (job, _), own, known in zip(drawing, logits.split(sizes), drawn, strict=True):
            if known is None:
                tokens = job.sampler.verify(own, job.drafts, block=is_block)
            else:
                tokens = job.sampler.remember(known)
            self._answer(job, partial(self._draw, tokens=tokens), own)

    def _draw(self, job: Job, logits: Float[Tensor, "rows V"], tokens: Iterable[int]) -> None:
        """Take the next token, and those behind it whose drafts hold; the last may end the answer.

        Rows of drafts that do not hold are forgotten.
        """
        job.rows, job.is_alone = None, False
        drafts, job.drafts = job.drafts, []
        held = accepted = 0  # drafts that have tokens behind them, and those that are in the answer
        for held, token in enumerate(tokens):
            event, reason = take(job, token, logits, held, self.model.config)
            self.figures.generated_tokens += event.token is not None
            accepted = held + (held < len(drafts) and event.token == drafts[held].token)
            if reason is not None:
                job.last = replace(event, finish_reason=reason)
                break
            job.sink(event)
        if drafts and self.drafting is not None:
            self.drafting.verified(job, len(drafts), accepted)
            self.figures.count_drafts(len(drafts), accepted)
        if (rejected := len(drafts) - held) and job.finished is None:
            job.done -= rejected
            job.drop_choices(rejected)
            self.store.truncate(job.number, job.done)

    def _finish(self, job: Job, last: Event) -> None:
        """Send the last event of an answer, and let go of what it held."""
        assert last.finish_reason is not None, f"{last} ends nothing"
        self._forget(job, last.finish_reason)
        job.sink(replace(last, choices=job.all_choices()))

    def _answer(
        self, job: Job, action: Callable[[Job, Tensor], None], logits: Float[Tensor, "T V"]
    ) -> None:
        """Do something with a request's logits; if it fails, only this request ends."""
        try:
            action(job, logits)
        except Exception as error:
            logger.exception("request %d failed", job.number)
            self._end(job, FinishReason.ERROR, error)

    def _keep(self, job: Job, *, ends: bool) -> None:
        if self.config.prefix_cache and not job.needs_all_rows:
            self.prefixes.keep(job, ends=ends)

    def _end(self, job: Job, reason: FinishReason, error: Exception | None = None) -> None:
        if job.finished is None:
            self._forget(job, reason)
            event = Event(text=job.text.finish(), finish_reason=reason)
            if error is not None:
                told = f"{type(error).__name__}: {error}"
                event = replace(event, error=told, is_own_fault=isinstance(error, ConstraintError))
            job.sink(event)

    def _forget(self, job: Job, reason: FinishReason) -> None:
        job.finished = reason
        self.scheduler.remove(job)
        del self._jobs[job.number]
        if self.drafting is not None:
            self.drafting.forget(job.number)

    def _admit(self, job: Job) -> None:
        """Let a request start from what is cached, unless it asks for all of its rows."""
        self.prefixes.adopt(job, reuse=self.config.prefix_cache and not job.needs_all_rows)
