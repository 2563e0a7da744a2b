"""The comparison with other implementations: stand-ins for them, and the recorded lines."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.record import RESULTS
from openv41.image_grid import grid_of
from openv41.prompt import encode, from_request
from tests.peers import agreement, prompt_agreement
from tests.prompt.format import IMAGE

LOGITS = torch.tensor([[0.5, 2.0], [1.0, -1.0]])


class StandIn:
    """Gives the same logits to any tokens, and writes beside the weights as loading may."""

    config = SimpleNamespace(indexer=None)

    def __init__(self, folder):
        assert (folder / "config.json").read_text() == "{}"
        (folder / "openv41_token_map.json").write_text("[0, 1]")

    def choices(self, ids, forced=None):
        return LOGITS[: len(ids)], {}


def test_a_golden_folder_stays_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(agreement, "SEEDS", ())
    golden = tmp_path / "Z"
    (golden / "checkpoint").mkdir(parents=True)
    (golden / "checkpoint" / "config.json").write_text("{}")
    save_file({"text_ids": torch.tensor([0, 1])}, golden / "inputs.safetensors")
    save_file({"logits": LOGITS + 0.25}, golden / "prefill_f32.safetensors")
    peers = {"other": (StandIn, "1.0")}
    (line,) = agreement.agreement_lines(StandIn, peers, [golden])
    assert (line["checkpoint"], line["peer"], line["tokens"]) == ("golden Z", "other", 2)
    assert (line["agrees"], line["logits_max_abs"]) == (True, 0.0)
    assert line["ours_to_golden_max_abs"] == 0.25
    assert [path.name for path in (golden / "checkpoint").iterdir()] == ["config.json"]


@pytest.fixture(scope="module")
def recorded():
    text = (RESULTS / "peers_agreement.jsonl").read_text("utf-8")
    return [json.loads(line) for line in text.splitlines()]


def of_peer(recorded, name):
    return [line for line in recorded if line["peer"] == name]


def test_every_recorded_comparison_agrees(recorded):
    assert [line for line in recorded if line.get("agrees") is not True] == []
    peers = ("mlx-vlm", "nemo-automodel", "timm", "deepseek-recipe")
    assert [len(of_peer(recorded, peer)) for peer in peers] == [5, 5, 2, 2]


def test_recorded_vision_encoders_are_within_the_bound(recorded):
    lines = of_peer(recorded, "timm")
    assert [line["shape"] for line in lines] == ["small", "released width, 2 blocks"]
    for line in lines:
        assert (line["version"], line["bound"]) == ("1.0.31", 1e-4)
        assert line["sizes"] == len(line["cases"]) >= 50
        for case in line["cases"]:
            assert 0 < case["encoder_relative"] <= 1e-4
            assert 0 < case["projector_relative"] <= 1e-4
        assert line["grids_not_multiples_of_a_cell"] >= 30


def test_recorded_prompts_are_equal_but_for_documented_differences(recorded):
    line = of_peer(recorded, "deepseek-recipe")[0]
    assert (line["version"], line["what"]) == ("0.2.0", "prompts and special ranges")
    assert line["equal"] >= 500
    parts = line["equal"] + line["equal_without_documented_differences"]
    assert (line["conversations"], line["undocumented"]) == (parts, [])
    assert set(line["documented_differences"]) == set(prompt_agreement.DIFFERENCES)
    assert sum(line["documented_differences"].values()) > 0


def test_recorded_image_token_counts_differ_for_stretched_images_only(recorded):
    line = of_peer(recorded, "deepseek-recipe")[1]
    assert (line["version"], line["what"]) == ("0.2.0", "image token counts")
    assert line["equal"] + len(line["different"]) == line["sizes"] >= 500
    assert line["equal"] >= 0.95 * line["sizes"]
    for width, height, ours, theirs in line["different"]:
        assert max(width, height) >= 14.5 * min(width, height)
        assert grid_of(width, height, prompt_agreement.RELEASED).span_length == ours != theirs


def own(request):
    prompt = encode(from_request(request))
    return prompt.text, prompt.special_ranges


@pytest.mark.property
def test_a_difference_that_no_repair_removes_is_undocumented(monkeypatch):
    monkeypatch.setattr(prompt_agreement, "CONVERSATIONS", 25)
    same = prompt_agreement.prompt_line(own)
    assert same["agrees"]
    assert same["equal"] == same["conversations"] > 10
    line = prompt_agreement.prompt_line(lambda request: (own(request)[0].replace(IMAGE, ""), ()))
    assert not line["agrees"]
    assert line["undocumented"]


@pytest.mark.property
def test_a_documented_difference_is_counted_and_no_other(monkeypatch):
    monkeypatch.setattr(prompt_agreement, "CONVERSATIONS", 25)

    def render(request):  # a header at the end of every conversation
        return own(request | {"add_generation_prompt": True})

    line = prompt_agreement.prompt_line(render)
    assert line["agrees"]
    assert line["equal_without_documented_differences"] > 0
    causes = {name for name, count in line["documented_differences"].items() if count}
    assert causes == {"answer or end without a question before it: no header"}


def test_a_wrong_token_count_of_a_square_does_not_agree(monkeypatch):
    monkeypatch.setattr(prompt_agreement, "SIZES", 50)
    right = prompt_agreement.image_token_line(
        lambda w, h: grid_of(w, h, prompt_agreement.RELEASED).span_length
    )
    assert (right["agrees"], right["equal"], right["different"]) == (True, 50, [])
    wrong = prompt_agreement.image_token_line(lambda w, h: 184)
    assert not wrong["agrees"]
    assert wrong["equal"] + len(wrong["different"]) == 50
