"""The dense store: rollback is exact at every position; steps touch nothing that is not theirs."""

import pytest
import torch

from openv41.errors import InputError
from openv41.layers.batch import Batch
from openv41.layers.store import KVStore, Slot, Spans
from openv41.model.cache import DenseStore
from tests.layers.mini import random_ids
from tests.model.mini import Session, alone, arm_model, assert_same, slots

pytestmark = pytest.mark.unchecked

LENGTH = 13
IDS = random_ids(LENGTH, seed=2)


@pytest.mark.parametrize("poison", [False, True])
def test_truncate_and_redo_equals_fresh_at_every_position(poison):
    """Each request rejects what comes after another position, and goes on."""
    model = arm_model(torch.float32, True)
    wrong = {request: IDS[:request] + random_ids(6, seed=50 + request) for request in range(LENGTH)}
    session = Session(model, poison=poison).feed(wrong)
    for position in wrong:
        session.truncate(position, position)
        assert session.store.length(position) == position
    session.feed({position: IDS[position:] for position in wrong})
    want = alone(model, IDS)
    for position in wrong:
        assert_same(session.everything(position), want, torch.float32, bitwise=True)


@pytest.mark.shapes
def test_rejected_drafts_leave_no_trace():
    """Speculation with an adversarial drafter: 0 to 5 accepted of 5, at both phases of a group."""
    model = arm_model(torch.float32, True)
    session, ids = Session(model), IDS + random_ids(LENGTH, seed=3)
    session.step({0: ids[:3]})
    accepted, position = iter([0, 1, 2, 3, 4, 5, 0, 0, 1]), 3
    while position < len(ids):
        count = min(next(accepted, 0), len(ids) - position - 1)
        session.step(
            {0: ids[position : position + 1 + count] + random_ids(5 - count, seed=position)}
        )
        position += 1 + count
        session.truncate(0, position)
    assert_same(session.everything(0), alone(model, ids), torch.float32, bitwise=True)


def test_rewriting_a_position_without_truncating():
    """A step may start before the end: what it overwrites, and all behind it, is forgotten."""
    model, session = arm_model(torch.float32, True), None
    session = Session(model).feed({0: IDS[:7] + random_ids(6, seed=8)})
    with torch.no_grad():
        batch = Batch(torch.tensor(IDS[7:]), (0,), (7,), (len(IDS) - 7,))
        model(batch, session.store)
    want = Session(model).feed({0: IDS}).state(0)
    assert_same(session.state(0), want, torch.float32, bitwise=True)


def test_rows_of_others_keep_their_bytes():
    model = arm_model(torch.float32, True)
    session = Session(model).feed({0: IDS, 1: IDS[:5], 2: IDS[:6]})
    before = {request: session.state(request) for request in (0, 1, 2)}
    for token in IDS[5:]:
        session.step({1: [token]})
    for request in (0, 2):
        assert_same(session.state(request), before[request], torch.float32, bitwise=True)
    for name, value in before[1].items():
        now = session.state(1)[name]
        assert torch.equal(now[: len(value)], value), f"own rows of earlier steps: {name}"
        assert len(now) > len(value), name


def test_a_dropped_request_starts_anew():
    model = arm_model(torch.float32, True)
    session = Session(model).feed({0: random_ids(9, seed=7), 1: IDS[:4]})
    session.store.drop(0)
    session.shown.pop(0)
    assert session.store.length(0) == 0
    session.feed({0: IDS})
    assert_same(session.everything(0), alone(model, IDS), torch.float32, bitwise=True)


def test_main_and_index_rows_count_complete_groups():
    model = arm_model(torch.float32, False)
    session = Session(model)
    for position, token in enumerate(IDS[:5], start=1):
        session.step({0: [token]})
        for slot, rows in slots(model.config, position).items():
            assert session.store._bounds[0][slot] == (0, rows), slot


def test_errors():
    model = arm_model(torch.float32, False)
    session = Session(model).feed({0: IDS[:4]})
    assert isinstance(session.store, KVStore)
    with pytest.raises(InputError, match="request 0 has 4 positions; cannot truncate it to 5"):
        session.store.truncate(0, 5)
    with pytest.raises(InputError, match="cannot truncate it to -1"):
        session.store.truncate(0, -1)
    ahead = Batch(torch.tensor(IDS[5:6]), (0,), (5,), (1,))
    with pytest.raises(InputError, match="continues at position 5, but only 4 are stored"):
        model(ahead, session.store)
    far = Batch(torch.tensor([1]), (0,), (4,), (1,))
    limit = model.config.max_position
    long = Batch(torch.ones(limit + 1, dtype=torch.int64), (9,), (0,), (limit + 1,))
    with pytest.raises(InputError, match=rf"would reach position {limit + 1}; the model allows"):
        model(long, session.store)
    with pytest.raises(InputError, match="only 0 are stored"):
        model(far)


def put(store, slot, first, rows):
    store.write(slot, Spans((0,), (first,), (first + len(rows),)), rows, rows)


def get(store, slot, first, stop):
    return store.read(slot, Spans((0,), (first,), (stop,)))


def test_a_gap_of_entries_and_a_missing_row_are_internal_errors():
    store, slot = DenseStore((1,)), Slot("main", 0)
    put(store, slot, 0, torch.ones(2, 3))
    with pytest.raises(AssertionError, match="row 3 leaves a gap"):
        put(store, slot, 3, torch.ones(1, 3))
    with pytest.raises(AssertionError, match="rows 1 to 3 asked, 0 to 2 are there"):
        get(store, slot, 1, 3)


def test_a_window_begins_anew_behind_a_gap():
    store, slot = DenseStore((0,)), Slot("window", 0)
    put(store, slot, 0, torch.ones(2, 3))
    put(store, slot, 5, torch.full((3, 3), 2.0))
    assert store.rows_before(slot, (0, 1), (7, 7)) == (2, 0)
    assert store.rows_before(slot, (0,), (4,)) == (0,)
    assert torch.equal(get(store, slot, 5, 8), torch.full((3, 3), 2.0))
    with pytest.raises(AssertionError, match="rows 4 to 8 asked, 5 to 8 are there"):
        get(store, slot, 4, 8)


def test_picked_rows_are_those_of_reading_everything():
    store, slot = DenseStore((1,)), Slot("main", 0)
    spans = Spans((4, 2), (0, 0), (5, 3))
    rows = torch.randn(8, 2)
    store.write(slot, spans, rows, rows)
    assert torch.equal(store.pick(slot, spans, torch.tensor([7, 0, 5, 5])), rows[[7, 0, 5, 5]])


def test_growth_keeps_rows():
    store, slot = DenseStore((0,)), Slot("window", 0)
    rows = torch.randn(300, 2)
    for first in range(0, 300, 7):
        put(store, slot, first, rows[first : first + 7])
    assert torch.equal(get(store, slot, 0, 300), rows)
