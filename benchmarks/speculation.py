"""What the engine itself can gain from drafts: `python -m benchmarks.speculation`. Report §2.4.3.

A preset with random weights and a drafter, or a released checkpoint. The drafter does its work in
every round; then the tokens of the greedy answer take the place of its drafts, so that as many hold
as the curve asks for. Tokens are drawn, and then those of that answer are taken: in bfloat16 a step
of more rows may round to another token. Engines take turns on the same requests, forth and back;
time runs from the first token of all to the last one. On a CPU it is the time of the process, so
that whoever shares the machine counts for little.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from benchmarks.record import record
from openv41 import CausalEncoderDecoder, init_weights, preset
from openv41.config import NUMERICS
from openv41.engine.answering import Collector
from openv41.engine.drafting import Drafting
from openv41.engine.draw_graph import Draws
from openv41.engine.engine import WEIGHTS, Engine, EngineConfig
from openv41.engine.heap import freeze_heap
from openv41.engine.job import Job
from openv41.engine.joint_sampling import Drawing
from openv41.engine.paged_store import CacheConfig
from openv41.engine.request import Request
from openv41.engine.sampler import Draft, SamplingConfig
from openv41.engine.scheduler import ScheduleConfig
from openv41.engine.speculation import SpeculationConfig
from openv41.engine.stats import EngineStats
from openv41.io.checkpoint import load_model
from openv41.io.tokenizer import TextTokenizer
from openv41.presets import with_drafter

LOADS = (1, 4, 16, 64)
PROMPT_TOKENS = 32
PAGE_SIZE = 64


class Blank(TextTokenizer):
    """Every token is an "x": texts play no role here."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def token_bytes(self, token: int) -> bytes:
        """Give the same bytes for each."""
        return b"x"


class Forced(Drafting):
    """Lets the drafter draft, and then says otherwise: ``held`` tokens that are right."""

    def __init__(self, engine: Engine, held: int = 0) -> None:
        own = engine.drafting
        assert own is not None, "the model has no drafter"
        super().__init__(
            own.drafter,
            own.speculator,
            engine.model,
            engine.store,
            own.config,
            num_tokens=engine.num_tokens,
        )
        self.graphs = own.graphs
        self.held, self._last = held, engine.num_tokens - 1
        self.texts: dict[int, Sequence[int]] = {}  # prompt and answer, by request
        self.following: dict[Draft, Sequence[int]] = {}  # what the answer has, by the first draft

    def propose(self, jobs: Sequence[Job]) -> Float[np.ndarray, "requests X"]:
        """Put tokens of the answer in the place of the drafts."""
        confidence, self.following = super().propose(jobs), {}
        for job in jobs:
            right = self.texts[job.number][job.done + 1 :][: self.drafter.block_size + 1]
            tokens = [
                token if place < self.held else self._last - (token == self._last)
                for place, token in enumerate(right[: self.drafter.block_size])
            ]
            job.drafts = [Draft(token) for token in tokens]
            self.following |= dict.fromkeys(job.drafts[:1], right)
        return confidence


class ForcedDraws(Draws):
    """Draws as the engine does, and then says what its forced drafts say."""

    def __init__(self, engine: Engine, forced: Forced) -> None:
        self._draws, self._forced = engine.draws, forced
        self.graphs = engine.draws.graphs

    def __call__(
        self, logits: Float[Tensor, "rows V"], drawings: Sequence[Drawing]
    ) -> list[list[int] | None]:
        """As many drafts as are to hold, and the token of the answer behind them."""
        drawn = self._draws(logits, drawings)
        return [
            self._following(one) if one.drafts else own
            for one, own in zip(drawings, drawn, strict=True)
        ]

    def _following(self, one: Drawing) -> list[int]:
        held = min(self._forced.held, len(one.drafts))
        return list(self._forced.following[one.drafts[0]][: held + 1])


@torch.inference_mode()
def build(name: str, numerics: str, device: str) -> CausalEncoderDecoder:
    """A model with random weights and a drafter."""
    config = with_drafter(preset(name))
    dtype = torch.bfloat16 if numerics != "f32" else torch.float32
    model = CausalEncoderDecoder(config, NUMERICS[numerics], dtype=dtype, device=device)
    init_weights(model, seed=0)
    if config.engram is not None:
        size = config.engram.compressed_vocab_size
        model.set_token_map(torch.arange(config.vocab_size) % size)
    return model


def engine_of(model: CausalEncoderDecoder, load: int, tokens: int, *, speculates: bool) -> Engine:
    """An engine that holds all requests, its steps captured; with the drafts that are forced."""
    pages = load * (-(-(PROMPT_TOKENS + tokens + 8) // PAGE_SIZE) + 1)
    config = EngineConfig(
        cache=CacheConfig(num_pages=pages, max_requests=load, page_size=PAGE_SIZE),
        schedule=ScheduleConfig(tokens_per_step=max(512, 8 * load)),
        prefix_cache=False,
        speculation=SpeculationConfig() if speculates else None,
    )
    engine = Engine(model, Blank(model.config.vocab_size), config)
    if speculates:
        engine.drafting = forced = Forced(engine)
        engine.draws = ForcedDraws(engine, forced)
    engine.capture_steps()
    freeze_heap()
    return engine


def run(
    engine: Engine, requests: Sequence[Request], texts: Sequence[Sequence[int]] = ()
) -> tuple[float, list[list[int]]]:
    """Tokens per second behind the first of each request, and all texts."""
    collectors = [Collector() for _ in requests]
    numbers = [engine.submit(r, c) for r, c in zip(requests, collectors, strict=True)]
    if isinstance(engine.drafting, Forced):
        engine.drafting.texts = dict(zip(numbers, texts, strict=True))
    while not all(collector.events for collector in collectors):
        engine.step()
    begun = sum(len(collector.events) for collector in collectors)
    clock = time.process_time if engine.device.type == "cpu" else time.perf_counter
    synchronize(engine)
    start = clock()
    while not engine.is_idle:
        engine.step()
    synchronize(engine)
    seconds = clock() - start
    answers = [collector.answer().tokens for collector in collectors]
    found = [[*r.prompt, *tokens] for r, tokens in zip(requests, answers, strict=True)]
    return (sum(map(len, answers)) - begun) / seconds, found


def synchronize(engine: Engine) -> None:
    """Wait for the device."""
    if engine.device.type == "cuda":
        torch.cuda.synchronize(engine.device)


def measure(options: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Yield a line for each load and number of tokens per round; 0 is without speculation."""
    if options.checkpoint is None:
        model = build(options.preset, options.numerics, options.device)
    else:
        rounding = NUMERICS[options.numerics]
        dtype = WEIGHTS.get(options.numerics, torch.float32)
        model = load_model(
            options.checkpoint, numerics=rounding, dtype=dtype, device=options.device
        )
    assert model.drafter is not None, "the model has no drafter"
    most, lengths = max(options.loads), range(model.drafter.block_size + 2)
    plain, drafting = (
        engine_of(model, most, options.tokens, speculates=value) for value in (False, True)
    )
    forced = drafting.drafting
    assert isinstance(forced, Forced), "drafts are not forced"
    for load in options.loads:
        requests = prompts(model, load, options.tokens)
        _, texts = run(plain, requests)
        run(drafting, requests, texts)  # both are warm
        speeds: dict[int, list[float]] = {length: [] for length in lengths}
        accepted: dict[int, float] = {}
        again = []
        for turn in range(options.repeats):
            for length in sorted(lengths, reverse=bool(turn % 2)):
                engine, forced.held = drafting if length else plain, length - 1
                before = engine.stats()
                speed, found = run(engine, requests, texts)
                assert options.device != "cpu" or found == texts, f"{length} says something else"
                speeds[length].append(speed)
                accepted[length] = length_between(before, engine.stats())
            again.append(run(plain, requests)[0])
        yield from lines(options, load, speeds, again, accepted)


def prompts(model: CausalEncoderDecoder, load: int, tokens: int) -> list[Request]:
    """Greedy requests with random prompts."""
    generator = torch.Generator().manual_seed(load)
    drawn = torch.randint(
        9, model.config.vocab_size - 2, (load, PROMPT_TOKENS), generator=generator
    )
    greedy = SamplingConfig(temperature=0.0)
    return [
        Request(prompt=tuple(row), max_tokens=tokens, sampling=greedy, ignore_eos=True)
        for row in drawn.tolist()
    ]


def length_between(before: EngineStats, after: EngineStats) -> float:
    """Tokens per round and request in between; 1 without drafts."""
    gained = sum(after.drafts_accepted) - sum(before.drafts_accepted)
    return 1 + gained / max(1, after.draft_rounds - before.draft_rounds)


def lines(
    options: argparse.Namespace,
    load: int,
    speeds: dict[int, list[float]],
    again: Sequence[float],
    accepted: dict[int, float],
) -> Iterator[dict[str, object]]:
    """Medians, and ratios of neighbouring runs."""
    spread = [a / b for a, b in zip(again, speeds[0], strict=True)]
    for length, found in speeds.items():
        ratios = [a / b for a, b in zip(found, speeds[0], strict=True)]
        line = {
            "benchmark": "speculation",
            "preset": options.preset,
            "numerics": options.numerics,
            "where": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
            "load": load,
            "tokens": options.tokens,
            "forced_length": length,
            "tokens_per_second": statistics.median(found),
            "ratio": statistics.median(ratios),
            "same_again": [min(spread), max(spread)],
            "mean_accepted_length": accepted[length],
            "repeats": options.repeats,
        }
        sys.stderr.write(f"load {load}, {length} a round: {line['ratio']:.2f}\n")
        yield line


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speculation")
    parser.add_argument("--checkpoint", type=Path, help="in the released format; else a preset")
    parser.add_argument("--preset", default="bench30m")
    parser.add_argument("--numerics", default="f32", choices=sorted(NUMERICS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=61)  # 60 behind the first
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--loads", type=int, nargs="*", default=LOADS)
    parser.add_argument("--label", help="in the record's name; else the device")
    options = parser.parse_args()
    record(f"speculation_{options.label or options.device}", measure(options))


if __name__ == "__main__":
    main()
