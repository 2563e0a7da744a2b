"""Engines take up what was measured for them, and say so."""

from dataclasses import replace

import pytest
import torch

from openv41.engine.confidence_speculator import ConfidenceSpeculator
from openv41.engine.cost_table import CostTable
from openv41.engine.dspark_files import (
    CALIBRATION_FILE,
    PROFILE_FILE,
    Calibration,
    Surroundings,
    save_calibration,
    save_profile,
)
from openv41.engine.scheduled_verification import schedule_verification
from openv41.engine.speculation import VerifyAll
from openv41.errors import InputError
from tests.engine.drafts import Script, plain_answers, speculating, target
from tests.engine.mini_engine import engine_of, greedy
from tests.layers.mini import random_ids

FREE = CostTable(requests=(1,), plain=(1.0,), verify=((1.0,) * 6,))
DEAR = CostTable(requests=(1,), plain=(1.0,), verify=(tuple(1.0 + n for n in range(6)),))
HONEST = Calibration(
    temperatures=(1.0,) * 5, rounds=1, error_before=(0.1,) * 5, error_after=(0.1,) * 5
)


@pytest.fixture(scope="module")
def model():
    return target(torch.float64)


@pytest.fixture
def engine(model):
    return speculating(model, Script({}, lambda *_: 0))


@pytest.fixture
def here(model):
    return Surroundings.of(model)


def test_files_beside_the_checkpoint_are_used(engine, here, tmp_path):
    save_profile(tmp_path / PROFILE_FILE, FREE, here)
    save_calibration(tmp_path / CALIBRATION_FILE, HONEST, here)
    schedule_verification(engine, tmp_path)
    assert isinstance(engine.drafting.speculator, ConfidenceSpeculator)


def test_without_a_profile_everything_is_verified_and_the_log_says_so(engine, tmp_path, caplog):
    caplog.set_level("INFO")
    schedule_verification(engine, tmp_path)
    assert isinstance(engine.drafting.speculator, VerifyAll)
    assert "slower than none; 'openv41 dspark profile'" in caplog.text
    assert "'openv41 dspark calibrate'" in caplog.text


def test_files_from_elsewhere_are_not_used_and_the_log_says_so(engine, here, tmp_path, caplog):
    save_profile(tmp_path / PROFILE_FILE, FREE, replace(here, device="an abacus"))
    save_calibration(tmp_path / CALIBRATION_FILE, HONEST, replace(here, weights="others"))
    schedule_verification(engine, tmp_path)
    assert isinstance(engine.drafting.speculator, VerifyAll)
    assert "device was an abacus" in caplog.text
    assert "weights was others" in caplog.text


def test_named_files_must_be_right(engine, here, tmp_path):
    save_profile(tmp_path / "p", FREE, replace(here, device="an abacus"))
    with pytest.raises(InputError, match="device was an abacus"):
        schedule_verification(engine, tmp_path, profile=tmp_path / "p")
    with pytest.raises(InputError, match="no such file"):
        schedule_verification(engine, tmp_path, calibration=tmp_path / "c")
    short = CostTable(requests=(1,), plain=(1.0,), verify=((1.0, 1.0),))
    save_profile(tmp_path / "p", short, here)
    with pytest.raises(InputError, match="profile is for 1 drafts, the drafter makes 5"):
        schedule_verification(engine, tmp_path, profile=tmp_path / "p")


def test_files_are_for_engines_that_speculate(model, tmp_path):
    plain = engine_of(model, speculation=None)
    schedule_verification(plain, tmp_path)
    with pytest.raises(InputError, match="does not speculate"):
        schedule_verification(plain, tmp_path, profile=tmp_path / "p")


def test_a_prompt_in_parts_that_no_upper_layer_needs_does_not_disturb_the_drafter(model):
    """Its first rows end below the tapped layers."""
    request = greedy(random_ids(60, 1), 10)
    [plain] = plain_answers(model, [request])
    known = [[*request.prompt, *plain.tokens]]
    engine = speculating(model, Script(known, lambda *_: 3), tokens_per_step=8)
    drafter, widths = engine.drafting.drafter, set()
    write = drafter.write_context

    def watched(taps, *rest):
        widths.add(taps.shape[-1])
        write(taps, *rest)

    drafter.write_context = watched
    assert engine.generate([request])[0].tokens == plain.tokens
    assert widths == {3 * model.config.hidden_size}


@pytest.mark.parametrize("costs", [FREE, DEAR])
def test_answers_are_those_of_plain_decoding(model, here, tmp_path, costs):
    """Whatever the schedule: rows that are free, and rows that never pay."""
    prompts = [random_ids(6, seed) for seed in range(3)]
    requests = [greedy(prompt, 25) for prompt in prompts]
    plain = plain_answers(model, requests)
    known = [[*p, *a.tokens] for p, a in zip(prompts, plain, strict=True)]
    engine = speculating(model, Script(known, lambda request, position: (request + position) % 6))
    save_profile(tmp_path / PROFILE_FILE, costs, here)
    schedule_verification(engine, tmp_path)
    assert [a.tokens for a in engine.generate(requests)] == [a.tokens for a in plain]
    found = engine.stats()
    if costs is FREE:
        assert sum(found.drafts_verified) > 30
        assert found.draft_steps > 5
    else:
        assert found.draft_steps <= 4, "the first steps know nothing of these requests"
        assert found.draft_budget == 0
