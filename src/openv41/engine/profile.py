"""Times decode steps of an engine, for the cost table of its speculator. Report §2.4.3."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from jaxtyping import Float

from openv41.engine.cost_table import CostTable
from openv41.engine.engine import Engine
from openv41.engine.request import Event, Request
from openv41.engine.sampler import SamplingConfig
from openv41.errors import InputError

TURNS = 4  # of each kind of step
WARM, TIMED = 2, 3  # steps of a turn; those that count follow each other, as they do in life


class ForcedVerification:
    """Verifies ``drafts`` drafts of every request; None does not draft."""

    def __init__(self) -> None:
        self.drafts: int | None = None

    def plan(self, requests: Sequence[int]) -> bool:
        """Draft where it is said so."""
        return self.drafts is not None and bool(requests)

    def lengths(
        self,
        requests: Sequence[int],
        logits: Float[np.ndarray, "B X"],
        limits: Sequence[int],
    ) -> list[int]:
        """As many as it is said, and as there are."""
        return [min(self.drafts or 0, limit) for limit in limits]

    def verified(
        self, requests: Sequence[int], lengths: Sequence[int], accepted: Sequence[int]
    ) -> None:
        """Take no notice."""

    def forget(self, request: int) -> None:
        """Nothing is known."""


def tokens_needed(block_size: int) -> int:
    """Room of an answer, so that no step is short of it if every draft is accepted."""
    drawn = 1 + sum(1 + drafts for drafts in range(block_size + 1))
    return TURNS * (WARM + TIMED) * drawn + 2 * (block_size + 1)


def measure_costs(
    engine: Engine,
    loads: Sequence[int],
    *,
    context: int,
    clock: Callable[[], float] = time.perf_counter,
    told: Callable[[int, float, float], None] = lambda *_: None,
) -> CostTable:
    """Time steps of so many requests with random prompts of ``context`` tokens.

    Kinds of steps take turns, so that a machine that slows down slows them all. ``clock`` gives
    seconds; that of the process shrugs off a busy machine. ``told`` hears of each load: requests,
    and seconds of a step without drafts and with all.
    """
    if engine.drafting is None:
        raise InputError("the checkpoint has no drafter, so there is nothing to profile")
    engine.capture_steps()
    forced, used = ForcedVerification(), engine.drafting.speculator
    engine.drafting.speculator = forced
    plain: dict[int, list[float]] = {}
    verify: dict[tuple[int, int], list[float]] = {}
    try:
        for load in loads:
            for drafts, seconds in _steps(engine, forced, load, context, clock):
                if drafts is None:
                    plain.setdefault(load, []).append(seconds)
                else:
                    verify.setdefault((load, drafts), []).append(seconds)
            most = engine.drafting.drafter.block_size
            told(load, statistics.median(plain[load]), statistics.median(verify[load, most]))
    finally:
        engine.drafting.speculator = used
    tiers = () if engine.decode is None else engine.decode.sizes
    return CostTable.measured(plain, verify, tiers=tiers)


def _steps(
    engine: Engine, forced: ForcedVerification, load: int, context: int, clock: Callable[[], float]
) -> Iterator[tuple[int | None, float]]:
    """Yield the kind and the seconds of each step."""
    assert engine.drafting is not None, "checked before"
    kinds = [None, *range(engine.drafting.drafter.block_size + 1)]
    generator = np.random.default_rng(load)
    numbers = []
    forced.drafts = None
    started: set[int] = set()
    for place in range(load):
        prompt = generator.integers(0, engine.num_tokens, context).tolist()
        request = Request(
            prompt=tuple(_text(engine, prompt)),
            max_tokens=tokens_needed(engine.drafting.drafter.block_size),
            sampling=SamplingConfig(seed=place),
            ignore_eos=True,
        )
        numbers.append(engine.submit(request, _first_of(place, started)))
    try:
        while len(started) < load:
            engine.step()
        for kind in kinds * TURNS:
            forced.drafts = kind
            for _ in range(WARM):
                engine.step()
            yield kind, _timed(engine, clock)
    finally:
        for number in numbers:
            engine.cancel(number)


def _text(engine: Engine, ids: Sequence[int]) -> Iterator[int]:
    """The tokens without images, which would need pixels."""
    config = engine.model.config
    spare = config.bos_token_id
    return (spare if token == config.image_token_id else token for token in ids)


def _first_of(place: int, started: set[int]) -> Callable[[Event], None]:
    def sink(event: Event) -> None:
        started.add(place)
        if event.error is not None:
            raise InputError(f"a step that was to be timed failed: {event.error}")

    return sink


def _timed(engine: Engine, clock: Callable[[], float]) -> float:
    if engine.device.type == "cuda":
        torch.cuda.synchronize(engine.device)
    start = clock()
    for _ in range(TIMED):
        engine.step()
    if engine.device.type == "cuda":
        torch.cuda.synchronize(engine.device)
    return (clock() - start) / TIMED
