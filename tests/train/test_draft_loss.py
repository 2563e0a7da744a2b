"""The drafter's losses by hand, where their gradients go, and what a drafter can learn."""

import math
from dataclasses import replace

import pytest
import torch

from openv41.errors import ConfigError
from openv41.layers.batch import Batch
from openv41.layers.geometry import ReplayBounds
from openv41.train.config import DraftConfig, TrainConfig
from openv41.train.draft_loss import DraftSums, Slots, draw_anchors, mean_length
from openv41.train.draft_step import draft_step
from openv41.train.optimizer import Optimizers
from openv41.train.packed_batch import PackedBatch
from openv41.train.placement import distribute
from openv41.train.processes import Processes
from openv41.train.step import own_parts, train_step
from tests.close import assert_close
from tests.layers.mini import random_ids
from tests.model.drafting import SIZE, drafting_model

LENGTHS = (7, 1, 12)
CONFIG = TrainConfig(
    tokens=200,
    batch_tokens=20,
    sequence_length=20,
    warmup_tokens=0,
    balance_loss=0.0,
    indexer_loss=0.0,
    draft=DraftConfig(weight=1.0, anchors=3, decay=2.0),
)


def packed(**changes):
    ids = torch.tensor(random_ids(sum(LENGTHS), seed=4))
    return replace(PackedBatch(ids, LENGTHS), **changes)


def at(*rows):
    anchors = torch.zeros(sum(LENGTHS), dtype=torch.bool)
    anchors[list(rows)] = True
    return anchors


def optimizers(model, config=CONFIG):
    return Optimizers(distribute(model), config.optimizer)


def by_hand(model, part, config):
    """CE, L1, BCE, and the whole loss, draft by draft in plain Python and torch."""
    draft, batch = config.draft, Batch.packed(part.ids, part.lengths)
    out = model(batch)
    ends = torch.tensor(part.lengths).cumsum(0).tolist()
    learned = part.weights if part.weights is not None else torch.ones(len(part.ids))
    sums, total = [0.0, 0.0, 0.0], 0.0
    for anchor in part.anchors.nonzero()[:, 0].tolist():
        end = next(e for e in ends if e > anchor)
        rows = torch.tensor([anchor])
        hidden = model.drafter(model, out.taps, batch, rows).hidden
        base = model.drafter.base_logits(model, hidden)
        for k in range(1, SIZE + 1):
            if anchor + k >= end or learned[anchor + k] == 0:
                break
            weight = math.exp(-(k - 1) / draft.decay)
            w1 = model.drafter.markov.embed.weight[part.ids[anchor + k - 1]]
            logits = base[k - 1] + model.drafter.markov.head.weight @ w1
            p = logits.softmax(-1)
            q = model.logits(out.hidden[anchor + k - 1][None])[0].softmax(-1).detach()
            distance = (p - q).abs().sum()
            z = model.drafter.confidence.weight[0] @ torch.cat([hidden[k - 1], w1])
            c = 1 - 0.5 * distance.detach()
            bce = -(c * z.sigmoid().log() + (1 - c) * (1 - z.sigmoid()).log())
            for n, value in enumerate((-p[part.ids[anchor + k]].log(), distance, bce)):
                sums[n] = sums[n] + weight * value
            total += weight
    means = [value / (total + 1e-6) for value in sums]
    loss = 0.1 * means[0] + 0.9 * means[1] + 1.0 * means[2]
    return loss, means


def add_up(model, part, config=CONFIG):
    sums = DraftSums(model, part, config)
    batch = part.for_model(model)
    loss = sums.add(part, batch, model(batch))
    return sums, loss


def test_losses_equal_those_by_hand_and_so_do_their_gradients():
    """Ends of documents and of learned runs, positions without context, decay, denominators."""
    model = drafting_model()
    weights = torch.ones(sum(LENGTHS))
    weights[13:16] = 0.0
    part = packed(anchors=at(0, 3, 8, 11, 17, 18), weights=weights)
    optimizers(model)
    want, means = by_hand(model, part, CONFIG)
    sums, loss = add_up(model, part)
    assert_close("loss", loss, want, rtol=1e-10)
    figures = sums.figures()
    for got, mean in zip((figures.ce, figures.l1, figures.confidence), means, strict=True):
        assert got == pytest.approx(mean.item(), rel=1e-10)
    drafter = [p for p in model.drafter.parameters() if p.requires_grad]
    wanted = torch.autograd.grad(want, drafter, allow_unused=True)
    found = torch.autograd.grad(loss, drafter, allow_unused=True)
    for a, b in zip(found, wanted, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert_close("gradient", a, b, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    "changes", [{"decay": 4.0}, {"ce_weight": 0.2}, {"l1_weight": 0.45}, {"confidence_weight": 0.0}]
)
def test_every_setting_of_the_loss_counts(changes):
    model, part = drafting_model(), packed(anchors=at(0, 9))
    _, want = add_up(model, part)
    config = replace(CONFIG, draft=replace(CONFIG.draft, **changes))
    assert abs((add_up(model, part, config)[1] - want).item()) > 1e-3


def test_a_run_of_learned_tokens_ends_the_block():
    weights = torch.ones(sum(LENGTHS))
    weights[11] = 0.0
    slots = Slots.of(packed(anchors=at(2, 8), weights=weights), drafting_model().config, SIZE)
    assert slots.counts.tolist() == [[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]]
    assert slots.rows[1].tolist() == [8, 9, 10, 11, 12]
    ids = packed().ids
    assert slots.labels[1].tolist() == ids[9:14].tolist()
    assert slots.previous[1].tolist() == ids[8:13].tolist()
    assert slots.weights(2.0)[0].tolist() == pytest.approx(
        [1, *(math.exp(-k / 2) for k in (1, 2, 3)), 0]
    )


def test_anchors_are_different_learned_and_depend_on_seed_and_step():
    model = drafting_model().config
    weights = torch.ones(sum(LENGTHS))
    weights[:3] = 0.0
    text = packed(weights=weights)
    drawn = draw_anchors(text, model, CONFIG, 0)
    chosen = drawn.anchors.nonzero()[:, 0]
    assert int(drawn.anchors[:7].sum()) == int(drawn.anchors[8:].sum()) == 3
    assert not drawn.anchors[[0, 1, 2, 6, 7, 19]].any()  # not learned, or with nothing behind
    assert torch.equal(
        draw_anchors(packed(weights=weights), model, CONFIG, 0).anchors, drawn.anchors
    )
    others = [draw_anchors(packed(weights=weights), model, CONFIG, s).anchors for s in range(1, 9)]
    assert any(not torch.equal(o, drawn.anchors) for o in others)
    many = replace(CONFIG, draft=replace(CONFIG.draft, anchors=100))
    assert int(draw_anchors(packed(), model, many, 0).anchors.sum()) == 6 + 11
    assert len(chosen) == 6


def test_images_are_never_drafted():
    model = drafting_model().config
    ids = packed().ids.clone()
    ids[10:13] = model.image_token_id
    many = replace(CONFIG, draft=replace(CONFIG.draft, anchors=100))
    drawn = draw_anchors(packed(ids=ids), model, many, 0)
    assert not drawn.anchors[9:13].any()
    assert drawn.anchors[8]
    assert drawn.anchors[13]


def test_behind_a_simulated_prefill_anchors_stand_where_serving_drafts():
    model = drafting_model().config
    many = replace(CONFIG, draft=replace(CONFIG.draft, anchors=100))
    replay = ReplayBounds(floors=(0, 0, 3), first_layer=5, first_bounded=6)
    drawn = draw_anchors(packed(replay=replay), model, many, 0)
    positions = drawn.anchors[8:].nonzero()[:, 0].tolist()
    assert positions == list(range(3 + model.attention.window_size, 11))


def test_parts_add_up_to_the_whole():
    """Denominators are those of the batch, whatever runs at a time; a part may have no anchor."""
    part = draw_anchors(packed(), drafting_model().config, CONFIG, 5)
    whole, pieces = drafting_model(), drafting_model()
    small = replace(CONFIG, micro_batch_tokens=1, draft=replace(CONFIG.draft, blocks_at_once=2))
    a = draft_step(whole, optimizers(whole), part, CONFIG, 5)
    b = draft_step(pieces, optimizers(pieces, small), part, small, 5)
    assert a.loss == pytest.approx(b.loss, rel=1e-10)
    assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-8)
    assert a.draft.acceptance == pytest.approx(b.draft.acceptance, rel=1e-8)
    assert all(torch.equal(a.loads[layer], b.loads[layer]) for layer in a.loads)
    for (name, x), y in zip(whole.named_parameters(), pieces.parameters(), strict=True):
        assert_close(name, x, y, rtol=1e-7, atol=1e-9)


def test_shares_of_two_processes_add_up_by_the_denominators_of_both():
    """Four blocks beside two shorter ones; a mean of the two shares' own means is another loss."""
    model, part = drafting_model(), packed(anchors=at(0, 3, 8, 11, 17, 18))
    optimizers(model)
    drafter = [p for p in model.drafter.parameters() if p.requires_grad]
    shares = [own_parts(part, 0, Processes(rank=rank, size=2))[0][0] for rank in range(2)]
    assert sorted(int(share.anchors.sum()) for share in shares) == [2, 4]
    _, want = add_up(model, part)
    together, alone = DraftSums(model, part, CONFIG), []
    for share in shares:
        batch = share.for_model(model)
        out = model(batch)
        own = DraftSums(model, share, CONFIG)
        alone.append((together.add(share, batch, out), own.add(share, batch, out) / 2))
    found, mean = (sum(losses) for losses in zip(*alone, strict=True))
    assert_close("loss", found, want, rtol=1e-10)
    assert abs((mean - want).item()) > 1e-2
    gradients = [
        torch.cat([g.flatten() for g in torch.autograd.grad(loss, drafter, materialize_grads=True)])
        for loss in (want, found, mean)
    ]
    assert_close("gradient", gradients[1], gradients[0], rtol=1e-8, atol=1e-10)
    assert float((gradients[2] - gradients[0]).norm() / gradients[0].norm()) > 0.05


def test_a_batch_that_teaches_nothing_changes_nothing():
    model = drafting_model()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    nothing = packed(weights=torch.zeros(sum(LENGTHS)))
    result = draft_step(model, optimizers(model), nothing, CONFIG, 0)
    assert (result.loss, result.grad_norm, result.num_targets) == (0, 0, 0)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_a_step_of_the_stage_moves_the_drafter_alone():
    model = drafting_model()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    result = draft_step(model, optimizers(model), packed(), CONFIG, 0)
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert all(name.startswith("drafter.") for name in moved)
    assert "drafter.main_proj.weight" in moved
    assert "drafter.confidence.weight" in moved
    assert "drafter.stages.1.moe.gate.bias" in moved
    assert set(result.loads) == {9, 10, 11}
    still = replace(CONFIG, draft=replace(CONFIG.draft, balance=False))
    other = drafting_model()
    draft_step(other, optimizers(other), packed(), still, 0)
    assert torch.equal(
        other.drafter.stages[1].moe.gate.bias, before["drafter.stages.1.moe.gate.bias"]
    )


def test_no_gradient_reaches_the_target():
    """Neither through features nor distributions, embedding or head; yet both count."""
    model, part = drafting_model(), packed(anchors=at(2, 9))
    optimizers(model)
    _, loss = add_up(model, part)
    loss.backward()
    for name, parameter in model.named_parameters():
        if not name.startswith("drafter."):
            assert parameter.grad is None, name
    with torch.no_grad():
        model.head.weight += 0.1 * torch.randn(model.head.weight.shape, dtype=torch.float64)
    assert abs((add_up(model, part)[1] - loss).item()) > 1e-4


@pytest.mark.parametrize("detach", [False, True])
def test_the_confidence_loss_reaches_the_stages_unless_detached(detach):
    model, part = drafting_model(), packed(anchors=at(2, 9))
    draft = replace(CONFIG.draft, ce_weight=0.0, l1_weight=0.0, detach_confidence=detach)
    optimizers(model)
    add_up(model, part, replace(CONFIG, draft=draft))[1].backward()
    assert float(model.drafter.confidence.weight.grad.abs().max()) > 0
    for weight in (model.drafter.main_proj.weight, model.drafter.markov.embed.weight):
        assert bool(weight.grad.any()) != detach


def test_beside_a_drafter_the_model_moves_as_without_one():
    config = replace(CONFIG, indexer_loss=0.01, balance_loss=1e-4)
    alone = replace(config, draft=replace(config.draft, weight=0.0))
    both, single = drafting_model(), drafting_model()
    a = train_step(both, optimizers(both, config), packed(), config, 0)
    b = train_step(single, optimizers(single, alone), packed(), alone, 0)
    assert a.loss == b.loss
    assert a.draft.tau > 1
    assert b.draft is None
    for (name, x), y in zip(both.named_parameters(), single.parameters(), strict=True):
        if name.startswith("drafter."):
            continue
        assert torch.equal(x, y), name
    moved = [
        not torch.equal(x, y)
        for x, y in zip(both.drafter.parameters(), single.drafter.parameters(), strict=True)
    ]
    assert any(moved)


def test_mean_length():
    assert mean_length([0.5, 0.5, 0.0]) == 1 + 0.5 + 0.25
    assert mean_length([1.0] * 5) == 6


@pytest.mark.parametrize(
    ("field", "value"), [("anchors", 0), ("decay", 0.0), ("weight", -1.0), ("l1_weight", math.inf)]
)
def test_impossible_settings_are_refused(field, value):
    with pytest.raises(ConfigError, match=field):
        DraftConfig(**{field: value})
