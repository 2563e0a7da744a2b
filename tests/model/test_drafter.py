"""The drafter against loops in float64, and what each of its rows may see. Report §2.4.3."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from openv41.layers.batch import Batch
from openv41.layers.probe import Probe
from openv41.layers.store import Slot, Spans
from openv41.model.cache import DenseStore
from openv41.model.prefill import PromptRows, layer_rows
from tests.close import assert_close
from tests.layers.mini import VOCAB, random_ids
from tests.model.drafting import (
    SIZE,
    WINDOW,
    drafting_model,
    features,
    propose,
    propose_one,
    run_oracle,
)

IDS = random_ids(14, seed=3)
POSITIONS = (0, 1, 3, 4, 5, 13)  # no context, below, at and above the window
EXACT = 1e-11
ROTARY = 2e-6  # the model's rotary tables are float32


@pytest.fixture(scope="module")
def model():
    return drafting_model()


@pytest.fixture(scope="module")
def taps(model):
    return features(model, IDS)


def differs(a, b):
    return float((a - b).abs().max()) > 1e-6


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("numerics", ["f32", "f32qat"])
@torch.no_grad()
def test_a_draft_equals_the_oracle(position, numerics, taps):
    model = drafting_model(numerics=numerics)
    proposal = propose_one(model, taps, 9, position)
    got = model.drafter.draft(proposal)
    want = run_oracle(model, taps, 9, position, numerics=numerics)
    assert got.tokens[0].tolist() == want["tokens"].tolist()
    for name, value in (
        ("hidden", proposal.hidden),
        ("base_logits", proposal.base_logits),
        ("logits", got.logits[0]),
        ("confidence", got.confidence[0]),
    ):
        assert_close(name, value, torch.from_numpy(want[name]), rtol=ROTARY, atol=ROTARY)


@torch.no_grad()
def test_each_mistake_that_others_made_is_seen_by_the_oracle(model, taps):
    """Every change of the implementation named in the specification moves the logits."""
    position, weights = 13, model.state_dict()
    want = propose_one(model, taps, 9, position).base_logits
    shifted = propose_one(model, torch.cat([taps[:1], taps]), 9, position + 1)
    assert not differs(shifted.base_logits, want)  # only relative positions count
    early = propose_one(model, taps[1:], 9, position - 1)  # block one too early: drops a row
    assert not differs(early.base_logits, want)
    store = DenseStore(model.config.compress_ratios)
    fed = Batch(torch.tensor(IDS[:position]), (0,), (0,), (position,))
    model.drafter.write_context(taps[:position], fed, store)
    late = Batch(torch.tensor([9]), (0,), (position - 1,), (1,))
    assert differs(model.drafter.propose(model, late, store).base_logits, want)
    causal = drafting_model(block_size=1)
    causal.load_state_dict(weights)
    alone = propose_one(causal, taps, 9, position).base_logits
    assert differs(alone, want[:1])  # fewer rows are another model


@torch.no_grad()
def test_features_are_the_stream_means_at_the_entry_of_the_tapped_layers(model):
    ids = torch.tensor(IDS)
    batch, probe = Batch.packed(ids, [len(ids)]), Probe()
    output = model(batch, probe=probe)
    entries = [probe.values[f"layers.{layer - 1}.out"].mean(dim=1) for layer in (6, 7, 8)]
    assert torch.equal(output.taps, torch.cat(entries, dim=1))


@torch.no_grad()
def test_a_tap_is_taken_before_its_layer_and_behind_its_engram():
    model = drafting_model()
    want = features(model, IDS).chunk(3, dim=1)
    model.layers[6].attention.wo_b.weight += 1.0
    got = features(model, IDS).chunk(3, dim=1)
    assert torch.equal(got[0], want[0])
    assert differs(got[1], want[1])
    assert differs(got[2], want[2])
    with_engram = drafting_model()
    engram = replace(with_engram.config.engram, layer_ids=(1, 6))
    config = replace(with_engram.config, engram=engram)
    moved = type(with_engram)(config, dtype=torch.float64)
    state = {
        k.replace("layers.4.engram", "layers.6.engram"): v
        for k, v in drafting_model().state_dict().items()
    }
    moved.load_state_dict(state)
    moved.set_token_map(with_engram.token_map)
    before = features(moved, IDS).chunk(3, dim=1)[0]
    moved.layers[6].engram.wkv.weight += 1.0
    assert differs(features(moved, IDS).chunk(3, dim=1)[0], before)


@pytest.mark.parametrize(("back", "matters"), [(WINDOW + 1, False), (WINDOW, True), (1, True)])
@torch.no_grad()
def test_a_block_sees_the_window_before_its_anchor(model, taps, back, matters):
    position = 12
    want = propose_one(model, taps, 9, position)
    changed = taps.clone()
    changed[position - back] += 1.0
    got = propose_one(model, changed, 9, position)
    rows = [differs(a, b) for a, b in zip(got.hidden, want.hidden, strict=True)]
    assert rows == [matters] * SIZE  # one window for all rows: it does not slide


@torch.no_grad()
def test_features_at_and_behind_the_anchor_are_never_read(model, taps):
    """Rows of rejected drafts lie behind it in a store, and of the anchor in training."""
    position = 10
    store = DenseStore(model.config.compress_ratios)
    for start, stop in ((0, position), (position, len(IDS))):
        fed = Batch(torch.tensor(IDS[start:stop]), (0,), (start,), (stop - start,))
        model.drafter.write_context(taps[start:stop], fed, store)
    anchors = Batch(torch.tensor([9]), (0,), (position,), (1,))
    got = model.drafter.propose(model, anchors, store)
    want = propose_one(model, taps, 9, position)
    assert torch.equal(got.hidden, want.hidden)


@torch.no_grad()
def test_a_block_is_bidirectional(model, taps):
    """A change of the noise token's row reaches the anchor's row, which stands before it."""
    want = propose_one(model, taps, 9, 12).hidden
    other = drafting_model(noise_token_id=61)
    other.load_state_dict(model.state_dict())
    assert differs(propose_one(other, taps, 9, 12).hidden[0], want[0])


@torch.no_grad()
def test_requests_do_not_see_each_other(model, taps):
    """Ragged contexts side by side give what each gives alone."""
    other = features(model, random_ids(9, seed=8))
    pairs = {3: (9, 13), 5: (4, 2), 8: (1, 0), 9: (30, 9)}
    every = {3: taps, 5: taps, 8: taps, 9: other}
    got = propose(model, every, pairs)
    for place, (request, (anchor, position)) in enumerate(pairs.items()):
        want = propose_one(model, every[request], anchor, position)
        rows = slice(place * SIZE, (place + 1) * SIZE)
        assert_close("hidden", got.hidden[rows], want.hidden, rtol=EXACT, atol=EXACT)
        assert_close("logits", got.base_logits[rows], want.base_logits, rtol=EXACT, atol=EXACT)


@torch.no_grad()
def test_a_batch_drafts_to_the_bit_what_each_request_drafts_alone():
    model = drafting_model(torch.float32, "f32qat", deterministic=True)
    taps = features(model, IDS)
    pairs = {r: (r, p) for r, p in enumerate(POSITIONS)}
    got = propose(model, dict.fromkeys(pairs, taps), pairs)
    drafted = model.drafter.draft(got)
    for place, (anchor, position) in enumerate(pairs.values()):
        want = propose_one(model, taps, anchor, position)
        rows = slice(place * SIZE, (place + 1) * SIZE)
        assert torch.equal(got.base_logits[rows], want.base_logits)
        assert torch.equal(drafted.logits[place], model.drafter.draft(want).logits[0])


@pytest.mark.parametrize("chunks", [1, 2, 3, 6])
@torch.no_grad()
def test_rows_committed_at_once_equal_rows_committed_one_by_one(model, taps, chunks):
    want = propose_one(model, taps, 9, 13)
    got = propose_one(model, taps, 9, 13, chunks=chunks)
    assert_close("hidden", got.hidden, want.hidden, rtol=EXACT, atol=EXACT)


@torch.no_grad()
def test_rejected_rows_are_not_written(model, taps):
    store, config = DenseStore(model.config.compress_ratios), model.config
    fed = Batch(torch.tensor(IDS[:12]), (0, 1), (4, 2), (6, 6))
    model.drafter.write_context(taps[:12], fed, store, stops=(7, 2))
    slots = [Slot("window", config.num_layers + s) for s in range(3)]
    for slot in slots:
        assert store.rows_before(slot, (0, 1), (7, 2)) == (3, 0)
        assert store.rows_before(slot, (0,), (8,)) == (0,)


@torch.no_grad()
def test_only_the_window_is_written(model, taps):
    store = DenseStore(model.config.compress_ratios)
    fed = Batch(torch.tensor(IDS), (0,), (0,), (len(IDS),))
    model.drafter.write_context(taps, fed, store)
    slot = Slot("window", model.config.num_layers)
    assert store.rows_before(slot, (0,), (len(IDS),)) == (WINDOW,)
    assert store.read(slot, Spans((0,), (len(IDS) - WINDOW,), (len(IDS),))).shape == (WINDOW, 8)


@torch.no_grad()
def test_blocks_of_training_equal_independent_drafts(model):
    """Many anchors of packed texts in one forward, each as alone behind a store."""
    texts = [random_ids(12, seed=1), random_ids(7, seed=2)]
    batch = Batch.from_documents(texts)
    output = model(batch)
    rows = torch.tensor([0, 1, 5, 6, 11, 12, 15, 18])
    got = model.drafter(model, output.taps, batch, rows).hidden.unflatten(0, (-1, SIZE))
    for place, row in enumerate(rows.tolist()):
        text, position = (0, row) if row < 12 else (1, row - 12)
        alone = features(model, texts[text])
        want = propose_one(model, alone, texts[text][position], position)
        assert_close(f"row {row}", got[place], want.hidden, rtol=EXACT, atol=EXACT)
    shifted = model.drafter(model, output.taps, batch, rows[2:3] + 1).hidden  # an anchor too late
    assert differs(shifted, got[2])


@torch.no_grad()
def test_markov_bias_is_a_row_of_a_dense_table(model, taps):
    markov = model.drafter.markov
    table = markov.embed.weight @ markov.head.weight.T  # [V, V]
    proposal = propose_one(model, taps, 9, 12)
    got = model.drafter.draft(proposal)
    previous = torch.cat([torch.tensor([9]), got.tokens[0, :-1]])
    want = proposal.base_logits + table[previous]
    assert_close("logits", got.logits[0], want, rtol=EXACT, atol=EXACT)
    assert torch.equal(got.tokens[0], want.argmax(-1))


@torch.no_grad()
def test_teacher_forced_tokens_give_the_logits_of_the_loop(model, taps):
    proposal = propose_one(model, taps, 9, 12)
    tokens = [4, 50, 50, 2, 61]
    got = model.drafter.draft(proposal, lambda _, k: torch.tensor([tokens[k]]))
    assert got.tokens[0].tolist() == tokens
    previous = torch.tensor([[9, *tokens[:-1]]])
    features_ = model.drafter.markov.features(previous)
    hidden = proposal.hidden.unflatten(0, (1, -1))
    logits = proposal.base_logits.unflatten(0, (1, -1)) + model.drafter.markov(features_)
    assert_close("logits", got.logits, logits, rtol=EXACT, atol=EXACT)
    confidence = model.drafter.confidence_logits(hidden, features_)
    assert_close("confidence", got.confidence, confidence, rtol=EXACT, atol=EXACT)


@torch.no_grad()
def test_a_confidence_depends_on_tokens_before_its_own_alone(model, taps):
    proposal = propose_one(model, taps, 9, 12)
    base = model.drafter.draft(proposal, lambda _, k: torch.tensor([10 + k]))
    for changed in range(SIZE):
        got = model.drafter.draft(
            proposal, lambda _, k, at=changed: torch.tensor([40 if k == at else 10 + k])
        )
        same = (got.confidence[0] == base.confidence[0]).tolist()
        assert same == [k != changed + 1 for k in range(SIZE)]


@torch.no_grad()
def test_confidence_reads_the_hidden_state_before_the_last_norm():
    model = drafting_model()
    taps = features(model, IDS)
    want = model.drafter.draft(propose_one(model, taps, 9, 12))
    model.drafter.norm.weight *= 2
    got = model.drafter.draft(propose_one(model, taps, 9, 12), lambda _, k: want.tokens[:, k])
    assert torch.equal(got.confidence, want.confidence)
    assert differs(got.logits, want.logits)


@torch.no_grad()
def test_drafts_route_as_text(model, taps):
    want = propose_one(model, taps, 9, 12).hidden
    for stage in model.drafter.stages:
        stage.moe.gate.bias_vl.add_(100 * torch.arange(4))
    assert torch.equal(propose_one(model, taps, 9, 12).hidden, want)
    for stage in model.drafter.stages:
        stage.moe.gate.bias_vl.copy_(torch.zeros(4))


def test_embedding_and_head_are_the_targets_own(model):
    names = {name for name, _ in model.drafter.named_parameters()}
    assert not any(np.isin(name, ["embed.weight", "head.weight"]) for name in names)
    shapes = [p.shape for n, p in model.drafter.named_parameters() if not n.startswith("markov.")]
    assert (VOCAB, model.config.hidden_size) not in shapes


@torch.no_grad()
def test_a_chunk_that_ends_between_tapped_layers_has_no_features(model):
    """A bounded prefill leaves later layers without rows of an early chunk."""
    config, ids = model.config, torch.tensor(IDS)
    store = DenseStore(config.compress_ratios)
    firsts = (0,) * 7 + (20, 20)  # layers 7 and 8 compute nothing of this chunk
    rows = layer_rows(config, {0: PromptRows(start=0, firsts=firsts, cut=7)})
    output = model(Batch(ids, (0,), (0,), (len(ids),)), store, rows=rows)
    assert output.taps is None
    assert output.tap_batch is None
