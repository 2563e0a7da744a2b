"""One forward over the whole text, in float32, against the released code."""

import itertools

import pytest
import torch

from openv41.plan import plan_layers
from tests.close import assert_close
from tests.golden_cases.conftest import FEW_STEPS

pytestmark = pytest.mark.golden

BOUND = 2e-4  # README of the golden data: float32 logits, streams, embeddings
DISCRETE = {"topk_indices", "expert_ids", "candidate_mask", "engram_hash_ids"}


def leaf(name):
    return name.rpartition(".")[2]


def by_expert(trace, name):
    """Expert weights in the order of their expert ids."""
    order = trace[name.replace("weights", "ids")].argsort(dim=1)
    return trace[name].gather(1, order)


def visible(mask, ratio):
    tokens, entries = mask.shape
    seen = (torch.arange(tokens) + 1) // ratio
    return mask.masked_fill(torch.arange(entries) >= seen[:, None], 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "mode"),
    [
        *(
            pytest.param(case, mode, marks=[] if case == "decode" else pytest.mark.shapes)
            for case, mode in itertools.product(
                ["prefill", "decode"], ["f32", "f32qat", "released"]
            )
        ),
        ("batch", "f32"),  # the only batch file of the golden data
    ],
)
def test_trace_has_the_names_shapes_and_dtypes_of_the_golden_file(golden, case, mode):
    got, want = golden.trace(case, mode), golden.want(case, mode)
    if case == "decode" and mode != "f32":
        short = [n for n in want if mode == "released" or n.startswith("greedy")]
        want = want | {n: want[n][:FEW_STEPS] for n in short}
    assert {n: (t.shape, t.dtype) for n, t in got.items()} == {
        n: (t.shape, t.dtype) for n, t in want.items()
    }


def test_float_tensors_are_within_the_bound(golden):
    got, want = golden.trace("prefill", "f32"), golden.want("prefill", "f32")
    compared = 0
    for name in want:
        if leaf(name) in DISCRETE:
            continue
        value, expected = got[name], want[name]
        if leaf(name) == "expert_weights":
            value, expected = by_expert(got, name), by_expert(want, name)
        assert_close(name, value, expected, atol=BOUND)
        compared += 1
    assert compared > 8 * len(golden.model("f32").layers)


def test_discrete_results_are_equal(golden):
    got, want = golden.trace("prefill", "f32"), golden.want("prefill", "f32")
    ratios = golden.config.compress_ratios
    compared = 0
    for name in want:
        value, expected = got[name], want[name]
        if leaf(name) not in DISCRETE:
            continue
        if leaf(name) == "expert_ids":
            value, expected = value.sort(dim=1).values, expected.sort(dim=1).values
        if leaf(name) == "candidate_mask":
            ratio = ratios[int(name.split(".")[1])]
            value, expected = visible(value, ratio), visible(expected, ratio)
        assert torch.equal(value, expected), name
        compared += 1
    assert compared >= len(ratios) + len(golden.config.index_sources) + 2


def test_cache_rounding_keeps_logits_near(golden):
    got, want = golden.trace("prefill", "f32qat"), golden.want("prefill", "f32qat")
    error = (got["logits"] - want["logits"]).abs().mean()
    agree = (got["logits"].argmax(-1) == want["logits"].argmax(-1)).double().mean()
    assert error < 0.02
    assert agree > 0.98


def test_cache_rounding_gives_the_same_stored_values(golden):
    """Before the first rounding flip can spread: the first source's entries, nearly all equal."""
    got, want = golden.trace("prefill", "f32qat"), golden.want("prefill", "f32qat")
    first = golden.config.kv_sources[0]
    for kind in ("main_kv", "index_k"):
        name = f"layers.{first}.{kind}"
        differ = ((got[name] - want[name]).abs() > 1e-5).double().mean()
        assert differ < 1e-3, f"{name}: {differ:.2e} of the values are rounded another way"


def test_every_layer_mode_is_covered(golden):
    assert {plan.mode.value for plan in plan_layers(golden.config)} == {
        *("window", "full", "reindex", "reuse")
    }
