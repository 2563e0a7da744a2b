"""Gradients of the whole mini model, and that no parameter is loaded but never read."""

import pytest
import torch

from openv41.layers.batch import Batch
from openv41.layers.probe import Probe
from tests.layers.mini import IMAGE_TOKEN, mini_model, random_ids

pytestmark = pytest.mark.unchecked


def batch(model):
    ids = random_ids(15)
    ids[6:8] = [IMAGE_TOKEN] * 2
    documents = [ids, random_ids(4, 1)]
    return Batch.from_documents(documents, image_embeds=model.embed.weight[[IMAGE_TOKEN] * 2])


def loss(model, probe=None):
    return model.logits(model(batch(model), probe=probe).hidden).logsumexp(-1).sum()


@pytest.mark.parametrize("part", ["attention", "mhc", "moe", "engram", "norm", ""])
def test_directional_derivatives(part):
    """(f(w + h d) - f(w - h d)) / 2h equals the gradient times d, choices held."""
    model = mini_model(11)
    probe = Probe.recording_choices()
    value = loss(model, probe)
    held = Probe.replaying(probe.values)
    value.backward()
    chosen = [(n, p) for n, p in model.named_parameters() if part in n and p.grad is not None]
    assert chosen
    directions = [torch.randn_like(p) * p.detach().abs().mean() for _, p in chosen]
    slope = sum((p.grad * d).sum() for (_, p), d in zip(chosen, directions, strict=True))
    step, values = 1e-6, []
    with torch.no_grad():
        for sign in (1, -2):
            for (_, p), d in zip(chosen, directions, strict=True):
                p.add_(d, alpha=sign * step)
            values.append(loss(model, held))
    assert slope.item() == pytest.approx((values[0] - values[1]).item() / (2 * step), rel=1e-4)


@pytest.mark.slow
def test_every_parameter_is_read():
    """A gradient where there is one; else a changed choice of experts or entries."""
    model = mini_model(12)
    loss(model).backward()
    silent = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    for name in silent:
        assert "indexer" in name or "gate.bias" in name, f"{name} has no gradient"
    before = Probe.recording_choices()
    with torch.no_grad():
        loss(model, before)
        for name in silent:
            parameter = model.get_parameter(name)
            old = parameter.clone()
            parameter.copy_(torch.randn_like(old) * 3)
            after = Probe.recording_choices()
            loss(model, after)
            parameter.copy_(old)
            assert any(
                not torch.equal(value, before.values[key]) for key, value in after.values.items()
            ), f"{name} moves no choice"
