"""Stages: which step stands where, what a recipe changes, and what is refused."""

from dataclasses import replace

import pytest
import torch

from openv41.errors import ConfigError
from openv41.layers.batch import Batch
from openv41.layers.probe import Probe
from openv41.plan import plan_layers
from openv41.train.config import OptimizerConfig, TrainConfig
from openv41.train.stages import (
    RECIPES,
    Stage,
    check_names,
    num_steps,
    num_tokens,
    place_of,
    without_restriction,
)
from tests.layers.mini import mini_config, mini_model, random_ids

BASE = TrainConfig(
    tokens=1000,
    sequence_length=10,
    batch_tokens=50,
    warmup_tokens=100,
    hold_tokens=200,
    optimizer=OptimizerConfig(lr=0.5),
)


def test_places_by_hand():
    stages = tuple(
        Stage(name=n, train=TrainConfig(tokens=t, sequence_length=10, batch_tokens=b, **ZERO))
        for n, t, b in (("pretrain", 65, 20), ("posttrain", 40, 40))
    )
    assert (num_steps(stages), num_tokens(stages)) == (4, 100)
    found = [place_of(stages, step) for step in range(4)]
    assert [(p.number, p.step, p.tokens) for p in found] == [
        (0, 0, 0),
        (0, 1, 20),
        (0, 2, 40),
        (1, 0, 60),
    ]
    assert [p.is_last for p in found] == [False, False, True, True]
    with pytest.raises(AssertionError, match="behind the end"):
        place_of(stages, 4)


ZERO = {"warmup_tokens": 0}


def test_recipes_change_what_they_say():
    assert RECIPES["pretrain"](BASE) == BASE
    assert not BASE.restrict_candidates
    extended = RECIPES["extend"](BASE)
    assert (extended.sequence_length, extended.batch_tokens, extended.tokens) == (40, 80, 100)
    assert (extended.optimizer.lr, extended.final_lr_factor) == (0.05, 1.0)
    vision = RECIPES["vision"](BASE)
    assert (vision.tokens, vision.warmup_tokens, vision.hold_tokens) == (250, 12, 0)
    assert (vision.freeze_vision, vision.optimizer.vision_lr_factor) == (False, 1.0)
    assert RECIPES["vision-lm"](BASE) == replace(vision, image_share=0.5)
    after = RECIPES["posttrain"](BASE)
    assert (after.numerics, after.tokens, after.optimizer.lr) == ("f32qat", 100, 0.05)
    assert after.restrict_candidates
    assert after.expert_fp4
    assert after.bounded_replay == "first_layer_full_window"
    assert (BASE.expert_fp4, BASE.bounded_replay) == (False, "off")
    assert after.warmup_tokens == after.hold_tokens == 0


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "no stage is named; choose from vision, vision-lm, pretrain, extend, posttrain"),
        (["pretrain", "midtrain"], "there is no stage 'midtrain'"),
        (["pretrain", "pretrain"], "stage 'pretrain' occurs twice"),
    ],
)
def test_names_that_do_not_work(names, message):
    with pytest.raises(ConfigError, match=message):
        check_names(names)


@torch.no_grad()
def test_without_a_restriction_every_entry_can_be_chosen():
    """What a Reindex layer then chooses are the best of all its scores."""
    config = mini_config()
    free = mini_model(5, torch.float32, config=without_restriction(config))
    bound = mini_model(5, torch.float32, config=config)
    batch = Batch.from_documents([random_ids(90, seed=3)])
    chosen, scores = {}, {}
    for name, model in (("free", free), ("bound", bound)):
        probe = Probe()
        model(batch, probe=probe)
        for layer in (p.layer for p in plan_layers(config) if p.uses_candidates):
            chosen[name, layer] = probe.values[f"layers.{layer}.topk_indices"]
            scores[name, layer] = probe.values[f"layers.{layer}.index_scores"]
    layers = {layer for _, layer in chosen}
    assert layers
    for layer in layers:
        last = scores["free", layer][-1]
        want = last.topk(config.indexer.top_k).indices.sort().values
        assert chosen["free", layer][-1].tolist() == want.tolist()
        assert chosen["bound", layer][-1].tolist() != want.tolist()
