"""A mini model with a drafter, and what its drafter says behind any anchor."""

from dataclasses import replace

import torch

from openv41.config import NUMERICS
from openv41.layers.batch import Batch
from openv41.model.cache import DenseStore
from tests.layers.mini import drafting_config, mini_model, oracle_config, oracle_weights
from tests.oracles import dspark as oracle

WINDOW = 4
SIZE = 5


def drafting_model(dtype=torch.float64, numerics="f32", seed=5, **changes):
    """Random in every weight; routes differ from token to token."""
    deterministic = changes.pop("deterministic", False)
    numerics = replace(NUMERICS[numerics], deterministic=deterministic)
    model = mini_model(seed, dtype, numerics, drafting_config(**changes))
    with torch.no_grad():
        for stage in (*model.layers, *model.drafter.stages):
            stage.moe.gate.bias *= 0.1
    return model


@torch.no_grad()
def features(model, ids):
    """What the drafter reads of a text: [T, 3 D]."""
    return model(Batch.from_documents([ids])).taps


@torch.no_grad()
def propose(model, taps, requests, *, chunks=None):
    """Commit features and propose behind anchors.

    ``requests`` maps a request to (anchor, position); ``taps`` its features of all positions
    before, written in one piece or in ``chunks`` of this size.
    """
    store = DenseStore(model.config.compress_ratios, poison=True)
    for request, (_, position) in requests.items():
        step = chunks or max(1, position)
        for start in range(0, position, step):
            part = taps[request][start : min(start + step, position)]
            fed = Batch(torch.zeros(len(part)).long(), (request,), (start,), (len(part),))
            model.drafter.write_context(part, fed, store)
    anchors = torch.tensor([anchor for anchor, _ in requests.values()])
    starts = tuple(position for _, position in requests.values())
    batch = Batch(anchors, tuple(requests), starts, (1,) * len(requests))
    return model.drafter.propose(model, batch, store)


def propose_one(model, taps, anchor, position, **options):
    """The same for one request."""
    return propose(model, {7: taps}, {7: (anchor, position)}, **options)


def run_oracle(model, taps, anchor, position, **options):
    """The oracle's draft."""
    weights, config = oracle_weights(model), oracle_config(model.config)
    return oracle.draft(weights, config, taps.double().numpy(), anchor, position, **options)
