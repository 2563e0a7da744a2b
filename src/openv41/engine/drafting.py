"""Drafts of a step: for whom, how many are verified, and what came of them. Report §2.4.3."""

import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from openv41.engine.captured import computing
from openv41.engine.draft_choice import DraftChooser, Drawing, Drawn, drafts_of, drawing_of
from openv41.engine.draft_graph import captured_drafts
from openv41.engine.job import Job
from openv41.engine.paged_store import PagedStore
from openv41.engine.speculation import DraftChoice, Drafter, SpeculationConfig, Speculator
from openv41.layers.batch import Batch
from openv41.model.causal_encoder_decoder import CausalEncoderDecoder, Output

logger = logging.getLogger(__name__)

Ended = tuple[list[int], list[int], list[int], list[int]]  # as of ``verified``; and who left
ROWS_AT_ONCE = 2048  # features that may wait for the drafter


class Drafting:
    """Asks the drafter and the speculator, and tells them what came of it.

    Answers never depend on it but for chance: a drafter that fails is logged and asked no more.
    """

    def __init__(
        self,
        drafter: Drafter,
        speculator: Speculator,
        model: CausalEncoderDecoder,
        store: PagedStore,
        config: SpeculationConfig,
        *,
        num_tokens: int,
        cuda_graphs: bool = False,
    ) -> None:
        """Tokens below ``num_tokens`` are drafted; ``cuda_graphs`` where they can be captured."""
        self.drafter, self.speculator, self.config = drafter, speculator, config
        self._model, self._store, self._num_tokens = model, store, num_tokens
        self.graphs = captured_drafts(drafter, model, store, num_tokens) if cuda_graphs else None
        self.is_on = True
        self.steps = 0  # that drafted
        self.budget = 0  # drafts that the last step of decoding requests verified
        self._round: dict[int, int] = {}  # drafts that hold, by request that was drafted for
        self._lengths: dict[int, int] = {}
        self._ended: deque[Ended] = deque()  # steps of which the speculator has not heard
        self._left: list[int] = []  # requests that end in this step
        self._untold: dict[int, Job] = {}  # jobs with features that the drafter has not had

    def draft(self, jobs: Sequence[Job], room: int) -> Mapping[int, int]:
        """Draft for decoding jobs; return how many drafts of each to verify, by number.

        ``room`` is how many the step can take.
        """
        self._round, self._lengths, self.budget = {}, {}, 0
        if not (self.is_on and room > 0 and any(map(self._limit, jobs))):
            return {}
        numbers = [job.number for job in jobs]
        if not self.speculator.plan(numbers):
            return {}
        confidence = None
        with self._may_fail(), computing(self._store.device):
            self._tell()
            confidence = self.propose(jobs)
        if confidence is None:
            return {}
        limits = [min(self._limit(job), len(job.drafts)) for job in jobs]
        lengths = within(self.speculator.lengths(numbers, confidence, limits), room)
        self._lengths = dict(zip(numbers, lengths, strict=True))
        self.steps, self.budget = self.steps + 1, sum(lengths)
        return self._lengths

    @property
    def block(self) -> Float64[Tensor, "places X V"] | None:
        """Where the chances of drafts lie that are drawn in graphs."""
        return None if self.graphs is None else self.graphs.block

    def learn(self, output: Output, jobs: Sequence[Job]) -> None:
        """Remember the features of all positions that are now part of these requests.

        The drafter gets them when it is asked again, those of many steps at once; before steps
        that are replayed, which store their own.
        """
        taps, batch = output.taps, output.tap_batch
        if not self.is_on or taps is None or batch is None:
            return
        of = {job.number: job for job in jobs}
        spans = zip(batch.requests, batch.starts, batch.stops, batch.first_rows, strict=True)
        for request, first, stop, row in spans:
            if (job := of.get(request)) is not None:
                job.features.add(first, taps[row : row + min(stop, job.done) - first])
                self._untold[request] = job
        rows = sum(len(job.features) for job in self._untold.values())
        if rows > ROWS_AT_ONCE or self.graphs is not None:
            self.tell()

    def tell(self) -> None:
        """Give the drafter all features that it has not had."""
        if self.is_on:
            with self._may_fail():
                self._tell()

    @contextmanager
    def _may_fail(self) -> Iterator[None]:
        """Leave the drafter alone from now on if it fails in here."""
        try:
            yield
        except Exception:
            logger.exception("the drafter failed; the engine goes on without it")
            self.is_on = False

    def _tell(self) -> None:
        told = [job for job in self._untold.values() if job.finished is None and job.features]
        self._untold.clear()
        if not told:
            return
        counts = tuple(len(job.features) for job in told)
        batch = Batch(
            torch.zeros(sum(counts), dtype=torch.int64, device=self._store.device),
            tuple(job.number for job in told),
            tuple(job.features.first for job in told),
            counts,
        )
        rows = torch.cat([rows for job in told for rows in job.features.take()])
        self.drafter.write_context(rows, batch, self._store)

    def verified(self, job: Job, count: int, accepted: int) -> None:
        """Note how many drafts of a job were computed, and how many of them hold."""
        self._lengths[job.number], self._round[job.number] = count, accepted

    def forget(self, request: int) -> None:
        """Let the speculator forget a request once it has heard of its last step."""
        self._left.append(request)

    def end_step(self) -> None:
        """Note what came of the step; who left the step verified nothing."""
        numbers = list(self._lengths)
        accepted = [self._round.get(number, 0) for number in numbers]
        lengths = [self._lengths[n] if n in self._round else 0 for n in numbers]
        self._ended.append((numbers, lengths, accepted, self._left))
        self._round, self._lengths, self._left = {}, {}, []
        if self.graphs is None:
            self.settle()

    def settle(self) -> None:
        """Tell the speculator what came of steps that ended, best while the device computes."""
        while self._ended:
            numbers, lengths, accepted, left = self._ended.popleft()
            self.speculator.verified(numbers, lengths, accepted)
            for request in left:
                self.speculator.forget(request)

    def _limit(self, job: Job) -> int:
        """Drafts that can become part of an answer: the last token of one is not computed."""
        config = self._model.config
        answer = job.request.max_tokens - job.num_output - 1
        context = config.max_position - 1 - job.done
        drafts = min(self.drafter.block_size, self._store.cache.draft_tokens)
        return max(0, min(drafts, answer, context))

    def propose(self, jobs: Sequence[Job]) -> Float[np.ndarray, "requests X"]:
        """Fill ``drafts`` of each job; return the confidences of all."""
        drawing = drawing_of(
            [job.sampler for job in jobs],
            self.drafter.block_size,
            is_greedy=self.config.drafts is DraftChoice.GREEDY,
        )
        if self.graphs is not None and self.graphs.knows(jobs):
            drawn = self.graphs.draft(jobs, drawing)
        else:
            drawn = self._drawn(jobs, drawing)
        numbers = drawn.numbers.cpu().numpy()
        drafted = drafts_of(drawn, numbers, drawing, self._model.config.image_token_id)
        for job, drafts in zip(jobs, drafted, strict=True):
            job.drafts = drafts
        confidence: Float[np.ndarray, "requests X"] = numbers[..., 1]
        return confidence

    def _drawn(self, jobs: Sequence[Job], drawing: Sequence[Drawing]) -> Drawn:
        """Draft call by call."""
        device, settings = self._store.device, None
        if any(row[-1] for row in drawing):
            settings = torch.tensor(drawing, dtype=torch.float64, device=device)
        anchors = Batch(
            torch.tensor([job.tokens[-1] for job in jobs], device=device),
            tuple(job.number for job in jobs),
            tuple(job.done for job in jobs),
            (1,) * len(jobs),
        )
        chooser = DraftChooser(self._num_tokens, self._model.config.image_token_id, settings)
        proposal = self.drafter.propose(self._model, anchors, self._store)
        drafted = self.drafter.draft(proposal, chooser)
        return chooser.drawn(drafted.tokens, drafted.confidence)


def within(lengths: Sequence[int], room: int) -> list[int]:
    """Keep ``room`` drafts, earlier positions first.

    So that whether a draft is kept does not depend on those behind it.
    """
    kept = [0] * len(lengths)
    for position in range(max(lengths, default=0)):
        for request, length in enumerate(lengths):
            if position < length and room > 0:
                kept[request] += 1
                room -= 1
    return kept
