"""Activation checkpointing: the same gradients, loads and choices, with fewer tensors kept."""

import pytest
import torch

from openv41.config import NUMERICS
from openv41.layers.batch import Batch
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
