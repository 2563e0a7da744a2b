"""Bytes of the real allocation, entries scored and rows read: counted, at the released shape."""

from dataclasses import replace

import pytest
import torch

from openv41.config import NUMERICS
from openv41.engine.paged_store import CacheConfig, PagedStore
from openv41.errors import InputError
from openv41.layers.batch import Batch
from openv41.layers.context import ForwardContext
from openv41.layers.store import Slot, Spans
from openv41.model.cache_formats import PACKINGS, row_format
from openv41.model.flops import cache_bytes
from openv41.ops import quantize
from openv41.plan import Mode, plan_layers
from openv41.presets import released
from tests.engine.mini_engine import arm
from tests.layers.mini import mini_config

FAKE = {
    "window": quantize.fake_fp8,
    "main": quantize.fake_fp4_e4m3,
    "index": quantize.fake_mxfp4,
}


def test_the_released_shape_takes_890_bytes_per_token():
    """The tensors of a real store, not a formula: pages and rings of 64 positions."""
    cache = CacheConfig(num_pages=3, page_size=64, max_requests=2, draft_tokens=0)
    store = PagedStore(released(), NUMERICS["released"], cache, dtype=torch.bfloat16)
    pages = sum(t.numel() * t.element_size() for t in store.pages.values())
    assert pages == 890 * 3 * 64
    assert store.page_bytes() == 890 * 64
    windows = [r.rows for s, r in store.rings.items() if s.kind == "window"]
    held = sum(t.numel() * t.element_size() for t in windows)
    assert held == 2 * 528 * 128 * 40
    assert cache_bytes(released()).global_per_token == 890
    assert cache_bytes(released()).window_per_request == held // 2


@pytest.mark.shapes
@pytest.mark.parametrize("kind", list(PACKINGS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [512, 128, 48])
def test_a_packed_row_reads_back_as_the_fake_quantiser_says(kind, dtype, width):
    """All scales: from values that vanish to values that saturate."""
    config = mini_config()
    attention = replace(config.attention, head_dim=width)
    config = replace(config, attention=attention, indexer=replace(config.indexer, head_dim=width))
    stored = row_format(config, kind, NUMERICS["released"], dtype)
    rows = torch.randn(4000, width) * torch.logspace(-9, 5, 4000)[:, None]
    rows = rows.to(dtype)
    packed = stored.pack(rows)
    assert (packed.dtype, packed.shape[1]) == (torch.uint8, stored.row_bytes)
    got, want = stored.unpack(packed, dtype), FAKE[kind](rows)
    assert torch.equal(got, want)
    assert torch.equal(got.signbit(), want.signbit())


def paged(config, *, num_pages=40, **options):
    cache = CacheConfig(num_pages=num_pages, page_size=4, poison=True, **options)
    return PagedStore(config, NUMERICS["f32"], cache, dtype=torch.float64)


def feed(model, store, ids, start=0):
    batch = Batch(torch.tensor(ids), (0,), (start,), (len(ids),))
    with torch.no_grad():
        return model(batch, store)


@pytest.fixture(scope="module")
def model():
    return arm(torch.float64, bitwise=False)


def decode_step(model, ids, length, monkeypatch, keep=None):
    """One step behind ``length`` tokens: its output, and the index keys that Reindex layers read.

    With ``keep`` all other index keys are NaN once the candidate source has scored them.
    """
    store, picked, source = paged(model.config), [], model.config.indexer.candidate_source
    slot = Slot("index", source)
    pick, publish = ForwardContext.pick_entries, ForwardContext.publish_selection

    def watch(ctx, of, ratio, rows):
        if of == slot:
            picked.append(rows)
        return pick(ctx, of, ratio, rows)

    def spoil(ctx, layer, *args):
        publish(ctx, layer, *args)
        if keep is not None and layer == source:
            keys = ctx.entry_rows(slot, 1)
            ctx._all_rows[slot] = torch.full_like(keys, torch.nan).index_copy(0, keep, keys[keep])

    store.open(0)
    store.reserve(0, length + 1)
    feed(model, store, ids[:length])
    with monkeypatch.context() as patch:
        patch.setattr(ForwardContext, "pick_entries", watch)
        patch.setattr(ForwardContext, "publish_selection", spoil)
        output = feed(model, store, ids[length : length + 1], length)
    return output, torch.cat(picked).unique()


def test_reindex_layers_score_the_pool_and_nothing_else(model, monkeypatch):
    """Keys outside the pool are NaN, and nothing changes; the work does not grow with context."""
    config, ids = model.config, torch.randint(0, 60, (150,)).tolist()
    scored, read = {}, {}
    for length in (60, 149):
        want, pool = decode_step(model, ids, length, monkeypatch)
        assert 0 < len(pool) <= config.indexer.pool_size < length
        got, again = decode_step(model, ids, length, monkeypatch, keep=pool)
        assert torch.equal(again, pool)
        assert torch.equal(got.hidden, want.hidden), "a key outside the pool was read"
        scored[length], read[length] = want.work.entries_scored, want.work.entries_read
    for plan in plan_layers(config):
        counts = [scored[length].get(plan.layer, 0) for length in (60, 149)]
        if plan.uses_candidates:
            assert counts[0] == counts[1] == config.indexer.pool_size
        elif plan.mode is Mode.FULL:
            assert counts == [61 // plan.ratio, 150 // plan.ratio]
        elif plan.mode is Mode.REUSE:
            assert counts == [0, 0]
        if plan.ratio:
            assert read[60][plan.layer] == read[149][plan.layer] == config.indexer.top_k


@pytest.mark.shapes
def test_an_empty_request_is_truncated_to_nothing(model):
    store = paged(model.config, draft_tokens=8)
    store.open(0)
    store.reserve(0, 3)
    store.truncate(0, 0)
    assert store.length(0) == 0
    assert store.allocator.free == store.cache.num_pages
    with pytest.raises(InputError, match="has 0 positions and can be truncated to 0"):
        store.truncate(0, 1)


def test_truncation_is_exact_as_far_as_drafts_go(model):
    config, ids = model.config, torch.randint(0, 60, (31,)).tolist()
    with torch.no_grad():
        want = model(Batch.from_documents([ids])).hidden
    store = paged(config, draft_tokens=8)
    store.open(0)
    store.reserve(0, 31)
    feed(model, store, ids[:22])
    for position in range(22, 30):
        feed(model, store, [59 - ids[position]], position)  # rejected
    store.truncate(0, 22)
    for position in range(22, 31):
        store.reserve(0, position + 1)
        got = feed(model, store, [ids[position]], position).hidden
        assert (got - want[position]).abs().max() < 1e-9, position


def test_truncation_behind_steps_forgets_what_drafters_know():
    """Steps leave it to later to note what they wrote; rings of a drafter are noted at once."""
    config = mini_config()
    cache = CacheConfig(num_pages=8, page_size=4, draft_tokens=8)
    store = PagedStore(config, NUMERICS["f32"], cache, draft_stages=1)
    drafter = Slot("window", config.num_layers)
    store.open(0)
    store.reserve(0, 9)
    store.advance(0, 0, 9)
    store.note(drafter, Spans((0,), (0,), (9,)))
    store.truncate(0, 6)
    asked = (0, 0), (6, 7)
    assert store.length(0) == 6
    for slot in (drafter, Slot("window", 0)):
        assert store.rows_before(slot, *asked) == (6, 0), slot
