"""CED prefill: `python -m benchmarks.ced_prefill`. Report §2.2.

One prompt on `thin` (20 + 20 layers) with the same engine in its three modes, in rotated order. The
theory is the ratio of the operations that a full prefill takes to those of the mode, from the rows
that each layer computes.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import torch

from benchmarks.h200 import ceilings
from benchmarks.record import commit_of, record
from openv41 import CausalEncoderDecoder, init_weights, preset
from openv41.engine.engine import Engine, EngineConfig
from openv41.engine.paged_store import CacheConfig
from openv41.engine.request import Request
from openv41.engine.sampler import SamplingConfig
from openv41.engine.scheduler import ScheduleConfig
from openv41.io.tokenizer import TextTokenizer
from openv41.model.flops import prompt_flops
from openv41.model.prefill import PrefillMode, find_cut, prompt_rows

TOKENS_PER_STEP = {"cpu": 1024, "cuda": 2048}
GOAL = {"cpu": {PrefillMode.BOUNDED: 1.75}, "cuda": {PrefillMode.BOUNDED: 1.80}}


class NoText(TextTokenizer):
    """Tokens without text."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def token_bytes(self, token: int) -> bytes:
        """Nothing."""
        return b""


def main() -> int:
    """Measure and record; 1 where a goal is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ced_prefill")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--commit", default="", help="of a copy without its history")
    options = parser.parse_args()
    where, given = options.device, (options.tokens, options.rounds)
    name = "ced_prefill" if where == "cpu" else f"ced_prefill_{where}"
    about = None if where == "cpu" else ceilings.about() | commit_of(options.commit)
    lines = record(name, measure(*given, where), about=about)
    for line in lines:
        sys.stderr.write(f"{line}\n")
    return int(any(line["met"] is False for line in lines))


def measure(tokens: int, rounds: int, device: str = "cpu") -> Iterator[dict[str, object]]:
    """Yield a line for each mode."""
    config = replace(preset("thin"), max_position=2 * tokens)
    model = CausalEncoderDecoder(config, device=device)
    init_weights(model, seed=0)
    model.set_token_map(torch.arange(config.vocab_size) % config.engram.compressed_vocab_size)
    engines = {mode: engine_of(model, mode, tokens) for mode in PrefillMode}
    if device != "cpu":
        for engine in engines.values():
            first_token(engine, [5] * (2 * engine.config.schedule.tokens_per_step))  # compiles
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(3, config.vocab_size, (tokens,), generator=generator).tolist()
    seconds: dict[PrefillMode, list[float]] = {mode: [] for mode in PrefillMode}
    for turn in range(rounds):
        modes = list(PrefillMode)
        for mode in modes if turn % 2 == 0 else reversed(modes):
            seconds[mode].append(first_token(engines[mode], prompt))
    cut, _ = find_cut(config)
    work = {
        m: prompt_flops(model, prompt_rows(config, m, tokens, cut=cut), tokens) for m in seconds
    }
    full = statistics.median(seconds[PrefillMode.FULL])
    for mode, times in seconds.items():
        ratio = full / statistics.median(times)
        goal = GOAL[device].get(mode)
        yield {
            "benchmark": "ced_prefill",
            "preset": "thin",
            "tokens": tokens,
            "mode": mode.value,
            "median_seconds": statistics.median(times),
            "seconds": times,
            "flops": work[mode],
            "ratio_to_full": ratio,
            "theory": work[PrefillMode.FULL] / work[mode],
            "goal": goal,
            "met": None if goal is None else ratio >= goal,
        }


def engine_of(model: CausalEncoderDecoder, mode: PrefillMode, tokens: int) -> Engine:
    """An engine without prefix reuse."""
    config = EngineConfig(
        cache=CacheConfig(num_pages=tokens // 64 + 2, max_requests=1),
        schedule=ScheduleConfig(tokens_per_step=TOKENS_PER_STEP[model.norm.weight.device.type]),
        prefill=mode,
        prefix_cache=False,
    )
    return Engine(model, NoText(model.config.vocab_size), config)


def first_token(engine: Engine, prompt: list[int]) -> float:
    """Seconds from the request to its first token."""
    greedy = SamplingConfig(temperature=0.0)
    request = Request(prompt=tuple(prompt), max_tokens=1, sampling=greedy, ignore_eos=True)
    start = time.perf_counter()
    engine.generate([request])
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
