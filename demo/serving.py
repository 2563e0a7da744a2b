"""What the engine does with the export: its memory, skipped work, and prompts it knows already."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from demo import settings
from openv41.engine.engine import Engine, EngineConfig
from openv41.engine.paged_store import CacheConfig
from openv41.engine.request import Request
from openv41.engine.sampler import SamplingConfig
from openv41.model.prefill import PrefillMode


@dataclass(frozen=True, slots=True)
class Served:
    """Figures of one long prompt, first unknown and then known but for its end."""

    bytes_per_token: float  # of main KV and index keys, from the pages themselves
    rows_skipped: float  # share of the prompt's rows, counted in every layer, that were skipped
    cold_seconds: float  # to the first token
    warm_seconds: float
    hit_tokens: int
    bounded_agreement: (
        float  # of greedy tokens after a bounded prefill with those after an exact one
    )


def measure_serving(export: Path, tokens: Sequence[int]) -> Served:
    """Serve a prompt, then one with the same beginning, from packed caches."""
    cache = CacheConfig(num_pages=2 * -(-settings.SERVED_TOKENS // 64) + 4, max_requests=1)
    engine = Engine.load(export, config=EngineConfig(cache=cache), numerics="f32qat")
    prompt = tuple(tokens[: settings.SERVED_TOKENS])
    other = (*prompt[: -settings.CHANGED_TOKENS], *tokens[-settings.CHANGED_TOKENS :])
    cold_seconds, _ = first_token(engine, prompt)
    rows = engine.stats()
    warm_seconds, hit_tokens = first_token(engine, other)
    return Served(
        bytes_per_token=engine.store.page_bytes() / cache.page_size,
        rows_skipped=rows.prefill_rows_skipped / rows.prefill_rows,
        cold_seconds=cold_seconds,
        warm_seconds=warm_seconds,
        hit_tokens=hit_tokens,
        bounded_agreement=agreement(engine, tokens),
    )


def agreement(engine: Engine, tokens: Sequence[int]) -> float:
    """Share of greedy tokens that bounded replay leaves as they are."""
    length, count = settings.AGREEMENT_TOKENS, settings.AGREEMENT_PROMPTS
    prompts = [tuple(tokens[i * length : (i + 1) * length]) for i in range(count)]
    cache = CacheConfig(num_pages=count * (length // 64 + 2), max_requests=count)
    answers = []
    for mode in (PrefillMode.EXACT, PrefillMode.BOUNDED):
        config = EngineConfig(cache=cache, prefill=mode, prefix_cache=False)
        other = Engine(engine.model, engine.tokenizer, config)
        answers.append(other.generate([request_of(p, settings.AGREEMENT_DRAWN) for p in prompts]))
    pairs = [
        pair
        for exact, bounded in zip(*answers, strict=True)
        for pair in zip(exact.tokens, bounded.tokens, strict=True)
    ]
    return sum(a == b for a, b in pairs) / len(pairs)


def request_of(prompt: tuple[int, ...], max_tokens: int) -> Request:
    """A greedy request of a fixed length."""
    greedy = SamplingConfig(temperature=0.0)
    return Request(prompt=prompt, max_tokens=max_tokens, sampling=greedy, ignore_eos=True)


def first_token(engine: Engine, prompt: tuple[int, ...]) -> tuple[float, int]:
    """Seconds until the first token, and tokens found in the prefix cache."""
    start = time.perf_counter()
    [answer] = engine.generate([request_of(prompt, 1)])
    return time.perf_counter() - start, answer.cached_tokens
