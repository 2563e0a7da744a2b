"""CSA2: what is pooled, rotated and normed, and what is not."""

import pytest
import torch

from openv41 import ops
from openv41.layers.batch import Batch
from openv41.layers.context import ForwardContext, frequencies
from openv41.layers.store import Slot
from tests.close import assert_close
from tests.layers.mini import mini_model, random_ids

FULL_RATIO_2, FULL_RATIO_1 = 2, 5


def prepared(layer, length, dtype=torch.float64, seed=1):
    """A layer's attention, an input and a context that already holds what other layers publish."""
    model = mini_model(seed, dtype=dtype)
    batch = Batch.from_documents([random_ids(length)])
    ctx = ForwardContext(batch, model.config.attention, None, None)
    x = torch.randn(length, model.config.hidden_size).to(dtype)
    return model.layers[layer].attention, x, ctx


def latent(attention, x, group):
    """Pooled and normed latent of one group, written out."""
    compressor = attention.compressor
    kv = x[group] @ compressor.wkv.weight.T
    if attention.plan.ratio == 2:
        gate = x[group] @ compressor.wgate.weight.T
        share = gate.exp() / gate.exp().sum(0)
        kv = (kv * share).sum(0, keepdim=True)
    return ops.rms_norm(kv, compressor.norm.weight, 1e-20)[0]


@pytest.mark.parametrize(("layer", "entry"), [(FULL_RATIO_2, 3), (FULL_RATIO_1, 6)])
def test_entries_are_rotated_at_the_first_token_of_their_group(layer, entry):
    """Group (6, 7) of ratio 2 stands at position 6; so does entry 6 of ratio 1."""
    attention, x, ctx = prepared(layer, 9)
    attention(x, ctx)
    ratio = attention.plan.ratio
    table = ops.rope_table(torch.tensor([6]), frequencies(attention.attn, ratio))
    plain = latent(attention, x, slice(6, 6 + ratio))
    want = ops.rotate(plain[None], table)[0]
    entries = ctx.entry_rows(Slot("main", layer), ratio)
    assert_close("main KV", entries[entry], want, rtol=1e-6, atol=1e-6)
    indexer = attention.indexer
    key = ops.rms_norm(indexer.wk.weight @ plain, indexer.k_norm.weight, 1e-20)
    want = ops.rotate(key[None], table)[0]
    got = ctx.entry_rows(Slot("index", layer), ratio)[entry]
    assert_close("index key", got, want, rtol=1e-6, atol=1e-6)
    late = ops.rms_norm(indexer.wk.weight @ entries[entry], indexer.k_norm.weight, 1e-20)
    assert (ops.rotate(late[None], table)[0] - got).abs().max() > 1e-3, "key of the rotated latent"


def test_only_complete_groups_become_entries():
    for length in range(6):
        attention, x, ctx = prepared(FULL_RATIO_2, length)
        attention(x, ctx)
        for kind in ("main", "index"):
            assert len(ctx.entry_rows(Slot(kind, FULL_RATIO_2), 2)) == length // 2


def test_ratio_1_has_no_gate():
    model = mini_model(1)
    assert not hasattr(model.layers[FULL_RATIO_1].attention.compressor, "wgate")
    state = model.state_dict()
    gate = f"layers.{FULL_RATIO_1}.attention.compressor.wgate.weight"
    state[gate] = state[f"layers.{FULL_RATIO_2}.attention.compressor.wgate.weight"]
    with pytest.raises(RuntimeError, match=r"Unexpected key.*wgate"):
        model.load_state_dict(state)


def test_readers_own_no_compressor_and_no_keys():
    parts = {}
    for index, layer in enumerate(mini_model(1).layers):
        names = {name for name, _ in layer.attention.named_parameters()}
        parts[index] = (
            any("compressor" in name for name in names),
            any("indexer.wq_b" in name for name in names),
            any("indexer.wk" in name for name in names),
        )
    nothing, reindex, full = (False,) * 3, (False, True, False), (True,) * 3
    assert parts == {
        0: nothing,
        1: nothing,
        2: full,
        3: nothing,
        4: reindex,
        5: full,
        6: nothing,
        7: reindex,
        8: nothing,
    }


def test_no_norm_per_query_head():
    """Three times a head's rows of wq_b give three times its scores."""
    attention, x, ctx = prepared(0, 5)
    width = attention.attn.head_dim

    def queries():
        latent, _ = attention.projected(x)
        return attention.queries(latent, ctx.rope(0))[1]

    before = queries()
    with torch.no_grad():
        attention.wq_b.weight[width : 2 * width] *= 3
    after = queries()
    want = before.clone()
    want[:, 1] *= 3
    assert_close("queries", after, want, rtol=1e-12, atol=1e-12)


def test_the_sub_layer_norm_feeds_queries_and_keys():
    model = mini_model(1)
    with torch.no_grad():
        model.layers[0].attn_norm.weight.zero_()
    seen, attention = [], model.layers[0].attention
    projected = attention.projected
    attention.projected = lambda x: seen.append(projected(x)) or seen[-1]
    model(Batch.from_documents([random_ids(5)]))
    assert len(seen[0]) == 2
    assert not any(part.any() for part in seen[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_query_without_visible_entries_is_finite(dtype):
    """One token, ratio 2: no entry at all."""
    attention, x, ctx = prepared(FULL_RATIO_2, 1, dtype)
    x.requires_grad_()
    out = attention(x, ctx)
    out.float().sum().backward()
    assert out.isfinite().all()
    assert x.grad.isfinite().all()
    grads = {n: p.grad for n, p in attention.named_parameters() if p.grad is not None}
    assert "wkv.weight" in grads
    for name, grad in grads.items():
        assert grad.isfinite().all(), name


@pytest.mark.parametrize("layer", [0, FULL_RATIO_2, FULL_RATIO_1])
def test_no_tokens(layer):
    attention, x, ctx = prepared(layer, 0)
    assert attention(x, ctx).shape == (0, attention.wo_b.weight.shape[0])


@pytest.mark.parametrize("layer", [0, FULL_RATIO_2, FULL_RATIO_1])
def test_gradcheck(layer):
    attention, x, _ = prepared(layer, 4)
    attention.requires_grad_(False)
    batch = Batch.from_documents([random_ids(4)])

    def run(x):
        return attention(x, ForwardContext(batch, attention.attn, None, None))

    assert torch.autograd.gradcheck(run, (x.requires_grad_(),), fast_mode=True)
