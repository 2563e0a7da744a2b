"""What belongs to no request, or to another one, is never read: NaN there changes nothing."""

import pytest
import torch

from openv41.layers.batch import Batch
from tests.layers.mini import random_ids
from tests.model.mini import Session, alone, arm_model, arms, assert_same

pytestmark = pytest.mark.unchecked

IDS = random_ids(15, seed=6)
CHUNKS = {0: [1] * 5, 1: [4, 1, 3, 1], 2: [3]}


@arms
def test_unwritten_rows(dtype, bitwise):
    model = arm_model(dtype, bitwise)
    poisoned = Session(model, poison=True).feed(dict.fromkeys(CHUNKS, IDS), CHUNKS)
    want = alone(model, IDS)
    for request in CHUNKS:
        assert_same(poisoned.everything(request), want, dtype, bitwise=bitwise)


@arms
def test_rows_of_another_request(dtype, bitwise):
    """The other request, first in every context, turns to NaN between two steps."""
    model = arm_model(dtype, bitwise)
    session = Session(model).feed({9: IDS[:7], 0: IDS[:7]})
    for rows in session.store._rows[9].values():
        if rows.is_floating_point():
            rows.fill_(torch.nan)
    session.step({9: IDS[7:9], 0: IDS[7:9]})
    session.step({9: IDS[9:], 0: IDS[9:]})
    assert session.everything(9)["logits"][-1].isnan().all(), "the poison must be potent"
    assert_same(session.everything(0), alone(model, IDS), dtype, bitwise=bitwise)


@pytest.mark.parametrize("place", [0, 1])
def test_tokens_of_another_document_and_gradients(place):
    """A document of one token whose embedding is NaN, packed before or behind."""
    model = arm_model(torch.float32, True)
    ids = [token for token in IDS if token != 11]
    with torch.no_grad():
        clean = model.logits(model(Batch.from_documents([ids])).hidden)
        model.embed.weight[11] = torch.nan
    documents = [ids]
    documents.insert(place, [11])
    out = model.logits(model(Batch.from_documents(documents)).hidden)
    own = out[1:] if place == 0 else out[:-1]
    assert out.isnan().any()
    assert torch.equal(own, clean)
