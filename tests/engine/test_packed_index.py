"""Choices from packed keys in their pages are those from unpacked ones."""

from dataclasses import replace

import pytest
import torch

from openv41 import Batch, CausalEncoderDecoder, init_weights, preset
from openv41.config import NUMERICS
from openv41.engine.paged_store import CacheConfig, PagedStore
from openv41.layers import hierarchical_indexer as indexer
from openv41.layers.probe import CHOICES, Probe

CONFIG = replace(preset("tiny"), dspark=None)
STEPS = [((0, 1), (70, 9)), ((0, 1), (1, 1)), ((1, 0), (3, 3)), ((1,), (1,)), ((0, 1), (2, 40))]


@torch.no_grad()
def choices(config=CONFIG, device="cpu"):
    """What is chosen in steps of one and of two requests, by name."""
    model = CausalEncoderDecoder(config, NUMERICS["f32qat"], dtype=torch.float32)
    init_weights(model, seed=0)
    for parameter in model.parameters():
        parameter.mul_(3)
    model.set_token_map(torch.arange(CONFIG.vocab_size) % CONFIG.engram.compressed_vocab_size)
    model.to(device)
    cache = CacheConfig(num_pages=12, max_requests=2)
    store = PagedStore(config, NUMERICS["f32qat"], cache, device=device)
    found, generator = [], torch.Generator().manual_seed(1)
    for request in (0, 1):
        store.open(request)
    for requests, counts in STEPS:
        starts = tuple(store.length(request) for request in requests)
        for request, start, count in zip(requests, starts, counts, strict=True):
            store.reserve(request, start + count)
        ids = torch.randint(4, 1024, (sum(counts),), generator=generator)
        probe = Probe(lambda name: name.rpartition(".")[2] == "topk_indices")
        model(Batch(ids.to(device), requests, starts, counts), store, probe=probe)
        found.append(probe.values)
    return found


@pytest.mark.parametrize("many", [4, 32])
def test_packed_keys_choose_the_same(monkeypatch, many):
    assert "topk_indices" in CHOICES
    want = choices()
    monkeypatch.setattr(indexer, "reads_packed_rows", lambda *_: True)
    monkeypatch.setattr(indexer, "MANY_TOKENS", many)
    seen = []
    select = indexer.HierarchicalIndexer._select_from_packed
    monkeypatch.setattr(
        indexer.HierarchicalIndexer,
        "_select_from_packed",
        lambda self, *given: (seen.append(self.plan.layer), select(self, *given)),
    )
    got = choices()
    assert len(set(seen)) == len(got[0])
    for a, b in zip(got, want, strict=True):
        for name, value in b.items():
            assert (a[name] == value).float().mean() > 0.98, name  # a score may round elsewise


@pytest.mark.gpu
def test_packed_keys_choose_the_same_on_a_gpu(monkeypatch):
    """With index keys of the released width, which the kernels read."""
    config = replace(CONFIG, indexer=replace(CONFIG.indexer, num_heads=8, head_dim=128))
    assert config.indexer.head_dim == indexer.PACKED_WIDTH
    got = choices(config, "cuda")
    monkeypatch.setattr(indexer, "reads_packed_rows", lambda *_: False)
    for a, b in zip(got, choices(config, "cuda"), strict=True):
        for name, value in b.items():
            assert (a[name] == value).float().mean() > 0.98, name
