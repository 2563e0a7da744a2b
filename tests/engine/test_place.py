"""Packed rows that a layer writes itself lie where the store would have put them."""

from dataclasses import replace

import pytest
import torch

from openv41 import preset
from openv41.config import NUMERICS
from openv41.engine.paged_store import CacheConfig, PagedStore
from openv41.layers.latents import Latents
from openv41.layers.quantized_linear import RMSNorm
from openv41.layers.store import Slot, Spans
from openv41.model.cache import DenseStore
from openv41.ops import rope_frequencies, rope_table

CONFIG = replace(preset("tiny"), dspark=None)
SPANS = Spans((0, 1), (0, 0), (70, 9))
KINDS = {
    "window": Slot("window", 3),
    "main": Slot("main", CONFIG.kv_sources[0]),
    "index": Slot("index", CONFIG.kv_sources[0]),
}


def store(numerics="f32qat"):
    made = PagedStore(CONFIG, NUMERICS[numerics], CacheConfig(num_pages=8, max_requests=2))
    for request, stop in enumerate(SPANS.stops):
        made.open(request)
        made.reserve(request, 2 * stop)
    return made


def latents(kind):
    width = CONFIG.indexer.head_dim if kind == "index" else CONFIG.attention.head_dim
    rope = rope_table(torch.arange(SPANS.total), rope_frequencies(CONFIG.attention.rope_dim, 1e4))
    norm = None if kind == "main" else RMSNorm(width, 1e-20)
    if norm is not None:
        torch.nn.init.normal_(norm.weight)
        norm.requires_grad_(False)
    rows = torch.randn(SPANS.total, width)
    return Latents(kind, rows, norm, rope, NUMERICS["f32qat"])


def all_bytes(made, slot):
    return made.rings[slot].rows if slot in made.rings else made.pages[slot]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("frozen", [0, 12])
def test_placed_rows_are_those_that_are_written(kind, frozen):
    slot, given = KINDS[kind], latents(kind)
    written, placed = store(), store()
    for made in (written, placed):
        made._held[0].frozen = frozen
    written.write(slot, SPANS, given.rounded, given.unrounded)
    values = given.pack_into(placed.place(slot, SPANS))
    assert torch.equal(values, given.rounded)
    assert torch.equal(all_bytes(placed, slot), all_bytes(written, slot))
    assert all_bytes(placed, slot).any()
    if kind == "window":
        assert placed.rows_before(slot, (0, 1), SPANS.stops) == written.rows_before(
            slot, (0, 1), SPANS.stops
        )


@pytest.mark.parametrize(
    ("made", "slot"),
    [
        (store("f32"), KINDS["main"]),
        (store(), Slot("tokens", -1)),
        (DenseStore(CONFIG.compress_ratios), KINDS["window"]),
    ],
)
def test_what_is_not_packed_has_no_place(made, slot):
    assert made.place(slot, SPANS) is None
