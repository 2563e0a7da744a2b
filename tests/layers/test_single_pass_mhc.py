"""The lag of Single-Pass mHC: a sub-layer reads with the A of the one before it."""

import pytest
import torch

from openv41.config import NUMERICS, MhcConfig
from openv41.layers.batch import Batch
from openv41.layers.probe import Probe
from openv41.layers.single_pass_mhc import SinglePassMHC
from tests.close import assert_close
from tests.layers.mini import mini_model, random_ids


def site(num=2, dim=4):
    layer = SinglePassMHC(dim, MhcConfig(num_streams=num), 1e-20, NUMERICS["f32"])
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    return layer


def test_the_block_reads_with_the_mix_it_is_handed():
    layer, x, a_prev = site(), torch.randn(3, 2, 4), torch.rand(3, 2)
    seen = []
    layer(x, a_prev, lambda h: seen.append(h) or h)
    want = a_prev[:, :1] * x[:, 0] + a_prev[:, 1:] * x[:, 1]
    assert_close("input", seen[0], want, ulps=8)


def test_a_block_that_returns_zero_leaves_the_mix_of_the_streams():
    layer, x = site(), torch.randn(3, 2, 4)
    a, b, _ = layer.predict(x)
    new, handed = layer(x, torch.rand(3, 2), torch.zeros_like)
    assert torch.equal(handed, a)
    comb = b.mT
    want = torch.stack([(comb[:, :, j, None] * x).sum(1) for j in range(2)], dim=1)
    assert_close("streams", new, want, ulps=8)


def test_the_first_sub_layer_reads_the_embedding():
    model, ids = mini_model(8), random_ids(6)
    probe, seen = Probe(), []
    hook = model.layers[0].attn_norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(Batch.from_documents([ids]), probe=probe)
    hook.remove()
    assert torch.equal(seen[0], probe.values["embed"])


@pytest.mark.parametrize("layer", [0, 4, 8])
@pytest.mark.parametrize("where", ["attn", "ffn"])
def test_coefficients_reach_the_next_sub_layer_and_not_their_own(layer, where):
    """Moving the base of A at a site: its own output stays, the next reader's input moves."""
    model, batch = mini_model(9), Batch.from_documents([random_ids(6)])
    before, after = Probe(), Probe()
    first = model(batch, probe=before)
    num = model.config.mhc.num_streams
    with torch.no_grad():
        getattr(model.layers[layer], f"{where}_mhc").base[:num] += 1
    second = model(batch, probe=after)
    own = f"layers.{layer}.{where}_out"
    assert torch.equal(before.values[own], after.values[own])
    if where == "attn":
        following = f"layers.{layer}.ffn_out"
    elif layer < 8:
        following = f"layers.{layer + 1}.attn_out"
    else:
        assert torch.equal(before.values["layers.8.out"], after.values["layers.8.out"])
        assert not torch.equal(first.hidden, second.hidden), "the last A collapses the streams"
        return
    assert not torch.equal(before.values[following], after.values[following])


def test_no_separate_parameters_collapse_the_output():
    outside = [n for n, _ in mini_model(1).named_parameters() if not n.startswith("layers.")]
    assert sorted(outside) == ["embed.weight", "head.weight", "norm.weight"]
