"""The lag of Single-Pass mHC: a sub-layer reads with the A of the one before it."""

import pytest
import torch

from openv41 import ops
from openv41.config import NUMERICS, MhcConfig
from openv41.layers.batch import Batch
from openv41.layers.probe import Probe
from openv41.layers.single_pass_mhc import SinglePassMHC, Streams
from tests.close import assert_close
from tests.layers.mini import mini_model, random_ids


def site(num=2, dim=4):
    layer = SinglePassMHC(dim, MhcConfig(num_streams=num), 1e-20, NUMERICS["f32"])
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    return layer


def test_the_block_reads_with_the_mix_it_is_handed():
    layer, x, a_prev, norm = site(), torch.randn(3, 2, 4), torch.rand(3, 2), torch.rand(4)
    seen = []
    layer(Streams(x, a_prev), norm, lambda h: seen.append(h) or h)
    mixed = a_prev[:, :1] * x[:, 0] + a_prev[:, 1:] * x[:, 1]
    want = mixed / mixed.square().mean(-1, keepdim=True).sqrt() * norm
    assert_close("input", seen[0], want, ulps=16)


def test_a_block_that_returns_zero_leaves_the_mix_of_the_streams():
    layer, x = site(), torch.randn(3, 2, 4)
    a, b, _ = ops.predict_mix(
        x, layer.fn, layer.base, layer.scale, steps=20, eps=1e-6, norm_eps=1e-20
    )
    streams = layer(Streams(x, torch.rand(3, 2)), torch.ones(4), torch.zeros_like)
    assert torch.equal(streams.a, a)
    comb = b.mT
    want = torch.stack([(comb[:, :, j, None] * x).sum(1) for j in range(2)], dim=1)
    assert_close("streams", streams.settled(deterministic=False).x, want, ulps=8)


def test_what_is_pending_is_written_before_anything_reads():
    """A sub-layer with a pending output, and the same after the output was written."""
    first, second = site(), site()
    pending = first(Streams(torch.randn(3, 2, 4), torch.rand(3, 2)), torch.ones(4), torch.tanh)
    assert pending.pending is not None
    settled = pending.settled(deterministic=False)
    assert settled.pending is None
    assert not torch.equal(settled.x, pending.x)
    norm, blocks = torch.rand(4), []
    for streams in (pending, settled):
        found = second(streams, norm, lambda h: blocks.append(h) or h)
        assert torch.equal(found.x, settled.x)
        blocks.append(found.a)
    assert torch.equal(blocks[0], blocks[2])
    assert torch.equal(blocks[1], blocks[3])


def test_rows_take_their_pending_output_along():
    streams = site()(Streams(torch.randn(5, 2, 4), torch.rand(5, 2)), torch.ones(4), torch.tanh)
    index = torch.tensor([3, 1])
    want = streams.settled(deterministic=False)
    got = streams.rows(index).settled(deterministic=False)
    assert torch.equal(got.x, want.x[index])
    assert torch.equal(got.a, want.a[index])


def test_the_first_sub_layer_reads_the_embedding():
    model, ids = mini_model(8), random_ids(6)
    probe, seen = Probe(), []
    hook = model.layers[0].attention.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(Batch.from_documents([ids]), probe=probe)
    hook.remove()
    assert torch.equal(seen[0], model.layers[0].attn_norm(probe.values["embed"]))


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
