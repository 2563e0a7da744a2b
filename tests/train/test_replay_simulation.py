"""Cuts in the documents of a batch: where they are, what they leave to learn, and the step."""

import logging
from dataclasses import replace

import pytest
import torch

from openv41.model.prefill import ReplayVariant, replay_bounds
from openv41.train.config import TrainConfig
from openv41.train.optimizer import Optimizers
from openv41.train.packed_batch import PackedBatch
from openv41.train.placement import distribute
from openv41.train.replay_simulation import prompt_lengths, simulate_replay, warn_without_cut
from openv41.train.step import Sums, train_step
from tests.layers.mini import mini_config, mini_model, random_ids
from tests.model.test_bounded_replay import CUT, WINDOW, floor_of, served, tame

CONFIG = TrainConfig(
    tokens=400,
    batch_tokens=40,
    sequence_length=20,
    warmup_tokens=0,
    bounded_replay="first_layer_full_window",
    update_rms_steps=1,
)
LENGTHS, PROMPTS = (17, 1, 22), (9, 1, 12)


def answers():
    """Three conversations that learn what follows their prompts."""
    weights = [
        (torch.arange(length) >= prompt).float()
        for length, prompt in zip(LENGTHS, PROMPTS, strict=True)
    ]
    return PackedBatch(torch.tensor(random_ids(40, seed=6)), LENGTHS, torch.cat(weights))


def test_a_prompt_ends_before_the_first_token_that_is_learned():
    weights = torch.tensor([0, 0, 0.5, 0, 1, *[1] * 4, 0, 1, 1, *[0] * 3])
    packed = PackedBatch(torch.zeros(15, dtype=torch.int64), (5, 4, 3, 3), weights)
    first, *drawn = prompt_lengths(packed, 7)
    assert first == 2
    assert all(1 <= p < n for p, n in zip(drawn, (4, 3, 3), strict=True))
    learned = torch.tensor([0.0, *[1.0] * 39]).repeat(50)  # all but BOS
    whole = PackedBatch(torch.zeros(2000, dtype=torch.int64), (40,) * 50, learned)
    assert len(set(prompt_lengths(whole, 7))) > 20, "drawn where all is learned"


def test_drawn_prompts_depend_on_seed_and_step():
    packed = PackedBatch(torch.zeros(4000, dtype=torch.int64), (40,) * 100)
    config = mini_config()

    def floors(seed, step):
        return simulate_replay(packed, config, replace(CONFIG, seed=seed), step).replay.floors

    assert floors(0, 3) == floors(0, 3)
    assert len({floors(0, 3), floors(0, 4), floors(1, 3)}) == 3
    prompts = set(prompt_lengths(packed, 5))
    assert min(prompts) >= 1
    assert max(prompts) <= 39
    assert len(prompts) > 30


def test_only_tokens_that_serving_predicts_are_learned():
    """Row P - W is the first that is computed: it predicts token P - W + 1."""
    config = mini_config()
    packed = PackedBatch(torch.arange(30), (16, 14))
    replay = replay_bounds(config, [10, 4], cut=CUT, variant=ReplayVariant.ALL_BOUNDED)
    weights = replace(packed, replay=replay).target_weights(None)
    assert weights[:16].tolist() == [0.0] * (10 - WINDOW + 1) + [1.0] * 9
    assert weights[16:].tolist() == [0.0] + [1.0] * 13
    imaged = replace(packed, weights=torch.zeros(30), replay=replay).target_weights(3)
    assert imaged.sum() == 0, "an image token before P - W is not learned either"
    assert packed.target_weights(3) is None


@pytest.mark.parametrize(
    ("variant", "recompute"), [*zip(ReplayVariant, (False, True), strict=True)]
)
def test_the_loss_is_that_of_answers_behind_a_bounded_prefill(variant, recompute):
    model, packed = tame(mini_model(3, torch.float64)), answers()
    config = replace(CONFIG, bounded_replay=variant, activation_checkpointing=recompute)
    sums = Sums(model, simulate_replay(packed, model.config, config, 0), config)
    sums.add(simulate_replay(packed, model.config, config, 0))
    nats = []
    documents = packed.documents()
    rows = served(model, documents, PROMPTS, variant)
    for ids, prompt, hidden in zip(documents, PROMPTS, rows, strict=True):
        scores = model.logits(hidden[prompt - 1 - floor_of(prompt) : -1]).log_softmax(-1)
        nats += [-scores[i, token].item() for i, token in enumerate(ids[prompt:])]
    assert len(nats) == sum(LENGTHS) - sum(PROMPTS)
    assert sums.loss == pytest.approx(sum(nats) / len(nats), rel=1e-9)


def test_parts_of_a_batch_give_the_step_of_the_whole():
    results, after = [], []
    for most in (0, 23):
        model = mini_model(2, torch.float64)
        config = replace(CONFIG, micro_batch_tokens=most)
        results.append(
            train_step(model, Optimizers(distribute(model), config.optimizer), answers(), config, 0)
        )
        after.append(model.state_dict())
    first, second = results
    for name in ("loss", "indexer_loss", "balance_loss", "grad_norm"):
        assert getattr(second, name) == pytest.approx(getattr(first, name), rel=1e-9), name
    assert all(torch.equal(second.loads[layer], load) for layer, load in first.loads.items())
    assert first.loads[CUT].sum() < first.loads[CUT - 1].sum()
    for name, value in after[0].items():
        torch.testing.assert_close(after[1][name], value, rtol=1e-6, atol=1e-9, msg=name)


def test_documents_keep_their_cuts_wherever_they_are_dealt():
    packed = simulate_replay(answers(), mini_config(), CONFIG, 0)
    shares = [packed.only(numbers) for numbers in packed.dealt(2)]
    assert [share.lengths for share in shares] == [(22,), (17, 1)]
    assert [share.replay.floors for share in shares] == [(8,), (5, 0)]
    assert packed.replay.floors == (5, 0, 8)
    assert {share.replay.first_bounded for share in shares} == {CUT + 1}


def test_off_or_without_a_cut_nothing_changes(caplog):
    packed, config = answers(), mini_config()
    assert simulate_replay(packed, config, replace(CONFIG, bounded_replay="off"), 0) is packed
    engram = replace(config.engram, layer_ids=(1, 6))
    uncut = replace(config, engram=engram)
    assert simulate_replay(packed, uncut, CONFIG, 0) is packed
    with caplog.at_level(logging.WARNING):
        warn_without_cut(uncut, replace(CONFIG, bounded_replay="off"))
        warn_without_cut(config, CONFIG)
        assert not caplog.records
        warn_without_cut(uncut, CONFIG)
    assert "bounded replay is not simulated: layer 6, not below the cut at 5" in caplog.text
