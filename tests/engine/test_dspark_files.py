"""Files of what was measured: they come back, and not anywhere else."""

import json
from dataclasses import asdict, replace

import pytest
import torch

from openv41.engine.cost_table import CostTable
from openv41.engine.dspark_files import (
    CALIBRATION_FILE,
    PROFILE_FILE,
    Calibration,
    Surroundings,
    load_calibration,
    load_profile,
    save_calibration,
    save_profile,
)
from openv41.engine.fingerprint import fingerprint
from openv41.errors import InputError
from tests.engine.mini_engine import arm

COSTS = CostTable(requests=(1, 2), plain=(0.1, 0.2), verify=((0.2, 0.3), (0.3, 0.4)), tiers=(4,))
FOUND = Calibration(
    temperatures=(1.5, 0.5), rounds=9, error_before=(0.2, 0.1), error_after=(0.1, 0.1)
)


@pytest.fixture(scope="module")
def here():
    return Surroundings.of(arm(torch.float32, bitwise=False))


def test_surroundings_name_the_machine_and_the_program(here):
    assert here.threads == torch.get_num_threads()
    assert here.torch == torch.__version__
    assert here.device


def test_other_weights_are_told_apart(here):
    model = arm(torch.float32, bitwise=False)
    assert Surroundings.of(model) == here
    with torch.no_grad():
        model.norm.weight[0] += 1e-3
    other = Surroundings.of(model)
    assert other.weights != here.weights
    assert replace(other, weights=here.weights) == here


def test_a_profile_comes_back(tmp_path, here):
    save_profile(tmp_path / "p.json", COSTS, here)
    assert load_profile(tmp_path / "p.json", here) == COSTS
    assert json.loads((tmp_path / "p.json").read_text())["measured"] == asdict(here)


def test_a_calibration_comes_back(tmp_path, here):
    save_calibration(tmp_path / "c.json", FOUND, here)
    assert load_calibration(tmp_path / "c.json", here) == FOUND


@pytest.mark.parametrize("name", ["device", "threads", "torch", "openv41", "numerics", "config"])
def test_a_profile_from_elsewhere_is_refused(tmp_path, here, name):
    there = replace(here, **{name: 99 if name == "threads" else "other"})
    save_profile(tmp_path / "p.json", COSTS, there)
    with pytest.raises(InputError, match=rf"{name} was \w+, here it is .*dspark profile"):
        load_profile(tmp_path / "p.json", here)


def test_a_profile_does_not_depend_on_the_weights(tmp_path, here):
    save_profile(tmp_path / "p.json", COSTS, replace(here, weights="other"))
    assert load_profile(tmp_path / "p.json", here) == COSTS


def test_a_calibration_holds_for_its_weights_on_any_machine(tmp_path, here):
    path = tmp_path / "c.json"
    save_calibration(path, FOUND, replace(here, device="other", threads=99, torch="0"))
    load_calibration(path, here)
    save_calibration(path, FOUND, replace(here, weights="other"))
    with pytest.raises(InputError, match=r"weights was other, here it is .*dspark calibrate"):
        load_calibration(path, here)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"measured": {}}', '{"measured": {"device": 1, "x": 2}}']
)
def test_what_is_no_such_file_is_refused(tmp_path, here, text):
    path = tmp_path / "f.json"
    path.write_text(text)
    for load, command in ((load_profile, "profile"), (load_calibration, "calibrate")):
        with pytest.raises(InputError, match=f"not what 'openv41 dspark {command}' writes"):
            load(path, here)


def test_missing_parts_are_refused(tmp_path, here):
    path = tmp_path / "f.json"
    path.write_text(json.dumps({"measured": asdict(here)}))
    with pytest.raises(InputError, match="KeyError: 'requests'"):
        load_profile(path, here)
    with pytest.raises(InputError, match="KeyError: 'temperatures'"):
        load_calibration(path, here)
    save_profile(path, COSTS, here)
    content = json.loads(path.read_text())
    for verify in ([[0.2, 0.1], [0.3, 0.4]], [[[0.2], 0.3], [0.3, 0.4]]):
        path.write_text(json.dumps(content | {"verify": verify}))
        with pytest.raises(InputError, match="not what 'openv41 dspark profile' writes"):
            load_profile(path, here)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"temperatures": [1.0, 0.0]}, "a temperature is not above 0"),
        ({"temperatures": [1.0, float("nan")]}, "a temperature is not above 0"),
        ({"temperatures": [1.0]}, "one entry for each draft"),
        ({"error_after": [0.1, 0.1, 0.1]}, "one entry for each draft"),
        ({"temperatures": "12"}, "is no list"),
        ({"temperatures": [[1.0], 2.0]}, "TypeError"),
        ({"error_before": 3}, "TypeError"),
        ({"rounds": "many"}, "ValueError"),
    ],
)
def test_temperatures_that_are_none_are_refused(tmp_path, here, change, what):
    path = tmp_path / "f.json"
    save_calibration(path, FOUND, here)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InputError, match=what):
        load_calibration(path, here)


def test_pages_on_disk_outlive_a_measurement(tmp_path, here):
    (tmp_path / "config.json").write_text("{}")
    before = fingerprint(tmp_path, "f32")
    save_profile(tmp_path / PROFILE_FILE, COSTS, here)
    save_calibration(tmp_path / CALIBRATION_FILE, FOUND, here)
    assert fingerprint(tmp_path, "f32") == before
    (tmp_path / "other.json").write_text("{}")
    assert fingerprint(tmp_path, "f32") != before


def test_a_missing_file_says_what_writes_it(tmp_path, here):
    with pytest.raises(InputError, match="no such file; 'openv41 dspark profile' writes one"):
        load_profile(tmp_path / "p.json", here)
