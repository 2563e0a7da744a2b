"""Float32 islands survive every cast of the model."""

import pytest
import torch

from openv41.layers.batch import Batch
from tests.layers.mini import mini_model, random_ids

ISLANDS = ("mhc.fn", "mhc.base", "mhc.scale", "attention.sink", "gate.bias", "gate.bias_vl")


def dtypes(model):
    islands = {n: p.dtype for n, p in model.named_parameters() if n.endswith(ISLANDS)}
    others = {n: p.dtype for n, p in model.named_parameters() if n not in islands}
    assert len(islands) == 9 * (3 * 2 + 1 + 2)
    return set(islands.values()), set(others.values())


@pytest.mark.parametrize(
    "cast", [lambda m: m.to(torch.bfloat16), lambda m: m.bfloat16(), lambda m: m.half()]
)
def test_narrow_casts_stop_at_the_islands(cast):
    model = mini_model(1, dtype=torch.float32)
    before = model.layers[3].attn_mhc.fn.detach().clone()
    islands, others = dtypes(cast(model))
    assert islands == {torch.float32}
    assert len(others) == 1
    assert others != islands
    assert torch.equal(model.layers[3].attn_mhc.fn, before), "values must not pass through a cast"


def test_built_in_bfloat16_and_saved():
    model = mini_model(1, dtype=torch.bfloat16)
    assert dtypes(model) == ({torch.float32}, {torch.bfloat16})
    again = mini_model(2, dtype=torch.bfloat16)
    again.load_state_dict(model.state_dict())
    assert dtypes(again) == ({torch.float32}, {torch.bfloat16})


def test_float64_stays_float64():
    assert dtypes(mini_model(1)) == ({torch.float64}, {torch.float64})
    assert dtypes(mini_model(1, dtype=torch.float32).double()) == ({torch.float64},) * 2


def test_bfloat16_forward_and_gradients_are_finite():
    model = mini_model(1, dtype=torch.bfloat16)
    out = model(Batch.from_documents([random_ids(1), random_ids(11)]))
    logits = model.logits(out.hidden)
    assert out.hidden.dtype == torch.bfloat16
    assert logits.dtype == torch.float32
    logits.logsumexp(-1).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all(), name
