"""Log-probabilities with recorded choices: those of the engine that made them, with gradients."""

import re
from functools import cache

import pytest
import torch

from openv41.engine.request import Request
from openv41.engine.sampler import SamplingConfig
from openv41.errors import InputError
from openv41.layers.batch import Batch
from openv41.layers.probe import Probe
from openv41.ops import linear_loss
from openv41.train.log_probs import token_log_probs
from openv41.train.packed_batch import PackedBatch
from tests.close import assert_close
from tests.engine.mini_engine import arm, engine_of
from tests.layers.mini import random_ids

pytestmark = pytest.mark.unchecked

PROMPTS = [random_ids(n, seed=n) for n in (13, 6, 21)]
TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-4}


@cache
def rollout(dtype):
    """Answers at a temperature, drawn beside each other, with their choices recorded."""
    engine = engine_of(arm(dtype, bitwise=False), tokens_per_step=15)
    return engine.generate(
        [
            Request(
                prompt=tuple(prompt),
                max_tokens=4,
                sampling=SamplingConfig(temperature=1.3, seed=number),
                ignore_eos=True,
                logprobs=0,
                record_choices=True,
            )
            for number, prompt in enumerate(PROMPTS)
        ]
    )


def packed(answers):
    ids = [[*prompt, *answer.tokens] for prompt, answer in zip(PROMPTS, answers, strict=True)]
    return PackedBatch(torch.tensor([t for own in ids for t in own]), tuple(map(len, ids)))


def reported(answers):
    lists = [[entry.logprob for entry in answer.logprobs] for answer in answers]
    return [torch.tensor(values, dtype=torch.float64) for values in lists]


def of_answers(values, batch):
    parts = values.split(list(batch.lengths))
    return [own[len(prompt) :] for prompt, own in zip(PROMPTS, parts, strict=True)]


def steer(model):
    """Other routing biases and index weights: other choices, the same weights of experts."""
    with torch.no_grad():
        for layer in model.layers:
            layer.moe.gate.bias.copy_(torch.randn_like(layer.moe.gate.bias))
            if layer.plan.is_index_source:
                layer.attention.indexer.weights_proj.weight.neg_()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_they_are_those_of_the_engine(dtype, recompute, monkeypatch):
    monkeypatch.setattr(linear_loss, "LOGITS_AT_ONCE", 64 * 7)
    monkeypatch.setattr(linear_loss, "LEAST_ROWS", 1)
    model = arm(dtype, bitwise=False)
    answers = rollout(dtype)
    batch, records = packed(answers), [answer.choices for answer in answers]
    assert [len(record["layers.3.expert_ids"]) + 1 for record in records] == list(batch.lengths)
    steer(model)
    got = token_log_probs(model, batch, records, recompute=recompute)
    free = token_log_probs(model, batch)
    tolerance = TOLERANCES[dtype]
    pairs = zip(of_answers(got, batch), of_answers(free, batch), reported(answers), strict=True)
    for own, other, want in pairs:
        assert_close("logprobs", own, want, rtol=tolerance, atol=tolerance)
        assert not torch.allclose(other.detach().double(), want, atol=1e-3)
    assert [own[0].item() for own in got.split(list(batch.lengths))] == [0.0] * 3


@pytest.mark.shapes
def test_free_documents_beside_recorded_ones():
    model = arm(torch.float64, bitwise=False)
    answers = rollout(torch.float64)
    batch, records = packed(answers), [None, answers[1].choices, None]
    steer(model)
    got = of_answers(token_log_probs(model, batch, records), batch)
    free = of_answers(token_log_probs(model, batch), batch)
    assert_close("recorded", got[1], reported(answers)[1], rtol=1e-9, atol=1e-9)
    assert_close("free", got[0], free[0], rtol=1e-9, atol=1e-9)


def test_gradients_reach_the_routers_through_the_weights_of_experts():
    """Against finite differences; with the choices made, the function is smooth."""
    model = arm(torch.float64, bitwise=False)
    answers = rollout(torch.float64)
    batch, records = packed(answers), [answer.choices for answer in answers]
    direction = [torch.randn_like(layer.moe.gate.weight) for layer in model.layers]

    def value():
        return token_log_probs(model, batch, records).sum()

    value().backward()
    gates = [layer.moe.gate.weight for layer in model.layers]
    got = sum((gate.grad * d).sum() for gate, d in zip(gates, direction, strict=True))
    assert all(gate.grad.abs().max() > 0 for gate in gates)
    step, sides = 1e-6, []
    with torch.no_grad():
        for sign in (1, -2):
            for gate, d in zip(gates, direction, strict=True):
                gate.add_(d, alpha=sign * step)
            sides.append(value())
    want = (sides[0] - sides[1]) / (2 * step)
    assert_close("derivative", got, want, rtol=1e-6, atol=1e-6)
    indexers = [p for n, p in model.named_parameters() if "indexer" in n]
    assert indexers
    assert all(p.grad is None for p in indexers)


def test_a_smaller_vocabulary_of_the_engine():
    model = arm(torch.float64, bitwise=False)
    ids = [i % 50 for i in random_ids(12, seed=3)]
    got = token_log_probs(model, PackedBatch(torch.tensor(ids), (12,)), num_tokens=50)
    logits = model.logits(model(Batch.from_documents([ids])).hidden)[:, :50]
    want = logits.log_softmax(-1)[range(11), ids[1:]]
    assert_close("logprobs", got[1:], want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda r: {"layers.0.topk_indices": r["layers.2.topk_indices"]},
            "layers.0.topk_indices is nothing that this model chooses",
        ),
        (
            lambda r: {"layers.1.expert_ids": r["layers.1.expert_ids"].repeat(2, 1)},
            "has 36 rows, its document 18",
        ),
        (
            lambda r: {"layers.1.expert_ids": r["layers.1.expert_ids"] + 3},
            "that this model cannot choose",
        ),
        (
            lambda r: {"layers.1.expert_ids": r["layers.1.expert_ids"][:, :1]},
            "that this model cannot choose",
        ),
        (lambda r: {"layers.5.topk_indices": r["layers.5.topk_indices"] + 9}, "cannot choose"),
    ],
)
def test_records_of_something_else_are_refused(change, message):
    model = arm(torch.float32, bitwise=False)
    probe = Probe.recording_choices()
    ids = random_ids(18)
    with torch.no_grad():
        model(Batch.from_documents([ids]), probe=probe)
    batch = PackedBatch(torch.tensor(ids), (18,))
    with pytest.raises(InputError, match=re.escape(message)):
        token_log_probs(model, batch, [change(probe.values)])
    with pytest.raises(InputError, match="2 records for 1 documents; give one per document"):
        token_log_probs(model, batch, [None, None])
