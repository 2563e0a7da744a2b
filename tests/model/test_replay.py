"""Choices recorded in one run can be made again in another; other choices give other results."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from openv41.layers.batch import Batch
from openv41.layers.probe import CHOICES, Probe
from tests.layers.mini import random_ids
from tests.model.mini import Session, arm_model

pytestmark = pytest.mark.unchecked

LENGTH = 17
IDS = random_ids(LENGTH, seed=5)


@torch.no_grad()
def run(model, probe=None):
    return model.logits(model(Batch.from_documents([IDS]), probe=probe).hidden)


@pytest.fixture
def model():
    return arm_model(torch.float32, True)


def recorded(model):
    probe = Probe.recording_choices()
    return run(model, probe), probe.values


def test_what_is_recorded(model):
    _, choices = recorded(model)
    kinds = {name.rpartition(".")[2] for name in choices}
    assert kinds == set(CHOICES)
    assert len(choices) == model.config.num_layers + len(model.config.index_sources) + 1


@pytest.mark.shapes
def test_replay_gives_equal_logits(model):
    logits, choices = recorded(model)
    assert torch.equal(run(model, Probe.replaying(choices)), logits)
    assert torch.equal(run(model), logits), "recording changes nothing"


def test_replay_overrides_what_the_model_would_choose(model):
    """With other router biases and index weights the replayed run still makes the old choices."""
    logits, choices = recorded(model)
    with torch.no_grad():
        for layer in model.layers:
            layer.moe.gate.bias.copy_(torch.randn_like(layer.moe.gate.bias))
            if layer.plan.is_index_source:
                layer.attention.indexer.weights_proj.weight.neg_()
    assert not torch.equal(run(model), logits)
    assert torch.equal(run(model, Probe.replaying(choices)), logits)


@pytest.mark.parametrize("kind", CHOICES)
def test_altered_choices_give_other_logits(model, kind):
    logits, choices = recorded(model)
    layer = {"expert_ids": 3, "topk_indices": 4, "candidate_mask": 5}[kind]
    name = f"layers.{layer}.{kind}"
    altered = {n: v for n, v in choices.items() if kind != "candidate_mask" or "topk" not in n}
    changed = altered[name].clone()
    if kind == "expert_ids":
        changed[-1] = torch.tensor([i for i in range(5) if i not in changed[-1].tolist()][:2])
    elif kind == "topk_indices":
        changed[-1] = torch.tensor([7, -1, -1])
    else:
        changed[-1] = False
        changed[-1, 3] = True
    altered[name] = changed
    got = run(model, Probe.replaying(altered))
    assert torch.equal(got[:-1], logits[:-1])
    assert not torch.equal(got[-1], logits[-1])


def test_replay_through_chunks(model):
    """Rows of a recording, cut where the steps are: logits and rows are those of the recording."""
    logits, choices = recorded(model)
    with torch.no_grad():
        for layer in model.layers:
            layer.moe.gate.bias.copy_(torch.randn_like(layer.moe.gate.bias))
    session, got, start = Session(model), [], 0
    for size in (5, 1, 1, 4, 6):
        part = {}
        for name, value in choices.items():
            rows = value[start : start + size]
            entries = (start + size) // (1 if name.startswith("layers.5") else 2)
            part[name] = rows[:, :entries] if name.endswith("mask") else rows
            if name.endswith("topk_indices"):  # the width of a step's own selections
                part[name] = F.pad(rows, (0, model.config.indexer.top_k - rows.shape[1]), value=-1)
        got.append(session.step({0: IDS[start : start + size]}, Probe.replaying(part))[0])
        start += size
    assert torch.equal(torch.cat(got), logits)
