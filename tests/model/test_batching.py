"""What else is in a batch, or in a packed row, changes nothing."""

import pytest
import torch

from openv41.layers import hierarchical_indexer
from openv41.layers.batch import Batch
from tests.layers.mini import random_ids
from tests.model.mini import Session, all_arms, alone, arm_model, arms, assert_same

pytestmark = pytest.mark.unchecked

LENGTHS = (1, 2, 3, 4, 5, 8, 15)  # around the window of 4, odd and even
DOCUMENTS = {request: random_ids(length, seed=request) for request, length in enumerate(LENGTHS)}


@arms
def test_requests_alone_and_together(dtype, bitwise):
    model = arm_model(dtype, bitwise)
    together = Session(model).feed(DOCUMENTS)
    for request, ids in DOCUMENTS.items():
        assert_same(together.everything(request), alone(model, ids), dtype, bitwise=bitwise)


@arms
def test_decode_rows_beside_a_prefill(dtype, bitwise):
    """Continuous batching: two requests decode while a third is prefilled in pieces."""
    model = arm_model(dtype, bitwise)
    prompts = {7: random_ids(13, seed=1), 3: random_ids(9, seed=2), 5: random_ids(15, seed=3)}
    mixed = Session(model)
    mixed.step({7: prompts[7][:6], 3: prompts[3][:3]})
    mixed.step({7: prompts[7][6:7], 5: prompts[5][:7], 3: prompts[3][3:4]})
    mixed.step({3: prompts[3][4:6], 7: prompts[7][7:8], 5: []})
    mixed.step({5: prompts[5][7:], 3: prompts[3][6:], 7: prompts[7][8:]})
    for request, ids in prompts.items():
        assert_same(mixed.everything(request), alone(model, ids), dtype, bitwise=bitwise)


@all_arms
def test_packed_documents_never_see_each_other(dtype, bitwise):
    model = arm_model(dtype, bitwise)
    with torch.no_grad():
        packed = model.logits(model(Batch.from_documents([*DOCUMENTS.values()])).hidden)
        parts = packed.split(LENGTHS)
        for part, ids in zip(parts, DOCUMENTS.values(), strict=True):
            lone = model.logits(model(Batch.from_documents([ids])).hidden)
            assert_same({"logits": part}, {"logits": lone}, dtype, bitwise=bitwise)


@pytest.mark.parametrize("other", [0, 1, 7])
def test_order_in_the_batch_does_not_matter(other):
    model, ids = arm_model(torch.float32, True), random_ids(10, seed=9)
    first = Session(model).feed({0: ids, 1: random_ids(other)})
    last = Session(model).feed({1: random_ids(other), 0: ids})
    assert_same(first.everything(0), last.everything(0), torch.float32, bitwise=True)


@pytest.mark.shapes
def test_gradients_of_packed_documents_add_up():
    model = arm_model(torch.float64, False)
    documents = [DOCUMENTS[2], DOCUMENTS[5], DOCUMENTS[4]]

    def gradients(batches):
        model.zero_grad()
        for batch in batches:
            model.logits(model(batch).hidden).logsumexp(-1).sum().backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    packed = gradients([Batch.from_documents(documents)])
    apart = gradients([Batch.from_documents([ids]) for ids in documents])
    assert_same(packed, apart, torch.float64, bitwise=False)


def test_a_batch_without_tokens():
    model = arm_model(torch.float32, False)
    out = model(Batch.from_documents([[], []]))
    assert model.logits(out.hidden).shape == (0, model.config.vocab_size)


@pytest.mark.parametrize("rows_at_once", [1 << 24, 24])
def test_candidates_listed_apart_choose_the_same(monkeypatch, rows_at_once):
    """As a GPU gathers them: every token alone, all at once or a few at a time."""
    model = arm_model(torch.float64, False)
    want = Session(model).feed(DOCUMENTS, {6: [9, 3]})
    monkeypatch.setattr(hierarchical_indexer, "lists_candidates", lambda *_: True)
    monkeypatch.setattr(hierarchical_indexer, "PAIRS_LISTED", rows_at_once)
    apart = Session(model).feed(DOCUMENTS, {6: [9, 3]})
    for request in DOCUMENTS:
        assert_same(
            apart.everything(request), want.everything(request), torch.float64, bitwise=False
        )
