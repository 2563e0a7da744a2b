"""Activation checkpointing: the same gradients, loads and choices, with fewer tensors kept."""

from collections import Counter

import pytest
import torch

from openv41 import ops
from openv41.config import NUMERICS
from openv41.layers.batch import Batch
from openv41.layers.objectives import Objectives
from openv41.layers.probe import Probe
from tests.layers.mini import mini_model, random_ids

LENGTHS = (13, 1, 30)


def batch():
    return Batch.from_documents([random_ids(n, seed=n) for n in LENGTHS])


def run(model, *, recompute, probe=None):
    model.zero_grad()
    out = model(batch(), recompute=recompute, probe=probe)
    out.hidden.square().sum().backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return out, gradients


@pytest.mark.parametrize("numerics", ["f32", "f32qat"])
def test_gradients_loads_and_taps_are_equal(numerics):
    model = mini_model(0, torch.float32, NUMERICS[numerics])
    plain, want = run(model, recompute=False)
    again, got = run(model, recompute=True)
    assert torch.equal(again.hidden, plain.hidden)
    assert (again.taps is None) == (plain.taps is None)
    assert again.expert_counts.keys() == plain.expert_counts.keys()
    for layer, counts in plain.expert_counts.items():
        assert torch.equal(again.expert_counts[layer], counts), layer
        assert counts.sum() == sum(LENGTHS) * model.config.moe.top_k
    assert again.work == plain.work
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        assert torch.equal(got[name], gradient), name


def test_far_fewer_tensors_are_kept():
    model = mini_model(0, torch.float32)

    def kept(recompute):
        sizes = []

        def pack(tensor):
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(batch(), recompute=recompute)
        return sum(sizes)

    assert kept(recompute=True) < 0.25 * kept(recompute=False)


def test_replayed_choices_hold_in_the_second_run():
    model = mini_model(0, torch.float32)
    probe = Probe.recording_choices()
    model(batch(), probe=probe)
    other = mini_model(0, torch.float32)
    with torch.no_grad():
        for layer in other.layers:
            layer.moe.gate.bias.neg_()
    _, want = run(other, recompute=False, probe=Probe(feed=dict(probe.values)))
    _, got = run(other, recompute=True, probe=Probe(feed=dict(probe.values)))
    _, free = run(other, recompute=False)
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert any(not torch.equal(free[name], want[name]) for name in want)


def test_what_has_no_gradient_is_chosen_and_measured_once(monkeypatch):
    """Experts, entries and the teachers' attention are those of the first run."""
    model, calls = mini_model(0, torch.float32), Counter()

    def counted(name):
        found = getattr(ops, name)

        def call(*args, **kwargs):
            calls[name] += 1
            return found(*args, **kwargs)

        monkeypatch.setattr(ops, name, call)

    for name in ("choose_experts", "select_top_k", "attention_mass", "router_scores"):
        counted(name)
    wanted = Objectives(indexer="own", balance=True)
    seen = {}
    for recompute in (False, True):
        calls.clear()
        out = model(batch(), objectives=wanted, recompute=recompute)
        (out.hidden.square().sum() + out.losses.indexer + out.losses.balance).backward()
        seen[recompute] = dict(calls)
    assert seen[True]["router_scores"] == 2 * seen[False]["router_scores"]
    for name in ("choose_experts", "select_top_k", "attention_mass"):
        assert seen[True][name] == seen[False][name] > 0, name
