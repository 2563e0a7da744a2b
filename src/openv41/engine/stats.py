"""What an engine has done and holds."""

from dataclasses import dataclass, field

from openv41.engine.drafting import Drafting
from openv41.engine.images import ImageCache
from openv41.engine.job import Job
from openv41.engine.paged_store import PagedStore
from openv41.engine.prefix_cache import PrefixCache
from openv41.engine.scheduler import Scheduler
from openv41.io.engram_store import engram_counters
from openv41.model.causal_encoder_decoder import CausalEncoderDecoder


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStats:
    """Counters since the start; what waits, runs and is held now."""

    queued: int
    running: int
    pages_used: int
    pages_free: int
    pages_cached: int  # of those in use, the ones that the prefix cache holds
    prompt_tokens: int
    generated_tokens: int
    prefix_hit_tokens: int
    prefill_rows: int  # of prompts that were fed, times layers
    prefill_rows_skipped: int  # those of them that no layer had to compute
    preemptions: int
    images_encoded: int
    image_hits: int  # spans taken from the cache of embeddings
    image_bytes: int  # that the cache holds
    engram_rows: int
    engram_hits: int
    engram_bytes: int
    engram_stalls: int
    draft_steps: int
    draft_budget: int  # drafts that the last step of decoding requests verified
    draft_rounds: int  # of all requests: rounds whose drafts were verified
    drafts_verified: tuple[int, ...]  # by position in the block, as the next one
    drafts_accepted: tuple[int, ...]

    @property
    def draft_acceptance(self) -> tuple[float, ...]:
        """Share of the drafts at each position that became part of an answer."""
        pairs = zip(self.drafts_accepted, self.drafts_verified, strict=True)
        return tuple(accepted / max(1, verified) for accepted, verified in pairs)

    @property
    def mean_accepted_length(self) -> float:
        """Tokens of a round, the one behind the drafts included."""
        return 1 + sum(self.drafts_accepted) / max(1, self.draft_rounds)

    @property
    def wasted_rows(self) -> int:
        """Rows computed for drafts that did not hold."""
        return sum(self.drafts_verified) - sum(self.drafts_accepted)


@dataclass
class Figures:
    """What an engine counts itself."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    prefill_rows: int = 0
    prefill_rows_skipped: int = 0
    draft_rounds: int = 0
    drafts_verified: list[int] = field(default_factory=list)  # by position in the block
    drafts_accepted: list[int] = field(default_factory=list)

    def count_drafts(self, verified: int, accepted: int) -> None:
        """Note a round."""
        self.draft_rounds += 1
        for figures in (self.drafts_verified, self.drafts_accepted):
            figures.extend([0] * (verified - len(figures)))
        for position in range(verified):
            self.drafts_verified[position] += 1
            self.drafts_accepted[position] += position < accepted

    def count(self, job: Job, count: int) -> None:
        """Note the rows of a prompt that were just computed."""
        if job.rows is None:
            return
        start = job.done - count
        skipped = sum(min(max(first - start, 0), count) for first in job.rows.firsts)
        self.prefill_rows += count * len(job.rows.firsts)
        self.prefill_rows_skipped += skipped

    def stats(
        self,
        model: CausalEncoderDecoder,
        store: PagedStore,
        scheduler: Scheduler,
        prefixes: PrefixCache,
        images: ImageCache,
        *,
        drafting: Drafting | None,
    ) -> EngineStats:
        """All figures at this moment.

        Each is one plain number, one copy or one ``len``, so that a thread may read while another
        one steps.
        """
        engram, free = engram_counters(model), store.allocator.free
        return EngineStats(
            queued=len(scheduler.waiting),
            running=len(scheduler.running),
            pages_used=store.cache.num_pages - free,
            pages_free=free,
            pages_cached=len(prefixes),
            prompt_tokens=self.prompt_tokens,
            generated_tokens=self.generated_tokens,
            prefix_hit_tokens=prefixes.hit_tokens,
            prefill_rows=self.prefill_rows,
            prefill_rows_skipped=self.prefill_rows_skipped,
            preemptions=scheduler.preemptions,
            images_encoded=images.encoded,
            image_hits=images.hits,
            image_bytes=images.num_bytes,
            engram_rows=engram.rows,
            engram_hits=engram.hits,
            engram_bytes=engram.bytes_read,
            engram_stalls=engram.stalls,
            draft_steps=0 if drafting is None else drafting.steps,
            draft_budget=0 if drafting is None else drafting.budget,
            draft_rounds=self.draft_rounds,
            drafts_verified=tuple(self.drafts_verified),
            drafts_accepted=tuple(self.drafts_accepted),
        )
