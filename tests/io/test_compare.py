"""Where two traces part: bounds, order, ties, NaN, missing names."""

import json

import pytest
import torch

from openv41.errors import InputError
from openv41.io.compare import compare_files, compare_tensors, forward_place
from openv41.io.tensor_files import write_tensors

TOKENS = 6


def trace(**changed):
    """A small trace: two choices per row, scores with a clear margin."""
    floats = torch.arange(TOKENS * 4, dtype=torch.float32).view(TOKENS, 4)
    tensors = {
        "layers.1.topk_indices": torch.tensor([[0, 1]] * TOKENS, dtype=torch.int32),
        "layers.1.topk_margin": torch.full((TOKENS,), 0.5),
        "layers.1.expert_ids": torch.tensor([[2, 3]] * TOKENS, dtype=torch.int32),
        "layers.1.expert_weights": torch.tensor([[0.5, 1.0]] * TOKENS),
        "layers.1.out": floats.clone(),
        "layers.0.out": floats.clone(),
        "logits": floats.clone(),
    }
    return tensors | changed


def status(result):
    return {t.name: t.status for t in result.tensors}


def test_equal_traces_are_equal_in_forward_order():
    result = compare_tensors(trace(), trace(), bounds="f32")
    assert result.is_equal
    assert result.first is None
    assert [t.name for t in result.tensors] == [
        "layers.0.out",
        "layers.1.topk_margin",
        "layers.1.topk_indices",
        "layers.1.expert_ids",
        "layers.1.expert_weights",
        "layers.1.out",
        "logits",
    ]


@pytest.mark.parametrize(("step", "expected"), [(1e-4, "within"), (3e-4, "differs")])
def test_float32_bound_is_absolute(step, expected):
    other = trace()
    other["layers.0.out"] = other["layers.0.out"].clone()
    other["layers.0.out"][2, 1] = 9 + step
    found = compare_tensors(trace(), other, bounds="f32").tensors[0]
    assert found.status == expected
    assert found.max_abs == pytest.approx(step, rel=0.01)
    assert found.mean_abs == pytest.approx(step / 24, rel=0.01)
    assert found.mean_over_std == pytest.approx(step / 24 / 6.922, rel=0.01)


def test_first_divergence_is_the_first_in_forward_order():
    other = trace(logits=torch.zeros(TOKENS, 4))
    other["layers.1.out"] = other["layers.1.out"] + 1
    result = compare_tensors(trace(), other, bounds="f32")
    assert result.first.name == "layers.1.out"
    assert result.first.reason == "max 1 above 0.0002"


def test_released_bound_is_relative_to_the_spread():
    other = trace()
    other["layers.0.out"] = other["layers.0.out"] + 6.9e-4  # std of the tensor is 6.92
    assert status(compare_tensors(trace(), other, bounds="released"))["layers.0.out"] == "differs"
    loose = compare_tensors(trace(), other, bounds="released-gpu")
    assert status(loose)["layers.0.out"] == "within"


def test_sets_are_compared_without_order():
    other = trace()
    other["layers.1.expert_ids"] = other["layers.1.expert_ids"].flip(1)
    other["layers.1.expert_weights"] = other["layers.1.expert_weights"].flip(1)
    assert compare_tensors(trace(), other, bounds="f32").is_equal


def test_weights_that_do_not_follow_their_ids_differ():
    other = trace()
    other["layers.1.expert_ids"] = other["layers.1.expert_ids"].flip(1)
    result = compare_tensors(trace(), other, bounds="f32")
    assert result.first.name == "layers.1.expert_weights"


@pytest.mark.parametrize(
    ("margin", "expected", "equal"), [(0.0, "tie", True), (1e-9, "differs", False)]
)
def test_only_an_exactly_equal_score_is_a_tie(margin, expected, equal):
    a, b = trace(), trace()
    for side in (a, b):
        side["layers.1.topk_margin"][3] = margin
    b["layers.1.topk_indices"][3] = torch.tensor([0, 7], dtype=torch.int32)
    result = compare_tensors(a, b, bounds="f32")
    assert result.is_equal == equal
    assert (result.first.name, result.first.status) == ("layers.1.topk_indices", expected)
    (row,) = result.first.rows
    assert (row.row, row.only_a, row.only_b) == (3, (1,), (7,))
    assert row.margin == pytest.approx(margin)
    assert result.first.ties == int(margin == 0)


def test_a_tie_does_not_excuse_another_row():
    a, b = trace(), trace()
    a["layers.1.topk_margin"][3] = b["layers.1.topk_margin"][3] = 0
    b["layers.1.topk_indices"][3:5, 1] = 7
    result = compare_tensors(a, b, bounds="f32")
    assert not result.is_equal
    assert result.first.reason == "1 of 6 rows differ"
    assert [row.is_tie for row in result.first.rows] == [False, True]


def test_without_margins_nothing_is_a_tie():
    a, b = trace(), trace()
    del a["layers.1.topk_margin"], b["layers.1.topk_margin"]
    b["layers.1.topk_indices"][0, 1] = 7
    result = compare_tensors(a, b, bounds="f32")
    assert result.first.rows[0].margin is None
    assert not result.is_equal


def test_candidates_count_only_where_a_query_can_see():
    mask = torch.ones(4, 4, dtype=torch.uint8)
    other = mask.clone()
    other[1, 2:] = 0  # not yet there for token 1
    names = {"layers.2.candidate_mask": mask}
    assert compare_tensors(names, {"layers.2.candidate_mask": other}, bounds="f32").is_equal
    other[3, 0] = 0
    result = compare_tensors(names, {"layers.2.candidate_mask": other}, bounds="f32")
    assert (result.first.rows[0].row, result.first.rows[0].only_a) == (3, (0,))


def test_ratio_two_candidates_are_half_as_many():
    mask = torch.zeros(5, 2, dtype=torch.uint8)
    other = mask.clone()
    other[2, 1] = 1  # entry 1 is complete at token 3
    a, b = {"layers.2.candidate_mask": mask}, {"layers.2.candidate_mask": other}
    assert compare_tensors(a, b, bounds="f32").is_equal
    other[3, 1] = 1
    assert not compare_tensors(a, b, bounds="f32").is_equal


@pytest.mark.parametrize("both", [False, True])
def test_nan_never_passes(both):
    a, b = trace(), trace()
    b["layers.0.out"][1, 1] = torch.nan
    if both:
        a["layers.0.out"][1, 1] = torch.nan
    result = compare_tensors(a, b, bounds="f32")
    assert (result.first.name, result.first.status) == ("layers.0.out", "differs")
    count = "1 in a, 1 in b" if both else "0 in a, 1 in b"
    assert result.first.reason == f"values that are NaN: {count}"


def test_infinite_margins_are_equal_to_each_other_alone():
    a, b = trace(), trace()
    a["layers.1.topk_margin"][0] = b["layers.1.topk_margin"][0] = torch.inf
    assert compare_tensors(a, b, bounds="f32").is_equal
    b["layers.1.topk_margin"][0] = 1.0
    assert compare_tensors(a, b, bounds="f32").first.name == "layers.1.topk_margin"


def test_missing_names_and_other_shapes_differ():
    a, b = trace(), trace()
    del b["layers.0.out"]
    b["logits"] = b["logits"][:3]
    found = status(compare_tensors(a, b, bounds="f32"))
    assert found["layers.0.out"] == "only in a"
    assert found["logits"] == "differs"
    assert "layers.0.out" not in status(compare_tensors(a, b, bounds="f32", common=True))


def test_argmax_counts_in_f32qat():
    a, b = trace(), trace()
    b["logits"] = b["logits"] + 0.001 * torch.eye(4)[torch.zeros(TOKENS, dtype=torch.long)]
    assert status(compare_tensors(a, b, bounds="f32qat"))["logits"] == "within"
    a["logits"] = torch.zeros(TOKENS, 4)
    a["logits"][:, 1] = 0.001
    b["logits"] = a["logits"].roll(1, dims=1)
    result = compare_tensors(a, b, bounds="f32qat")
    assert "argmax agrees in 0.00% of rows" in result.first.reason


def test_result_is_plain_json():
    a, b = trace(), trace()
    b["layers.1.topk_margin"][0] = torch.inf
    text = json.dumps(compare_tensors(a, b, bounds="f32").as_dict(), allow_nan=False)
    data = json.loads(text)
    assert data["equal"] is False
    assert data["first_divergence"] == "layers.1.topk_margin"
    assert data["tensors"][1]["max_abs"] == "inf"


def test_bounds_follow_the_files(tmp_path):
    named, golden = tmp_path / "x.safetensors", tmp_path / "prefill_f32qat.safetensors"
    write_tensors(named, trace(), {"numerics": "released"})
    write_tensors(golden, trace(), {})
    assert compare_files(named, golden).bounds == "released"
    assert compare_files(golden, golden).bounds == "f32qat"
    assert compare_files(golden, golden, bounds="f32").bounds == "f32"
    with pytest.raises(InputError, match="bounds are 'f16', must be one of f32, f32qat"):
        compare_files(golden, golden, bounds="f16")


def test_files_without_a_common_name_are_unusable(tmp_path):
    write_tensors(tmp_path / "a", {"x": torch.zeros(1)}, {})
    write_tensors(tmp_path / "b", {"y": torch.zeros(1)}, {})
    with pytest.raises(InputError, match="no tensor in common"):
        compare_files(tmp_path / "a", tmp_path / "b")
    (tmp_path / "c").write_text("text")
    with pytest.raises(InputError, match="not a readable safetensors file"):
        compare_files(tmp_path / "a", tmp_path / "c")


def test_forward_order():
    names = ["logits", "layers.10.out", "layers.2.out", "layers.2.after_engram", "embed", "zzz"]
    assert sorted(names, key=forward_place) == [
        *("embed", "layers.2.after_engram", "layers.2.out", "layers.10.out", "logits", "zzz")
    ]
