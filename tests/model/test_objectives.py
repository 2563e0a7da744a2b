"""The losses of single layers in the whole model: what they are, and whom they move."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from openv41 import ops
from openv41.errors import InputError
from openv41.layers.batch import Batch
from openv41.layers.context import frequencies
from openv41.layers.objectives import Objectives
from openv41.layers.probe import Probe
from openv41.model.cache import DenseStore
from tests.layers.mini import IMAGE_TOKEN, mini_model, random_ids
from tests.model.mini import arm_model
from tests.oracles import attention as attention_oracle
from tests.oracles import experts as experts_oracle
from tests.oracles import indexer as indexer_oracle

pytestmark = pytest.mark.unchecked

LENGTHS = (9, 1, 12)  # above and below window, top-k and pool
DOCUMENTS = [random_ids(length, seed=request) for request, length in enumerate(LENGTHS)]
READERS = {2: (2, 3), 4: (4,), 5: (5, 6), 7: (7, 8)}  # of the mini model's selections
BOTH = Objectives(indexer="own", balance=True)
WINDOW = 4


def losses(model, documents, objectives=BOTH, **options):
    return model(Batch.from_documents(documents), objectives=objectives, **options).losses


def watched(model, ids, part):
    """The inputs of a part of every layer, and everything a probe sees, of one document."""
    inputs, probe = {}, Probe()
    hooks = [
        getattr(layer, part).register_forward_pre_hook(
            lambda _, args, number=number: inputs.update({number: args[0].detach()})
        )
        for number, layer in enumerate(model.layers)
    ]
    with torch.no_grad():
        model(Batch.from_documents([ids]), probe=probe)
    for hook in hooks:
        hook.remove()
    return inputs, probe.values


def teacher(attention, x, seen, source):
    """Attention mass of each token's selected entries, by the oracle."""
    layer, heads = attention.plan.layer, attention.attn.num_heads
    table = ops.rope_table(torch.arange(len(x)), frequencies(attention.attn, 1))
    q_latent = ops.rms_norm(x @ attention.wq_a.weight.T, attention.q_norm.weight, 1e-20)
    q = ops.rotate((q_latent @ attention.wq_b.weight.T).unflatten(-1, (heads, -1)), table)
    window, main = seen[f"layers.{layer}.window_kv"], seen[f"layers.{source}.main_kv"]
    chosen = seen[f"layers.{attention.plan.index_source}.topk_indices"]
    scale = attention.attn.head_dim**-0.5
    return [
        attention_oracle.mass(
            q[t].tolist(),
            window[max(0, t - WINDOW + 1) : t + 1].tolist(),
            main[ids[ids >= 0]].tolist(),
            attention.sink.tolist(),
            scale,
        )
        for t, ids in enumerate(chosen)
    ]


def student(attention, x, seen):
    """Scores of each token's selected entries, by the oracle."""
    plan, indexer = attention.plan, attention.indexer
    num, dim = indexer.indexer.num_heads, indexer.indexer.head_dim
    table = ops.rope_table(torch.arange(len(x)), frequencies(attention.attn, 1))
    q_latent = ops.rms_norm(x @ attention.wq_a.weight.T, attention.q_norm.weight, 1e-20)
    q = ops.rotate((q_latent @ indexer.wq_b.weight.T).unflatten(-1, (num, dim)), table).numpy()
    weights = (x @ indexer.weights_proj.weight.T * (dim * num) ** -0.5).numpy()
    keys = seen[f"layers.{plan.kv_source}.index_k"]
    chosen = seen[f"layers.{plan.layer}.topk_indices"]
    return [
        indexer_oracle.scores(q[t], weights[t], keys[ids[ids >= 0]].numpy()).tolist()
        for t, ids in enumerate(chosen)
    ]


def oracle_loss(model, inputs, seen, which):
    """The indexers' loss summed over the tokens of one document, by the oracle."""
    total = 0.0
    for source, readers in READERS.items():
        used = readers if which == "mean" else (source,)
        parts = [model.layers[n].attention for n in used]
        masses = [teacher(a, inputs[a.plan.layer], seen, a.plan.kv_source) for a in parts]
        own = model.layers[source].attention
        for t, values in enumerate(student(own, inputs[source], seen)):
            shares = [[m / sum(mass[t]) for m in mass[t]] for mass in masses if mass[t]]
            mean = [sum(column) / len(shares) for column in zip(*shares, strict=True)]
            total += indexer_oracle.divergence(values, mean)
    return total


@torch.no_grad()
def test_indexer_loss_matches_oracle():
    """Each document by float64 loops; packed, their sum over the number of tokens."""
    model, want = mini_model(21), {"own": 0.0, "mean": 0.0}
    for ids in DOCUMENTS:
        inputs, seen = watched(model, ids, "attention")
        for which in want:
            want[which] += oracle_loss(model, inputs, seen, which) / sum(LENGTHS)
    for which, value in want.items():
        got = losses(model, DOCUMENTS, Objectives(indexer=which))
        assert got.indexer.item() == pytest.approx(value, rel=1e-5)
        assert got.balance is None
    assert abs(want["own"] - want["mean"]) > 1e-3


def test_balance_loss_matches_oracle():
    """Per document, from the affinities without biases, images among the text."""
    model = mini_model(22)
    ids = [*DOCUMENTS[0][:5], IMAGE_TOKEN, IMAGE_TOKEN, *DOCUMENTS[0][5:]]
    embeds = model.embed.weight[[IMAGE_TOKEN] * 2].detach()
    inputs, probe = {}, Probe.recording_choices()
    for number, layer in enumerate(model.layers):
        layer.moe.register_forward_pre_hook(
            lambda _, args, number=number: inputs.update({number: args[0].detach()})
        )
    batch = Batch.from_documents([ids, DOCUMENTS[2]], image_embeds=embeds)
    got = model(batch, objectives=Objectives(balance=True), probe=probe).losses
    want = 0.0
    for number, x in inputs.items():
        logits = x @ model.layers[number].moe.gate.weight.detach().T
        raw = [[experts_oracle.softplus(v) ** 0.5 for v in row] for row in logits.tolist()]
        chosen = probe.values[f"layers.{number}.expert_ids"].tolist()
        cut, total = len(ids), len(raw)
        want += cut / total * experts_oracle.balance(raw[:cut], chosen[:cut])
        want += (total - cut) / total * experts_oracle.balance(raw[cut:], chosen[cut:])
    assert got.balance.item() == pytest.approx(want, rel=1e-9)
    assert got.indexer is None


@pytest.mark.parametrize(
    ("which", "dtype", "bitwise"),
    [("own", torch.float32, True), ("mean", torch.float64, False)],
)
def test_documents_packed_or_alone_give_the_same_sums(which, dtype, bitwise):
    model = arm_model(dtype, bitwise)
    objectives = Objectives(indexer=which, balance=True)
    packed = losses(model, DOCUMENTS, objectives)
    alone = [losses(model, [ids], objectives) for ids in DOCUMENTS]
    for name in ("indexer", "balance"):
        parts = [getattr(one, name) * n for one, n in zip(alone, LENGTHS, strict=True)]
        want = sum(parts).item() / sum(LENGTHS)
        assert getattr(packed, name).item() == pytest.approx(want, rel=2e-5), name


def test_a_token_that_sees_no_entry_adds_nothing():
    model = mini_model(23)
    for number in (1, 0):
        got = losses(model, [[5] * number])
        assert got.indexer.item() == 0  # ratio 1: one entry, which student and teacher agree on
        assert got.balance.isfinite()


@pytest.mark.parametrize("which", ["own", "mean"])
def test_indexer_loss_moves_every_indexer_and_nothing_else(which):
    model = mini_model(24)
    losses(model, DOCUMENTS, Objectives(indexer=which)).indexer.backward()
    for name, parameter in model.named_parameters():
        if ".indexer." in name:
            assert parameter.grad.any(), name
        else:
            assert parameter.grad is None, name


def test_balance_loss_moves_routers():
    model = mini_model(25)
    losses(model, DOCUMENTS).balance.backward()
    for name, parameter in model.named_parameters():
        if name.endswith("moe.gate.weight"):
            assert parameter.grad.any(), name
        elif "indexer" in name:
            assert parameter.grad is None, name


@pytest.mark.parametrize(("kind", "part"), [("indexer", ".indexer."), ("balance", "gate.weight")])
def test_directional_derivatives(kind, part):
    """(f(w + h d) - f(w - h d)) / 2h equals the gradient times d, choices held."""
    model = mini_model(26)
    probe = Probe.recording_choices()
    value = getattr(losses(model, DOCUMENTS, probe=probe), kind)
    held = Probe.replaying(probe.values)
    moved = [parameter for name, parameter in model.named_parameters() if part in name]
    grads = torch.autograd.grad(value, moved)
    directions = [torch.randn_like(p) * p.detach().abs().mean() for p in moved]
    slope = sum((g * d).sum() for g, d in zip(grads, directions, strict=True))
    step, values = 1e-6, []
    with torch.no_grad():
        for sign in (1, -2):
            for p, d in zip(moved, directions, strict=True):
                p.add_(d, alpha=sign * step)
            values.append(getattr(losses(model, DOCUMENTS, probe=held), kind))
    assert slope.item() == pytest.approx((values[0] - values[1]).item() / (2 * step), rel=1e-4)


@pytest.mark.shapes
def test_layers_that_run_again_in_the_backward_hand_in_once(monkeypatch):
    """Activation checkpointing changes neither losses nor gradients."""
    model = mini_model(27)
    objectives = Objectives(indexer="mean", balance=True)

    def gradients():
        out = model(Batch.from_documents(DOCUMENTS), objectives=objectives)
        sums = [out.hidden.square().sum(), out.losses.indexer, out.losses.balance]
        sum(sums).backward()
        found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad(set_to_none=True)
        return [s.item() for s in sums], found

    want, grads = gradients()
    for layer in model.layers:
        forward = layer.forward
        monkeypatch.setattr(
            layer,
            "forward",
            lambda *inputs, run=forward: checkpoint(run, *inputs, use_reentrant=False),
        )
    again, recomputed = gradients()
    assert again == want
    assert recomputed.keys() == grads.keys()
    for name, grad in grads.items():
        assert torch.equal(recomputed[name], grad), name


def test_nothing_is_computed_that_nobody_asks_for(monkeypatch):
    names = "attention_mass", "selected_scores", "selection_divergence", "sequence_balance"
    model, called = mini_model(28), []
    for name in names:
        op = getattr(ops, name)
        monkeypatch.setattr(
            ops, name, lambda *a, op=op, name=name, **k: called.append(name) or op(*a, **k)
        )
    out = model(Batch.from_documents(DOCUMENTS))
    assert out.losses.indexer is out.losses.balance is None
    assert not called
    losses(model, DOCUMENTS, Objectives(balance=True))
    assert set(called) == {"sequence_balance"}
    called.clear()
    losses(model, DOCUMENTS, Objectives(indexer="own"))
    assert [called.count(name) for name in names] == [4, 4, 4, 0]
    called.clear()
    losses(model, DOCUMENTS, Objectives(indexer="mean"))
    assert [called.count(name) for name in names] == [7, 4, 4, 0]


def test_parts_of_texts_are_refused():
    model = mini_model(29)
    with pytest.raises(
        InputError, match="objectives and replay need whole texts; leave out store and"
    ):
        losses(model, DOCUMENTS, store=DenseStore(model.config.compress_ratios))
