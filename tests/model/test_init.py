"""Initial values, dtypes and the float32 islands of a whole model."""

import io
import math

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from openv41.config import NUMERICS
from openv41.layers.batch import Batch
from openv41.layers.probe import Probe
from openv41.model.causal_encoder_decoder import CausalEncoderDecoder
from openv41.model.init import init_weights
from tests.layers.mini import VOCAB, mini_config, mini_model, random_ids, token_map

ISLANDS = ("_mhc.fn", "_mhc.base", "_mhc.scale", "attention.sink", "gate.bias", "gate.bias_vl")


def fresh(seed, dtype=torch.float32):
    model = CausalEncoderDecoder(mini_config(), NUMERICS["f32"], dtype=dtype)
    model.set_token_map(token_map())
    init_weights(model, seed)
    return model


def test_init_depends_on_the_seed_alone():
    first = fresh(1).state_dict()
    torch.manual_seed(99)
    again, other = fresh(1).state_dict(), fresh(2).state_dict()
    for name, value in first.items():
        assert torch.equal(value, again[name]), name
        assert value.isfinite().all(), name
    assert not torch.equal(first["embed.weight"], other["embed.weight"])


def test_a_fresh_model_knows_nothing():
    model, ids = fresh(3), torch.tensor(random_ids(200))
    loss = F.cross_entropy(model.logits(model(Batch.packed(ids, [200])).hidden)[:-1], ids[1:])
    assert loss.item() == pytest.approx(math.log(VOCAB), abs=0.05)


def islands_of(model):
    return {n: p for n, p in model.state_dict().items() if n.endswith(ISLANDS)}


def test_islands_survive_a_cast_and_a_file():
    model = mini_model(4, torch.float32)
    want = {name: value.clone() for name, value in islands_of(model).items()}
    assert len(want) == 9 * (3 + 3 + 1 + 2)
    model.to(torch.bfloat16)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = mini_model(5, torch.bfloat16)
    loaded.load_state_dict(torch.load(file))
    for state in (model.state_dict(), loaded.state_dict()):
        for name, value in state.items():
            if name in want:
                assert torch.equal(value, want[name]), name
            else:
                assert value.dtype == torch.bfloat16, name


def test_bfloat16_runs_close_to_float32():
    wide, narrow = mini_model(4, torch.float32), mini_model(4, torch.float32).to(torch.bfloat16)
    wide.load_state_dict({n: v.float() for n, v in narrow.state_dict().items()})
    batch = Batch.from_documents([random_ids(3)])  # short: later selections may differ
    hidden = narrow(batch).hidden
    assert hidden.dtype == torch.bfloat16
    logits = narrow.logits(hidden)
    assert logits.dtype == torch.float32
    want = wide.logits(wide(batch).hidden)
    relative = (logits - want).norm() / want.norm()
    assert 0 < relative < 0.1


def test_float64_stays_float64():
    probe = Probe()
    model = mini_model(4, torch.float64)
    out = model(Batch.from_documents([random_ids(12)]), probe=probe)
    floats = {name: v.dtype for name, v in probe.values.items() if v.is_floating_point()}
    assert set(floats.values()) == {torch.float64}, floats
    assert model.logits(out.hidden).dtype == torch.float64
