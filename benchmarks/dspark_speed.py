"""Tokens per second with and without speculation, by load. Report §2.4.3.

    python -m benchmarks.dspark_speed CHECKPOINT HELDOUT --device cuda

The checkpoint is calibrated and profiled first (the files go beside it), and the rounds of the
calibration are replayed under every policy, see dspark_replay.py. Then engines take turns on the
same requests, forth and back; ratios are of neighbouring runs, and the spread is that of an engine
without speculation beside itself. On a CPU seconds are those of the process, which a busy machine
does not change.
"""

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import matplotlib as mpl
import torch

from benchmarks.dspark_replay import Rounds
from benchmarks.dspark_replay import draw as draw_replay
from benchmarks.dspark_replay import lines as replay_lines
from benchmarks.record import REPOSITORY, record
from openv41.cli.dspark import answers_of, drafting_engine, held_out_prompts
from openv41.cli.numerics import Numerics
from openv41.config import NUMERICS
from openv41.engine.answering import Collector
from openv41.engine.confidence_record import calibrate, record_confidences
from openv41.engine.dspark_files import (
    CALIBRATION_FILE,
    PROFILE_FILE,
    Surroundings,
    save_calibration,
    save_profile,
)
from openv41.engine.engine import Engine, EngineConfig
from openv41.engine.heap import freeze_heap
from openv41.engine.paged_store import CacheConfig
from openv41.engine.profile import measure_costs, tokens_needed
from openv41.engine.request import Answer, Request
from openv41.engine.scheduled_verification import schedule_verification
from openv41.engine.scheduler import ScheduleConfig
from openv41.engine.speculation import SpeculationConfig
from openv41.engine.stats import EngineStats
from openv41.io.hf_config import read_config

mpl.use("Agg")
from matplotlib import pyplot as plt

LOADS = (1, 4, 16, 64)
PROMPT_TOKENS = 64
PICTURE = REPOSITORY / "docs" / "pictures" / "dspark_speed.png"


class Arms:
    """Engines that differ in nothing but speculation; ``again`` is the first one once more."""

    def __init__(
        self, checkpoint: Path, load: int, tokens: int, options: argparse.Namespace
    ) -> None:
        longest = PROMPT_TOKENS + tokens * 4 // 3 + 9
        pages = load * (-(-longest // CacheConfig().page_size) + 1)
        cache = CacheConfig(num_pages=pages, max_requests=load)
        plain = EngineConfig(
            cache=cache,
            schedule=ScheduleConfig(tokens_per_step=max(512, PROMPT_TOKENS * load)),
            prefix_cache=False,
            speculation=None,
        )
        drafting = replace(plain, speculation=SpeculationConfig())
        none = Engine.load(
            checkpoint, config=plain, device=options.device, numerics=options.numerics
        )
        every, scheduled = (Engine(none.model, none.tokenizer, drafting) for _ in range(2))
        schedule_verification(scheduled, checkpoint)
        self.engines = {"none": none, "scheduled": scheduled, "verify all": every, "again": none}
        for engine in (none, scheduled, every):
            engine.capture_steps()
        freeze_heap()  # as 'openv41 serve' does


def clock_of(device: str) -> Callable[[], float]:
    """Seconds, those of the process on a CPU."""
    return time.process_time if device == "cpu" else time.perf_counter


def run(
    engine: Engine, requests: Sequence[Request], load: int
) -> tuple[float, float, list[Answer]]:
    """Tokens per second of decoding and in all, with ``load`` requests in flight; the answers.

    Decoding are all steps in which so many requests decode, and no prompt is computed.
    """
    clock = clock_of(engine.device.type)
    collectors = [Collector() for _ in requests]
    waiting = list(zip(requests, collectors, strict=True))[::-1]
    decoding, decoded = 0.0, 0
    synchronize(engine)
    start = clock()
    while waiting or not engine.is_idle:
        running = len(engine.scheduler.running)
        for _ in range(min(load - running, len(waiting))):
            engine.submit(*waiting.pop())
        is_decoding = not engine.scheduler.waiting
        is_decoding &= not any(job.is_prefill for job in engine.scheduler.running)
        is_decoding &= len(engine.scheduler.running) == load
        before, begun = engine.figures.generated_tokens, clock()
        engine.step()
        if is_decoding:
            decoding += clock() - begun
            decoded += engine.figures.generated_tokens - before
    synchronize(engine)
    answers = [collector.answer() for collector in collectors]
    total = sum(len(answer.tokens) for answer in answers)
    return decoded / decoding, total / (clock() - start), answers


def prepare(checkpoint: Path, text: Path, options: argparse.Namespace) -> Iterator[dict]:
    """Calibrate, profile, and replay: yield the lines of all policies."""
    most, context = max(options.loads), PROMPT_TOKENS
    numerics = None if options.numerics is None else Numerics(options.numerics)
    dspark = read_config(checkpoint).dspark
    assert dspark is not None, "the checkpoint has no drafter"
    room = context + tokens_needed(dspark.block_size)
    engine = drafting_engine(checkpoint, most, room, numerics, options.device)
    prompts = held_out_prompts(checkpoint, text, options.prompts, context)
    rounds = Rounds(*record_confidences(engine, answers_of(prompts, 64)))
    where = Surroundings.of(engine.model, graphs=engine.decode is not None)
    save_calibration(
        checkpoint / CALIBRATION_FILE, calibrate(rounds.logits, rounds.accepted), where
    )
    clock = clock_of(options.device)
    costs = measure_costs(engine, options.loads, context=context, clock=clock)
    save_profile(checkpoint / PROFILE_FILE, costs, where)
    yield from replay_lines(costs, rounds)


def synchronize(engine: Engine) -> None:
    """Wait for the device."""
    if engine.device.type == "cuda":
        torch.cuda.synchronize(engine.device)


def measure(checkpoint: Path, text: Path, options: argparse.Namespace) -> Iterator[dict]:
    """A line for each load and engine."""
    arms = Arms(checkpoint, max(options.loads), options.tokens, options)
    for load in options.loads:
        count = options.per_load * load
        prompts = held_out_prompts(checkpoint, text, count, PROMPT_TOKENS)
        requests = of_all_lengths(
            answers_of(prompts, options.tokens, temperature=options.temperature)
        )
        for engine in arms.engines.values():
            run(engine, requests[:load], load)  # warm
        before = {name: engine.stats() for name, engine in arms.engines.items()}
        speeds: dict[str, list[float]] = {name: [] for name in arms.engines}
        wholes: dict[str, list[float]] = {name: [] for name in arms.engines}
        repeated = {}
        for turn in range(options.repeats):
            names = list(arms.engines)
            for name in names if turn % 2 == 0 else reversed(names):
                speed, whole, answers = run(arms.engines[name], requests, load)
                speeds[name].append(speed)
                wholes[name].append(whole)
                repeated[name] = repeated_share(answers)
        where = asdict(Surroundings.of(arms.engines["none"].model))
        for name, engine in arms.engines.items():
            ratios = [a / b for a, b in zip(speeds[name], speeds["none"], strict=True)]
            all_ratios = [a / b for a, b in zip(wholes[name], wholes["none"], strict=True)]
            yield {
                "benchmark": "dspark_speed",
                "label": options.label,
                "device": where["device"],
                "numerics": options.numerics or "as stored",
                "load": load,
                "temperature": options.temperature,
                "engine": name,
                "tokens_per_second": statistics.median(speeds[name]),
                "ratio": statistics.median(ratios),
                "ratio_least": min(ratios),
                "ratio_most": max(ratios),
                "with_prompts": statistics.median(wholes[name]),
                "with_prompts_ratio": statistics.median(all_ratios),
                "with_prompts_ratio_least": min(all_ratios),
                "with_prompts_ratio_most": max(all_ratios),
                "repeats": options.repeats,
                "repeated_4_grams": repeated[name],
                **speculation(before[name], engine.stats()),
            }


def of_all_lengths(requests: Sequence[Request]) -> list[Request]:
    """From two thirds of their tokens to four thirds, hardly two alike.

    Requests that start and end together have their prompts computed in one step, which those of
    an engine with drafts never do.
    """
    return [
        replace(one, max_tokens=one.max_tokens * (64 + 37 * number % 65) // 96)
        for number, one in enumerate(requests)
    ]


def profile_lines(checkpoint: Path, label: str) -> Iterator[dict]:
    """What the scheduler plans by."""
    costs = json.loads((checkpoint / PROFILE_FILE).read_text())
    rows = zip(costs["requests"], costs["plain"], costs["verify"], strict=True)
    for load, plain, verify in rows:
        yield {
            "benchmark": "dspark_profile",
            "label": label,
            "device": costs["measured"]["device"],
            "load": load,
            "plain_ms": plain * 1e3,
            "verify_ms": [seconds * 1e3 for seconds in verify],
        }


def speculation(before: EngineStats, after: EngineStats) -> dict[str, object]:
    """What was drafted in between."""
    rounds = after.draft_rounds - before.draft_rounds
    verified = _gained(before.drafts_verified, after.drafts_verified)
    accepted = _gained(before.drafts_accepted, after.drafts_accepted)
    tokens = after.generated_tokens - before.generated_tokens
    pairs = zip(accepted, verified, strict=True)
    return {
        "mean_accepted_length": 1 + sum(accepted) / max(1, rounds),
        "acceptance": [a / max(1, v) for a, v in pairs],
        "drafts_per_round": sum(verified) / max(1, rounds),
        "tokens_from_drafts": sum(accepted) / max(1, tokens),
        "drafting_steps": after.draft_steps - before.draft_steps,
        "rounds": rounds,
    }


def _gained(before: Sequence[int], after: Sequence[int]) -> list[int]:
    old = [*before, *[0] * (len(after) - len(before))]
    return [b - a for a, b in zip(old, after, strict=True)]


def repeated_share(answers: Sequence[Answer]) -> float:
    """Share of 4-grams of tokens that an answer had before: looping text is easy to draft."""
    repeated = total = 0
    for answer in answers:
        found = Counter(zip(*(answer.tokens[n:] for n in range(4)), strict=False))
        total += sum(found.values())
        repeated += sum(count - 1 for count in found.values())
    return repeated / max(1, total)


def draw(lines: Sequence[dict], out: Path) -> None:
    """Draw the ratio to no speculation, and drafts per round, over the load."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
    for name, colour in (("scheduled", "black"), ("verify all", "#e07b00"), ("again", "#9aa4af")):
        rows = [line for line in lines if line["engine"] == name]
        loads, ratios = [r["load"] for r in rows], [r["ratio"] for r in rows]
        label = {"again": "no speculation, again"}.get(name, name)
        left.plot(loads, ratios, marker="o", color=colour, label=label)
        left.fill_between(
            loads,
            [r["ratio_least"] for r in rows],
            [r["ratio_most"] for r in rows],
            color=colour,
            alpha=0.15,
        )
        if name != "again":
            right.plot(loads, [r["drafts_per_round"] for r in rows], marker="o", color=colour)
    left.set(xlabel="requests at once", ylabel="tokens/s to no speculation")
    right.set(xlabel="requests at once", ylabel="drafts verified per request and round")
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_xticks(LOADS, [str(load) for load in LOADS])
    left.legend(fontsize=8)
    figure.savefig(out, dpi=120)


def main() -> None:
    """Measure, write and draw."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dspark_speed")
    parser.add_argument("checkpoint", type=Path, help="with its profile and calibration beside it")
    parser.add_argument("text", type=Path, help="held-out text")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--numerics", choices=sorted(NUMERICS), help="else as it is stored")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--per-load", type=int, default=3, help="requests for each place")
    parser.add_argument("--prompts", type=int, default=64, help="of the calibration")
    parser.add_argument("--loads", type=int, nargs="+", default=LOADS)
    parser.add_argument("--label", default="demo", help="of the model, in the record's name")
    options = parser.parse_args()
    replayed = record(
        f"dspark_replay_{options.label}", prepare(options.checkpoint, options.text, options)
    )
    draw_replay(replayed, PICTURE.with_stem(f"dspark_replay_{options.label}"))
    record(f"dspark_profile_{options.label}", profile_lines(options.checkpoint, options.label))
    name = f"dspark_speed_{options.label}"
    found = record(name, measure(options.checkpoint, options.text, options))
    draw(found, PICTURE.with_stem(name))


if __name__ == "__main__":
    main()
