"""Cost tables and calibration from a running engine, with a drafter of known chances."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from openv41.engine import profile
from openv41.engine.confidence_record import calibrate, record_confidences
from openv41.engine.profile import measure_costs
from openv41.engine.request import FinishReason
from openv41.errors import InputError, OpenV41Error
from tests.engine.drafts import FakeDrafter, plain_answers, speculating, target
from tests.engine.mini_engine import engine_of, greedy
from tests.layers.mini import VOCAB, random_ids


@pytest.fixture(scope="module")
def model():
    return target(torch.float32)


def any_scores(request, position, token):
    generator = torch.Generator().manual_seed(position)
    return torch.randn(5, VOCAB, generator=generator)


def test_every_load_and_length_is_timed(model, monkeypatch):
    monkeypatch.setattr(profile, "TURNS", 1)
    engine = speculating(model, any_scores, cache={"num_pages": 400})
    rows, step = [], engine._forward

    def counted(batch):
        rows.append(sum(count for _, count in batch))
        return step(batch)

    engine._forward = counted
    used = engine.drafting.speculator
    costs = measure_costs(engine, [1, 2], context=8)
    assert costs.requests == (1, 2)
    assert costs.num_drafts == 5
    assert engine.is_idle
    assert engine.drafting.speculator is used
    steps = [load * (1 + drafts) for load in (1, 2) for drafts in (0, 0, 1, 2, 3, 4, 5)]
    timed = [rows for rows in steps for _ in range(profile.WARM + profile.TIMED)]
    prompts = 1, 1  # a step for each load's prompts
    assert len(rows) == len(timed) + sum(prompts)
    assert sorted(rows)[: len(timed)][:6] == sorted(timed)[:6]
    assert sum(rows) == sum(timed) + 8 + 16


def test_an_engine_without_a_drafter_has_nothing_to_profile(model):
    engine = engine_of(model, speculation=None)
    with pytest.raises(InputError, match="nothing to profile"):
        measure_costs(engine, [1], context=4)
    with pytest.raises(InputError, match="nothing to calibrate"):
        record_confidences(engine, [])


class TellingDrafter(FakeDrafter):
    """Confidences say which drafts are right."""

    def draft(self, proposal, choose):
        block = super().draft(proposal, choose)
        block.confidence = self.told(proposal, block.tokens)
        return block

    def told(self, proposal, tokens):
        return proposal.max(-1).values.float()


def test_rounds_are_recorded_as_they_came(model):
    prompts = [random_ids(6, seed) for seed in (1, 2)]
    requests = [greedy(prompt, 30) for prompt in prompts]
    answers = [
        [*p, *a.tokens] for p, a in zip(prompts, plain_answers(model, requests), strict=True)
    ]

    def following(request, position, token):
        """Right up to draft ``position % 6``; each score is a logit that says so."""
        right = (answers[request] + [1] * 9)[position + 1 : position + 6]
        scores = torch.full((5, VOCAB), -1e9, dtype=torch.float64)
        for k, one in enumerate(right):
            holds = k < position % 6
            scores[k, one if holds else (one + 1) % 62] = 3.0 if holds else -3.0
        return scores

    engine = engine_of(model, drafter=TellingDrafter(model, following))
    logits, accepted = record_confidences(engine, requests)
    assert len(logits) == len(accepted) > 8
    assert set(accepted.tolist()) > {0, 1}
    np.testing.assert_array_equal(accepted, np.cumprod(logits > 0, axis=1).sum(axis=1))
    found = calibrate(logits, accepted)
    assert max(found.error_after) <= max(found.error_before)
    assert found.rounds == len(logits)


def test_nothing_recorded_is_an_error():
    with pytest.raises(InputError, match="no round verified a whole block"):
        calibrate(np.zeros((0, 5)), np.zeros(0, np.int64))


def test_an_answer_that_failed_is_told_and_not_left_out():
    failed = SimpleNamespace(finish_reason=FinishReason.ERROR, error="the disk is gone")
    drafting = SimpleNamespace(drafter=SimpleNamespace(block_size=5), speculator="used")
    engine = SimpleNamespace(drafting=drafting, generate=lambda requests: [failed] * len(requests))
    with pytest.raises(OpenV41Error, match="an answer to calibrate on failed: the disk is gone"):
        record_confidences(engine, [None])
    assert drafting.speculator == "used"
