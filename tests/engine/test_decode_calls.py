"""How many calls a layer of a decode step makes: on a GPU each is a launch, which is what it costs.

Counted on a CPU for a request with one new token. An op that has a kernel counts as its launches;
what only a GPU spares (a copy, a cast) is counted as a CPU makes it.
"""

import sys
from collections import Counter, defaultdict
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.decode_graphs import Place
from benchmarks.step_profile import SILENT
from openv41.engine.decode_graph import DecodeSteps
from openv41.engine.paged_store import CacheConfig, PagedStore
from openv41.layers import hierarchical_indexer
from openv41.model.causal_encoder_decoder import Layer
from openv41.ops._dispatch import Op
from tests.engine.mini_engine import arm
from tests.layers.mini import mini_config

LAUNCHES = {"packed_sparse_attention": 2, "expert_mixture": 3, "choose_candidates": 2}
# Of layers that make nothing for those behind them (turns, tables): Reuse, Reindex with an Engram,
# Reuse, and Reindex from candidates.
MOST = {3: 14, 4: 30, 6: 14, 7: 20}


class Counting(TorchDispatchMode):
    """Counts calls by the layer that makes them."""

    def __init__(self):
        super().__init__()
        self.is_on, self.layer = True, -1
        self.calls = defaultdict(Counter)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if self.is_on and name not in SILENT:
            frame = sys._getframe(1)
            while frame is not None and "/openv41/" not in frame.f_code.co_filename:
                frame = frame.f_back
            place = "" if frame is None else f"{frame.f_code.co_name}:{frame.f_lineno} "
            self.calls[self.layer][place + name] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def counting(monkeypatch):
    """A counter to which an op with a kernel is that kernel."""
    counter, call, forward = Counting(), Op.__call__, Layer.forward

    def op(self, *args, **options):
        if not (self.has_kernel_file and counter.is_on):
            return call(self, *args, **options)
        counter.calls[counter.layer][self.__name__] += LAUNCHES.get(self.__name__, 1)
        counter.is_on = False
        try:
            return call(self, *args, **options)
        finally:
            counter.is_on = True

    def layer(self, streams, ctx):
        counter.layer = self.plan.layer
        return forward(self, streams, ctx)

    monkeypatch.setattr(Op, "__call__", op)
    monkeypatch.setattr(Layer, "forward", layer)
    monkeypatch.setattr(hierarchical_indexer, "reads_packed_rows", lambda *_: True)
    return counter


def test_layers_make_few_calls(counting):
    config = mini_config()
    config = replace(config, attention=replace(config.attention, head_dim=32, rope_dim=8))
    model = arm(torch.float32, bitwise=False, numerics="f32qat", config=config)
    cache = CacheConfig(num_pages=20, page_size=4, max_requests=1)
    store = PagedStore(config, model.numerics, cache, dtype=torch.float32, device="cpu")
    store.open(0)
    store.reserve(0, 8)
    steps = DecodeSteps(model, store, captures=False)
    with torch.no_grad():
        for position in range(4):
            counting.calls.clear()
            with counting:
                steps.run([(Place(0, position, [7] * 8), 1)])
    found = {layer: counting.calls[layer].total() for layer in MOST}
    assert all(found[n] <= most for n, most in MOST.items()), found
