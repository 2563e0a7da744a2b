"""Decode steps as CUDA graphs: `python -m benchmarks.decode_graphs`. Report §2.2, §2.3.2.

On `small` with random bfloat16 weights and packed caches. ``speed``: engines with and without
graphs take turns on the same requests. ``layers``: kernels and microseconds of a layer beside its
floor, the bytes of its weights and of the state that it reads over the copy rate; a replay is timed
by events, the share of a layer by its kernels in a profile. ``context``: a layer as context grows.
``engram``: a step and a prompt with tables on the GPU and in host memory.
"""

import argparse
import logging
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from benchmarks.ced_prefill import NoText
from benchmarks.context_scaling import fill
from benchmarks.h200.ceilings import about
from benchmarks.record import commit_of, record
from openv41 import CausalEncoderDecoder, init_weights, preset
from openv41.config import NUMERICS, ModelConfig
from openv41.engine.decode_graph import DecodeSteps
from openv41.engine.engine import Engine, EngineConfig
from openv41.engine.paged_store import CacheConfig, PagedStore
from openv41.engine.request import Request
from openv41.engine.sampler import SamplingConfig
from openv41.engine.scheduler import ScheduleConfig
from openv41.io.engram_store import PinnedTable
from openv41.io.tensor_names import tensor_table
from openv41.io.weight_rows import Weight
from openv41.layers.batch import Batch
from openv41.model.cache_formats import packed_bytes
from openv41.plan import LayerPlan, plan_layers

COPY_RATE = 4.28e12  # bytes/s of this card: docs/performance.md
CONTEXTS = (16384, 32768, 65536, 131072)
PAGE_SIZE = 64
PROMPT = 512
LIMITS = {"reuse": 1.02, "reindex": 1.05}  # of a layer's time from the first context to the last
FIRST_KERNEL = "boundary"  # of a sub-layer


def model_of(positions: int, device: str) -> CausalEncoderDecoder:
    """`small` with random weights."""
    config = replace(preset("small"), max_position=positions)
    model = CausalEncoderDecoder(config, NUMERICS["f32qat"], device=device, dtype=torch.bfloat16)
    init_weights(model, seed=0)
    assert config.engram is not None, "small has Engram layers"
    model.set_token_map(torch.arange(config.vocab_size) % config.engram.compressed_vocab_size)
    return model.requires_grad_(False)


def speed(model: CausalEncoderDecoder, loads: Sequence[int], steps: int) -> Iterator[dict]:
    """Tokens per second of decode steps of the engine, without and with graphs."""
    for load in loads:
        rates: dict[bool, list[float]] = {False: [], True: []}
        engines = {graphs: decoding(model, load, steps, graphs=graphs) for graphs in rates}
        for turn in range(4):
            for graphs in (False, True) if turn % 2 == 0 else (True, False):
                count = steps if graphs else max(4, steps // 4)
                rates[graphs].append(load * count / seconds_of(engines[graphs], count))
        for graphs, found in rates.items():
            yield {
                "benchmark": "decode_graphs",
                "part": "speed",
                "requests": load,
                "graphs": graphs,
                "tokens_per_second": statistics.median(found),
                "least": min(found),
                "most": max(found),
            }
        for engine in engines.values():
            engine.close()


def decoding(model: CausalEncoderDecoder, load: int, steps: int, *, graphs: bool) -> Engine:
    """An engine whose requests are all past their prompts."""
    room = PROMPT + 7 * steps + 16
    cache = CacheConfig(num_pages=load * (room // PAGE_SIZE + 2), max_requests=load)
    config = EngineConfig(
        cache=cache,
        schedule=ScheduleConfig(tokens_per_step=8192),
        prefix_cache=False,
        speculation=None,
        cuda_graphs=graphs,
    )
    engine = Engine(model, NoText(model.config.vocab_size), config)
    started: set[int] = set()
    generator = torch.Generator().manual_seed(load)
    for place in range(load):
        prompt = torch.randint(4, engine.num_tokens, (PROMPT,), generator=generator).tolist()
        request = Request(
            prompt=tuple(prompt),
            max_tokens=room - PROMPT,
            sampling=SamplingConfig(temperature=0.0),
            ignore_eos=True,
        )
        engine.submit(request, lambda event, place=place: started.add(place))
    while len(started) < load:
        engine.step()
    for _ in range(4):  # call by call, capture, replay
        engine.step()
    return engine


def seconds_of(engine: Engine, steps: int) -> float:
    """Seconds of some steps."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        engine.step()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def engram(model: CausalEncoderDecoder, loads: Sequence[int], steps: int) -> Iterator[dict]:
    """Tokens per second with the Engram tables on the GPU and in host memory, and of a prompt."""
    placed = {"resident": [e.table for e in model.engrams()]}
    specs = {spec.ours: spec for spec in tensor_table(model.config, variant="bfloat16")}
    placed["host"] = [
        PinnedTable(
            table.weight.view(torch.uint8).cpu().numpy(),
            Weight(specs[f"layers.{e.layer}.engram.table.weight"], None),
            torch.bfloat16,
        )
        for e, table in zip(model.engrams(), placed["resident"], strict=True)
    ]
    for load in loads:
        seconds: dict[str, list[float]] = {name: [] for name in placed}
        prompts: dict[str, list[float]] = {name: [] for name in placed}
        engines = {}
        for name, tables in placed.items():
            _place(model, tables)
            engines[name] = decoding(model, load, steps, graphs=True)
        for turn in range(6):
            for name in list(placed) if turn % 2 == 0 else reversed(placed):
                _place(model, placed[name])
                seconds[name].append(seconds_of(engines[name], steps) / steps)
        for turn in range(6):
            for name in list(placed) if turn % 2 == 0 else reversed(placed):
                _place(model, placed[name])
                prompts[name].append(prompt_seconds(model))
        for name in placed:
            yield {
                "benchmark": "decode_graphs",
                "part": "engram",
                "requests": load,
                "tables": name,
                "step_us": statistics.median(seconds[name]) * 1e6,
                "step_ratio": _ratio(seconds, name),
                "prompt_ms": statistics.median(prompts[name][2:]) * 1e3,
                "prompt_ratio": _ratio(prompts, name),
            }
    _place(model, placed["resident"])


def _ratio(found: dict[str, list[float]], name: str) -> float:
    return statistics.median(found[name][2:]) / statistics.median(found["resident"][2:])


def _place(model: CausalEncoderDecoder, tables: Sequence[torch.nn.Module]) -> None:
    for layer, table in zip(model.engrams(), tables, strict=True):
        layer.table = table  # type: ignore[assignment]


def prompt_seconds(model: CausalEncoderDecoder) -> float:
    """Seconds of a prompt of 8,192 tokens."""
    store = PagedStore(
        model.config,
        model.numerics,
        CacheConfig(num_pages=8192 // PAGE_SIZE + 1, max_requests=1),
        dtype=model.norm.weight.dtype,
        device=model.norm.weight.device,
    )
    store.open(0)
    store.reserve(0, 8192)
    ids = torch.randint(4, model.config.vocab_size, (8192,), device=store.device)
    torch.cuda.synchronize()
    start = time.perf_counter()
    with torch.inference_mode():
        model(Batch(ids, (0,), (0,), (8192,)), store)
    torch.cuda.synchronize()
    return time.perf_counter() - start


class Steps:
    """Replays of decode steps over a cache of random rows."""

    def __init__(self, model: CausalEncoderDecoder, load: int, context: int) -> None:
        pages = load * (context // PAGE_SIZE + 2)
        cache = CacheConfig(num_pages=pages, page_size=PAGE_SIZE, max_requests=load)
        dtype, device = model.norm.weight.dtype, model.norm.weight.device
        self.store = PagedStore(model.config, model.numerics, cache, dtype=dtype, device=device)
        for number in range(load):
            fill(self.store, number, context)
        self.steps = DecodeSteps(model, self.store)
        self.jobs = [Place(number, context, [7] * (context + 1)) for number in range(load)]

    @torch.inference_mode()
    def run(self) -> None:
        """One step, which is taken back."""
        self.steps.run([(job, 1) for job in self.jobs])  # type: ignore[misc]
        for job in self.jobs:
            self.store.truncate(job.number, job.done)
            self.store.reserve(job.number, job.done + 1)

    @torch.inference_mode()
    def replay(self) -> None:
        """The kernels of a step alone."""
        [(graph, _)] = self.steps.captured._graphs.values()
        graph.replay()


@dataclass(eq=False)
class Place:
    """What a step asks of a job."""

    number: int
    done: int
    tokens: list[int]

    def upcoming(self, count: int) -> list[int]:
        """Tokens of the next positions."""
        return self.tokens[self.done :][:count]


def layers(model: CausalEncoderDecoder, loads: Sequence[int], context: int) -> Iterator[dict]:
    """A line for each number of requests and kind of layer, and one for the whole step."""
    for load in loads:
        steps = Steps(model, load, context)
        step_us, kinds = measured(steps, model)
        for kind, (us, count, floor) in kinds.items():
            yield {
                "benchmark": "decode_graphs",
                "part": "layers",
                "requests": load,
                "context": context,
                "kind": kind,
                "us": us,
                "kernels": count,
                "floor_us": floor(load, context) / COPY_RATE * 1e6,
                "step_us": step_us,
                "heaviest": heaviest(steps),
            }


def measured(steps: Steps, model: CausalEncoderDecoder) -> tuple[float, dict]:
    """Microseconds of a step; of each kind of layer those of its kernels, and how many."""
    for _ in range(3):
        steps.run()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    samples = []
    for _ in range(20):
        first.record()
        steps.replay()
        last.record()
        torch.cuda.synchronize()
        samples.append(first.elapsed_time(last) * 1e3)
    parts = [layer_times(steps, len(plan_layers(model.config))) for _ in range(3)]
    kinds: dict[str, list[int]] = {}
    plans = plan_layers(model.config)
    for plan, following in pairwise(plans):  # behind the last comes the head
        name = f"{plan.mode.value} and engram" if following.has_engram else plan.mode.value
        kinds.setdefault(name, []).append(plan.layer)
    found = {}
    for kind, members in kinds.items():
        us = [statistics.fmean(part[layer][0] for layer in members) for part in parts]
        counts = statistics.fmean(parts[0][layer][1] for layer in members)
        found[kind] = statistics.median(us), counts, Floor(model, [plans[n] for n in members])
    return statistics.median(samples), found


def layer_times(steps: Steps, num_layers: int) -> list[tuple[float, int]]:
    """Microseconds and number of the kernels of each layer of one replay.

    An Engram comes before its layer's first boundary, and counts for the layer before.
    """
    kernels = profiled(steps)
    begins = [n for n, kernel in enumerate(kernels) if FIRST_KERNEL in kernel.name]
    assert len(begins) == 2 * num_layers, f"{len(begins)} sub-layers in the profile"
    begins = [*begins[::2], len(kernels)]
    parts = [kernels[a:b] for a, b in pairwise(begins)]
    return [(sum(k.time_range.elapsed_us() for k in part), len(part)) for part in parts]


def profiled(steps: Steps) -> list[FunctionEvent]:
    """Kernels of one replay, in their order."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        steps.replay()
        torch.cuda.synchronize()
    kernels = [e for e in found.events() if e.device_type.name == "CUDA"]
    return sorted(kernels, key=lambda e: e.time_range.start)


def heaviest(steps: Steps) -> list[tuple[str, float, int]]:
    """Name, microseconds in all and number of the kernels that take most of a replay."""
    total: dict[str, float] = {}
    count: Counter[str] = Counter()
    for kernel in profiled(steps):
        total[kernel.name] = total.get(kernel.name, 0) + kernel.time_range.elapsed_us()
        count[kernel.name] += 1
    names = sorted(total, key=lambda name: -total[name])[:12]
    return [(name[:80], round(total[name], 1), count[name]) for name in names]


class Floor:
    """Bytes that a layer of a kind reads at least, on average."""

    def __init__(self, model: CausalEncoderDecoder, plans: Sequence[LayerPlan]) -> None:
        self.model, self.plans = model, plans

    def __call__(self, load: int, context: int) -> float:
        """Of a step of so many requests."""
        config = self.model.config
        return statistics.fmean(
            self._weights(plan, load) + load * state_bytes(config, plan, context)
            for plan in self.plans
        )

    def _weights(self, plan: LayerPlan, load: int) -> float:
        moe, total = self.model.config.moe, 0.0
        used = 1 - (1 - moe.top_k / moe.num_experts) ** load  # of the experts, if even
        for name, weight in self.model.layers[plan.layer].named_parameters():
            share = used if ".experts." in name else 0 if "engram.table" in name else 1
            total += share * weight.numel() * weight.element_size()
        return total


def state_bytes(config: ModelConfig, plan: LayerPlan, context: int) -> float:
    """Bytes of window, chosen entries and scored keys that one request's token reads."""
    total = config.attention.window_size * packed_bytes(config, "window")
    if plan.ratio:
        entries = context // plan.ratio
        total += min(entries, config.indexer.top_k) * packed_bytes(config, "main")
        if plan.is_index_source:
            scored = min(entries, config.indexer.pool_size) if plan.uses_candidates else entries
            total += scored * packed_bytes(config, "index")
    return total


def contexts(model: CausalEncoderDecoder, found: Sequence[int], load: int) -> Iterator[dict]:
    """A line for each context and kind of layer, and whether the kind keeps to its limit."""
    first: dict[str, float] = {}
    for context in found:
        step_us, kinds = measured(Steps(model, load, context), model)
        for kind, (us, count, floor) in kinds.items():
            first.setdefault(kind, us)
            ratio, limit = us / first[kind], LIMITS.get(kind)
            is_last = context == found[-1]
            yield {
                "benchmark": "decode_graphs",
                "part": "context",
                "requests": load,
                "context": context,
                "kind": kind,
                "us": us,
                "kernels": count,
                "floor_us": floor(load, context) / COPY_RATE * 1e6,
                "step_us": step_us,
                "ratio": ratio,
                "met": None if limit is None or not is_last else ratio <= limit,
            }


def main() -> int:
    """Measure and record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decode_graphs")
    parser.add_argument("--loads", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    parser.add_argument("--context-requests", type=int, default=8)
    parser.add_argument("--parts", nargs="+", default=["speed", "layers", "engram", "context"])
    parser.add_argument("--commit", default="", help="of a copy without its history")
    options = parser.parse_args()
    model = model_of(2 * max(options.contexts), "cuda")
    parts = {
        "speed": lambda: speed(model, options.loads, options.steps),
        "layers": lambda: layers(model, options.loads, options.contexts[0]),
        "engram": lambda: engram(model, options.loads, options.steps),
        "context": lambda: contexts(model, options.contexts, options.context_requests),
    }

    def told(part: str) -> Iterator[dict]:
        for line in parts[part]():
            sys.stderr.write(f"{line}\n")
            yield line

    missed = False
    for part in options.parts:  # each in a file of its own, so that one that fails spoils no other
        try:
            lines = record(
                f"decode_graphs_{part}", told(part), about=about() | commit_of(options.commit)
            )
        except Exception:
            logging.exception("%s was not measured", part)
            missed = True
        else:
            missed |= any(line.get("met") is False for line in lines)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
