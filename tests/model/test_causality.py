"""A changed token moves nothing before it, to the bit, in any layer mode."""

import pytest
import torch

from openv41.layers.batch import Batch
from openv41.layers.context import ForwardContext
from tests.layers.mini import random_ids
from tests.model.mini import Session, alone, arm_model

LENGTH = 17
MODES = {"window": 0, "full, ratio 2": 2, "reuse": 3, "reindex": 4, "full, ratio 1": 5, "pool": 7}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("at", [1, 8, 9, 16])
def test_inputs_of_one_layer(mode, at):
    """Only this layer and those it reads see the change, so no other layer hides a leak."""
    model, layer = arm_model(torch.float64, True), MODES[mode]
    x = torch.randn(LENGTH, model.config.hidden_size, dtype=torch.float64)
    changed = x.clone()
    changed[at] += 5 * torch.randn_like(x[at])
    before, after = attend(model, layer, x), attend(model, layer, changed)
    assert torch.equal(before[:at], after[:at])
    assert not torch.equal(before[at], after[at])
    later = before[at + 1 :], after[at + 1 :]
    assert at == LENGTH - 1 or not torch.equal(*later), "the change must reach later tokens"


@torch.no_grad()
def attend(model, layer, x):
    """Output of one attention after the sources it reads, all fed the same input."""
    batch = Batch.from_documents([random_ids(len(x))])
    ctx = ForwardContext(batch, model.config.attention, deterministic=True)
    for source in sorted({s for s in model.config.index_sources if s < layer}):
        model.layers[source].attention(x, ctx)
    return model.layers[layer].attention(x, ctx)


@pytest.mark.parametrize("at", [0, 5, 6, 11, 15])
def test_one_token_of_the_model(at):
    """Every tensor and choice of every layer before the token, and the other request."""
    model, ids, other = arm_model(torch.float32, True), random_ids(LENGTH), random_ids(6, seed=4)
    changed = list(ids)
    changed[at] = (ids[at] + 7) % 60
    before = Session(model).feed({0: ids, 1: other})
    after = Session(model).feed({0: changed, 1: other})
    shown = before.everything(0), after.everything(0)
    for name, value in shown[0].items():
        rows = at // 2 if name.startswith(("stored main 2", "stored index 2")) else at
        assert torch.equal(value[:rows], shown[1][name][:rows]), name
    assert not torch.equal(shown[0]["logits"][at], shown[1]["logits"][at])
    want = after.everything(1)
    for name, value in before.everything(1).items():
        assert torch.equal(value, want[name]), f"another request: {name}"


def test_far_tokens_are_reached():
    """The first token moves the last logits, far behind all windows (through selections)."""
    model, ids = arm_model(torch.float64, False), random_ids(41)
    before = alone(model, ids)["logits"][-1]
    reached = [
        not torch.equal(before, alone(model, [token, *ids[1:]])["logits"][-1])
        for token in range(5)
        if token != ids[0]
    ]
    assert any(reached)
