"""What the drafter is worth in the engine: tokens per step, and seconds saved for one request."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from demo import settings
from openv41.engine.engine import Engine, EngineConfig
from openv41.engine.paged_store import CacheConfig
from openv41.engine.request import Answer, Request
from openv41.engine.sampler import SamplingConfig
from openv41.engine.speculation import VerifyAll


@dataclass(frozen=True, slots=True)
class DraftingFigures:
    """Figures of answers to held-out prompts; lists have an entry per temperature 1 and 0."""

    mean_lengths: list[float]  # tokens of a round, the one behind the drafts included
    acceptance: list[list[float]]  # by position: share of verified drafts that were accepted
    repeated: list[float]  # share of 4-grams that their answer holds before: text that loops
    before_loops: list[float]  # mean lengths of rounds before an answer first repeats a 4-gram
    speed_up: float  # of one greedy request: seconds without drafts over those with them


def measure_drafting(export: Path, tokens: Sequence[int]) -> DraftingFigures:
    """Answer held-out prompts with and without drafts."""
    length, count = settings.DRAFT_PROMPT_TOKENS, settings.DRAFT_PROMPTS
    starts = range(0, len(tokens) - length, max(1, (len(tokens) - length) // count))
    prompts = [tuple(tokens[start : start + length]) for start in starts[:count]]
    total = length + settings.DRAFT_ANSWER_TOKENS + 16
    pages = total // CacheConfig().page_size + 2
    cache = CacheConfig(num_pages=count * pages, max_requests=count)
    config = EngineConfig(cache=cache, prefix_cache=False)
    loaded = Engine.load(export, config=config, numerics="f32qat")
    lengths, acceptance, repeated, before_loops = [], [], [], []
    for temperature in (1.0, 0.0):
        rounds = Rounds()
        engine = Engine(loaded.model, loaded.tokenizer, config, speculator=rounds)
        answers = engine.generate([_request(p, temperature, n) for n, p in enumerate(prompts)])
        stats = engine.stats()
        lengths.append(stats.mean_accepted_length)
        acceptance.append(list(stats.draft_acceptance))
        repeated.append(statistics.mean(map(repeated_share, answers)))
        before_loops.append(mean_before_loops(answers, rounds.in_order()))
    return DraftingFigures(lengths, acceptance, repeated, before_loops, _speed_up(loaded, prompts))


class Rounds(VerifyAll):
    """Remembers how many drafts each round of each request accepted."""

    def __init__(self) -> None:
        self.accepted: dict[int, list[int]] = {}

    def verified(
        self, requests: Sequence[int], lengths: Sequence[int], accepted: Sequence[int]
    ) -> None:
        """Keep the rounds, request by request."""
        for request, count in zip(requests, accepted, strict=True):
            self.accepted.setdefault(request, []).append(count)

    def in_order(self) -> list[list[int]]:
        """The rounds of each request, the oldest request first."""
        return [self.accepted[request] for request in sorted(self.accepted)]


def mean_before_loops(answers: Sequence[Answer], rounds: Sequence[Sequence[int]]) -> float:
    """Tokens of a round, of those that begin before their answer first repeats a 4-gram."""
    lengths = []
    for answer, accepted in zip(answers, rounds, strict=True):
        begin, end = 1, first_repeated(answer)  # a prompt's step draws the first token
        for count in accepted:
            if begin <= end:
                lengths.append(1 + count)
            begin += 1 + count
    return statistics.mean(lengths)


def first_repeated(answer: Answer) -> int:
    """Place of the first token that ends a 4-gram for the second time; behind all if none does."""
    known = set()
    for place, gram in enumerate(zip(*(answer.tokens[n:] for n in range(4)), strict=False), 3):
        if gram in known:
            return place
        known.add(gram)
    return len(answer.tokens)


def repeated_share(answer: Answer) -> float:
    """Share of an answer's 4-grams that occur before in it."""
    grams = list(zip(*(answer.tokens[n:] for n in range(4)), strict=False))
    return 1 - len(set(grams)) / max(1, len(grams))


def _speed_up(loaded: Engine, prompts: Sequence[tuple[int, ...]]) -> float:
    """Median over prompts of seconds without drafts over seconds with them, one at a time."""
    plain = replace(loaded.config, speculation=None)
    engines = [Engine(loaded.model, loaded.tokenizer, config) for config in (plain, loaded.config)]
    ratios = []
    for prompt in prompts[: settings.DRAFT_TIMED]:
        seconds = []
        for engine in engines:
            start = time.perf_counter()
            engine.generate([_request(prompt, 0.0, 0)])
            seconds.append(time.perf_counter() - start)
        ratios.append(seconds[0] / seconds[1])
    return statistics.median(ratios)


def _request(prompt: tuple[int, ...], temperature: float, seed: int) -> Request:
    sampling = SamplingConfig(temperature=temperature, seed=seed)
    most = settings.DRAFT_ANSWER_TOKENS
    return Request(prompt=prompt, max_tokens=most, sampling=sampling, ignore_eos=True)
