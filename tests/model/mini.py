"""Sessions of the mini model: requests fed in steps, and everything they show kept by request."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from openv41.config import NUMERICS
from openv41.layers.batch import Batch
from openv41.layers.probe import CHOICES, Probe
from openv41.layers.store import Slot, Spans
from openv41.model.cache import DenseStore
from tests.close import assert_close
from tests.layers.mini import mini_model

WIDTH = 64  # columns that candidate masks are padded to
KEPT = (*CHOICES, "window_kv", "engram_hash_ids", "engram_gate", "expert_weights", "out")
TOLERANCES = {torch.float64: 1e-10, torch.float32: 2e-4}

# dtype, and whether results must be equal to the bit.
arms = pytest.mark.parametrize(
    ("dtype", "bitwise"),
    [
        pytest.param(torch.float64, False, id="float64"),
        pytest.param(torch.float32, True, id="float32 to the bit"),
    ],
)
all_arms = pytest.mark.parametrize(
    ("dtype", "bitwise"),
    [
        *arms.args[1],
        pytest.param(torch.float32, False, id="float32"),
        pytest.param(torch.float64, True, id="float64 to the bit"),
        pytest.param(torch.bfloat16, True, id="bfloat16 to the bit"),
    ],
)


def arm_model(dtype, bitwise, numerics="f32", seed=3):
    """A mini model, deterministic where results are to be equal to the bit; routes differ."""
    model = mini_model(seed, dtype, replace(NUMERICS[numerics], deterministic=bitwise))
    with torch.no_grad():
        for layer in model.layers:
            layer.moe.gate.bias *= 0.1
    return model


class Session:
    """A store, and what each request has shown so far, row by position."""

    def __init__(self, model, *, poison=False):
        self.model = model
        self.store = DenseStore(model.config.compress_ratios, poison=poison)
        self.shown = {}

    @torch.no_grad()
    def step(self, new, probe=None):
        """Feed new tokens, by request, in one forward; return the logits of each request."""
        starts = tuple(self.store.length(request) for request in new)
        counts = tuple(len(ids) for ids in new.values())
        ids = torch.tensor([i for ids in new.values() for i in ids], dtype=torch.int64)
        probe = probe or Probe(lambda name: name.rpartition(".")[2] in KEPT)
        out = self.model(Batch(ids, tuple(new), starts, counts), self.store, probe=probe)
        rows = {
            name: _widen(name, value, self.model.config) for name, value in probe.values.items()
        }
        rows["logits"] = self.model.logits(out.hidden)
        parts = {name: value.split(counts) for name, value in rows.items()}
        for place, request in enumerate(new):
            shown = self.shown.setdefault(request, {name: [] for name in rows})
            for name, pieces in parts.items():
                shown[name].append(pieces[place])
        return dict(zip(new, parts["logits"], strict=True))

    def feed(self, tokens, chunks=None):
        """Feed requests side by side, each in its own chunks: sizes by request, then the rest."""
        taken = dict.fromkeys(tokens, 0)
        sizes = {request: iter((chunks or {}).get(request, ())) for request in tokens}
        while rest := {r: ids[taken[r] :] for r, ids in tokens.items() if taken[r] < len(ids)}:
            new = {r: ids[: next(sizes[r], len(ids))] for r, ids in rest.items()}
            self.step(new)
            taken = {r: taken[r] + len(new.get(r, ())) for r in taken}
        return self

    def everything(self, request):
        """What a request has shown, and all its stored rows."""
        shown = {name: torch.cat(rows) for name, rows in self.shown[request].items()}
        for name in (n for n in shown if n.endswith("mask")):
            shown[name] = shown[name].tril()  # ratio 1: the rest of the newest block is not visible
        return shown | self.state(request)

    def state(self, request):
        """All stored rows of a request."""
        length, store = self.store.length(request), self.store
        return {
            f"stored {slot.kind} {slot.layer}": store.read(
                slot, Spans((request,), (0,), (rows,))
            ).clone()
            for slot, rows in slots(self.model.config, length).items()
        }

    def truncate(self, request, position):
        """Truncate a request, and what it has shown."""
        self.store.truncate(request, position)
        shown = self.shown[request]
        self.shown[request] = {n: [torch.cat(rows)[:position]] for n, rows in shown.items()}


def alone(model, ids):
    """Everything that one request shows in one forward."""
    return Session(model).feed({0: ids}).everything(0)


def slots(config, length):
    """Every slot of a request of this length, and its rows."""
    found = {Slot("tokens", -1): length}
    for layer, ratio in enumerate(config.compress_ratios):
        found[Slot("window", layer)] = length
        if layer in config.kv_sources:
            found |= {Slot(kind, layer): length // ratio for kind in ("main", "index")}
            if ratio == 2:
                found[Slot("pending", layer)] = length
    return found


def assert_same(got, want, dtype, *, bitwise):
    """Discrete tensors are equal; the others too where ``bitwise``, else close."""
    assert got.keys() == want.keys()
    for name, value in want.items():
        if bitwise or not value.is_floating_point():
            assert got[name].dtype == value.dtype, name
            assert torch.equal(got[name], value), f"{name} differs: {got[name]}, want {value}"
        else:
            tolerance = TOLERANCES[dtype]
            assert_close(name, got[name], value, rtol=tolerance, atol=tolerance)


def _widen(name, value, config):
    """Give choices a width that does not depend on the batch."""
    if name.endswith("topk_indices"):
        return F.pad(value, (0, config.indexer.top_k - value.shape[1]), value=-1)
    return F.pad(value, (0, WIDTH - value.shape[1])) if name.endswith("mask") else value
