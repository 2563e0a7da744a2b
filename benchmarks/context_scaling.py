"""One decode step at growing context: `python -m benchmarks.context_scaling`. Report §2.3.2.

The cache of `thin` is filled with random rows. Entries scored and rows read are counted where the
layers do it: linear in the context for Full layers, constant for Reindex layers beyond their pool
and for Reuse layers. Times are those of a CPU, for the shape of the curve.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import matplotlib as mpl
import torch

from benchmarks.record import REPOSITORY, record
from openv41 import CausalEncoderDecoder, init_weights, preset
from openv41.config import NUMERICS
from openv41.engine.paged_store import CacheConfig, PagedStore
from openv41.layers.batch import Batch
from openv41.layers.store import Slot, Spans
from openv41.model.causal_encoder_decoder import Output
from openv41.plan import LayerPlan, plan_layers

mpl.use("Agg")
from matplotlib import pyplot as plt

CONTEXTS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
SAMPLES = 5
PICTURE = REPOSITORY / "docs" / "pictures" / "context_scaling.png"
PAGE_SIZE = 64


def main() -> None:
    """Measure, record and draw."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.context_scaling")
    parser.add_argument("--most", type=int, default=CONTEXTS[-1])
    options = parser.parse_args()
    draw(record("context_scaling", measure([c for c in CONTEXTS if c <= options.most])))


def measure(contexts: list[int]) -> Iterator[dict[str, object]]:
    """Yield a line for each context and kind of layer."""
    config = replace(preset("thin"), max_position=2 * contexts[-1])
    model = CausalEncoderDecoder(config, NUMERICS["f32qat"])
    init_weights(model, seed=0)
    model.set_token_map(torch.arange(config.vocab_size) % config.engram.compressed_vocab_size)
    for context in contexts:
        store = filled_store(model, context)
        output, seconds = decode(model, store, context)
        for kind, plans in kinds(plan_layers(config)).items():
            line = count(store, output, plans) | {"kind": kind, "layers": len(plans)}
            yield {"benchmark": "context_scaling", "context": context, "ms": seconds * 1e3} | line
        sys.stderr.write(f"context {context:,}: {seconds * 1e3:.1f} ms\n")


def filled_store(model: CausalEncoderDecoder, context: int) -> PagedStore:
    """A packed cache that holds random state of so many positions."""
    config = model.config
    cache = CacheConfig(num_pages=context // PAGE_SIZE + 1, page_size=PAGE_SIZE, max_requests=1)
    store = PagedStore(config, model.numerics, cache)
    fill(store, 0, context)
    return store


def fill(store: PagedStore, request: int, context: int) -> None:
    """Give a new request random state of so many positions, and room for one more."""
    config, device = store.config, store.device
    store.open(request)
    store.reserve(request, context + 1)
    generator = torch.Generator(device).manual_seed(context)
    widths = {"index": config.indexer.head_dim}
    window = config.attention.window_size
    slots = [(s, context // config.compress_ratios[s.layer]) for s in store.pages]
    for slot, stop in [*slots, *((s, context) for s in store.rings if s.kind == "window")]:
        first = context - window if slot.kind == "window" else 0
        width = widths.get(slot.kind, config.attention.head_dim)
        rows = torch.randn(stop - first, width, generator=generator, device=device)
        store.write(slot, Spans((request,), (first,), (stop,)), rows, rows)
    ids = torch.randint(0, config.vocab_size, (4,), generator=generator, device=device)
    store.write(Slot("tokens", -1), Spans((request,), (context - 4,), (context,)), ids, ids)


@torch.inference_mode()
def decode(model: CausalEncoderDecoder, store: PagedStore, context: int) -> tuple[Output, float]:
    """Median seconds of one step, which is taken back each time."""
    seconds = []
    for _ in range(SAMPLES + 1):
        start = time.perf_counter()
        output = model(Batch(torch.tensor([5]), (0,), (context,), (1,)), store)
        seconds.append(time.perf_counter() - start)
        store.truncate(0, context)
        store.reserve(0, context + 1)
    return output, statistics.median(seconds[1:])


def kinds(plans: tuple[LayerPlan, ...]) -> dict[str, list[LayerPlan]]:
    """Layers by what they do for their global context."""
    found: dict[str, list[LayerPlan]] = {}
    for plan in plans:
        if plan.ratio:
            found.setdefault(plan.mode.value, []).append(plan)
    return found


def count(store: PagedStore, output: Output, plans: list[LayerPlan]) -> dict[str, object]:
    """Entries scored and bytes of selected entries, of all layers of a kind."""
    scored = sum(output.work.entries_scored.get(plan.layer, 0) for plan in plans)
    read = sum(output.work.entries_read.get(plan.layer, 0) for plan in plans)
    return {
        "entries_scored": scored,
        "index_bytes_read": scored * store.row_bytes("index"),
        "entries_read": read,
        "main_bytes_read": read * store.row_bytes("main"),
    }


def draw(lines: list[dict[str, object]]) -> None:
    """Draw entries scored per layer, and the time of a step, over the context."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for kind in ("full", "reindex", "reuse"):
        rows = [line for line in lines if line["kind"] == kind]
        per_layer = [line["entries_scored"] / line["layers"] for line in rows]
        left.plot([line["context"] for line in rows], per_layer, marker="o", label=kind)
    left.set(xscale="log", xlabel="context", ylabel="entries scored per layer and token")
    left.set_yscale("symlog", linthresh=10)
    left.set_ylim(bottom=-1)
    left.legend()
    whole = [line for line in lines if line["kind"] == "full"]
    right.plot([w["context"] for w in whole], [w["ms"] for w in whole], marker="o", color="black")
    right.set(xscale="log", xlabel="context", ylabel="ms of a decode step (CPU)", ylim=(0, None))
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURE, dpi=120)


if __name__ == "__main__":
    main()
