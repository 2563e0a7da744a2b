"""Continuous batching: which tokens of which requests are computed in a step.

Requests that decode come first, one token each; prompts share what the budget leaves, the oldest
first where it does not divide. When pages run out the youngest request gives up its own and is
computed again later; a job that runs alone takes those of the others.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from openv41.engine.job import Job
from openv41.engine.paged_store import PagedStore
from openv41.engine.pages import OutOfPages
from openv41.engine.prefix_cache import PrefixCache
from openv41.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """Limits of a step and of the queue."""

    tokens_per_step: int = 512
    max_queue: int = 1024

    def __post_init__(self) -> None:
        problems = [
            f"{name} is {getattr(self, name)}, must be at least 1"
            for name in ("tokens_per_step", "max_queue")
            if getattr(self, name) < 1
        ]
        if problems:
            raise ConfigError("schedule", problems)


CountDrafts = Callable[[Sequence[Job], int], Mapping[int, int]]  # jobs, room: drafts by number


class Scheduler:
    """Waiting and running jobs; ``admit`` lets a job that has its place find what is cached."""

    def __init__(
        self,
        config: ScheduleConfig,
        store: PagedStore,
        *,
        prefixes: PrefixCache,
        admit: Callable[[Job], None],
    ) -> None:
        self.config, self._store = config, store
        self._prefixes, self._admit = prefixes, admit
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []  # the oldest first
        self.preemptions = 0

    def next_step(self, draft: CountDrafts | None = None) -> list[tuple[Job, int]]:
        """Choose jobs and how many positions of each; their pages are reserved.

        ``draft`` says how many drafts of the decoding jobs are verified; they take what prompts
        leave of the budget, and no page from anybody.
        """
        self._fill_places()
        budget = self.config.tokens_per_step
        running = [job for job in self.running if job.is_alone][:1] or self.running
        decoding = [job for job in running if not job.is_prefill][:budget]
        prompts = [job for job in running if job.is_prefill]
        budget -= len(decoding)
        drafts: Mapping[int, int] = {}
        if draft is not None and decoding:
            drafts = draft(decoding, max(0, budget - sum(job.pending for job in prompts)))
        shares = [(job, 1 + drafts.get(job.number, 0)) for job in decoding]
        budget -= sum(drafts.values())
        shares += _shared(prompts[:budget], budget)
        step = []
        for job, count in shares:
            if job in self.running and self._reserve(job, count if job.is_prefill else 1):
                step.append((job, count))
        step = [(job, count) for job, count in step if job in self.running]
        return [(job, count if job.is_prefill else self._extend(job, count)) for job, count in step]

    def remove(self, job: Job) -> None:
        """Take a job out, wherever it is, and free what it holds."""
        if job in self.running:
            self.running.remove(job)
            self._store.close(job.number)
        elif job in self.waiting:
            self.waiting.remove(job)

    def restart(self, job: Job) -> None:
        """Let a running job give up what it holds; it is the next to be computed again."""
        self.remove(job)
        job.restart()
        self.waiting.appendleft(job)

    def _fill_places(self) -> None:
        while self.waiting and len(self.running) < self._store.cache.max_requests:
            job = self.waiting[0]
            if not self._find_room(job):
                return  # those who run first
            self.waiting.popleft()
            self._store.open(job.number)
            self.running.append(job)
            self.running.sort(key=lambda j: j.number)
            self._admit(job)

    def _find_room(self, job: Job) -> bool:
        """Free the pages that a job starts with; none where they cannot be enough."""
        count = min(job.pending, self.config.tokens_per_step)
        needed = -(-count // self._store.cache.page_size) + 1
        missing = needed - self._store.allocator.free
        if missing > 0:
            if self.running and not self._prefixes.can_make_room(missing):
                return False
            self._prefixes.make_room_for(job, count)
        return True

    def _reserve(self, job: Job, count: int) -> bool:
        """Reserve pages; take them from the cache, then from the youngest job.

        A job that runs alone never gives way: nobody else would run until it has had its turn.
        """
        while True:
            missing = self._store.pages_missing(job.number, job.done + count)
            self._prefixes.make_room(max(0, missing - self._store.allocator.free))
            try:
                self._store.reserve(job.number, job.done + count)
            except OutOfPages:
                others = [other for other in self.running if other is not job]
                held = len(self._store.pages_of(job.number, job.done))
                assert others, f"{missing} pages are missing beside the {held} of the only job"
                youngest = others[-1] if job.is_alone else self.running[-1]
                self.restart(youngest)
                self.preemptions += 1
                if youngest is job:
                    return False
            else:
                return True

    def _extend(self, job: Job, count: int) -> int:
        """Reserve pages for the drafts behind a token, as far as there are any; count what fits."""
        missing = self._store.pages_missing(job.number, job.done + count)
        if missing:
            free = self._store.allocator.free
            if missing > free:
                free += self._prefixes.make_room(missing - free)
            size = self._store.cache.page_size
            held = -(-(job.done + 1) // size) + min(missing, free)
            count = min(count, held * size - job.done)
            self._store.reserve(job.number, job.done + count)
        return count


def _shared(prompts: Sequence[Job], budget: int) -> list[tuple[Job, int]]:
    """Share a budget evenly, the first get more where it does not divide."""
    shares = []
    for index, job in enumerate(prompts):
        share = -(-budget // (len(prompts) - index))
        shares.append((job, min(share, job.pending)))
        budget -= shares[-1][1]
    return shares
