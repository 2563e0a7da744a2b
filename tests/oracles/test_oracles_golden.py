"""The float64 oracle against the stored outputs of the released code: it is right by itself."""

import functools
import json

import numpy as np
import pytest
from safetensors import safe_open

from tests.oracles import backbone, formats

BOUND = 2e-4  # README of the golden data: float32, logits and streams
PREFIX = 40  # longer than window, top-k entries and candidate pool of both sets

pytestmark = pytest.mark.golden


def load(path):
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name).numpy() for name in file.keys() if "image" not in name}  # noqa: SIM118


@functools.cache
def mini_model(folder):
    weights, config = formats.read_checkpoint(folder / "checkpoint")
    token_map = json.loads((folder / "engram_tables.json").read_text())["token_map"]
    return weights, config, token_map


@pytest.fixture(params=["A", "B"])
def folder(request, golden_dir):
    return golden_dir / request.param


@pytest.fixture
def run(folder):
    weights, config, token_map = mini_model(folder)
    return lambda ids, **options: backbone.forward(weights, config, ids, token_map, **options)


def compare(got, want, config, rows):
    """Discrete results equal; values within the bound, collected so that one message shows all."""
    errors = {}
    for name, expected in want.items():
        kind = name.rsplit(".", 1)[-1]
        if kind.endswith("_margin") or (kind == "index_score_row_last" and rows == PREFIX):
            continue
        if kind == "topk_indices":
            for t in range(rows):
                assert set(got[name][t]) == set(expected[t]) - {-1}, f"{name} row {t}"
        elif kind == "candidate_mask":
            ratio = config["compress_ratios"][int(name.split(".")[1])]
            for t in range(rows):
                seen = (t + 1) // ratio
                np.testing.assert_array_equal(got[name][t, :seen], expected[t, :seen] != 0, name)
        elif kind in ("expert_ids", "engram_hash_ids"):
            np.testing.assert_array_equal(
                np.sort(got[name], -1), np.sort(expected[:rows], -1), name
            )
        elif kind == "expert_weights":
            errors[name] = np.abs(np.sort(got[name], -1) - np.sort(expected[:rows], -1)).max()
        else:
            errors[name] = np.abs(got[name] - expected).max()
    return {name: error for name, error in errors.items() if not error <= BOUND}


def keep_rows(want, subset, rows, full):
    """Cut the stored rows to the first ``rows`` tokens; returns the subset rows left."""
    kept = subset[subset < rows]
    sizes = {len(subset): len(kept), full: rows}
    return {name: value[: sizes.get(len(value))] for name, value in want.items()}, kept


def check_prefill(folder, run, rows=None):
    inputs, want = load(folder / "inputs.safetensors"), load(folder / "prefill_f32.safetensors")
    ids, subset = inputs["text_ids"], inputs["subset_positions"]
    rows = rows or len(ids)
    got = run(ids[:rows])
    want, kept = keep_rows(want, subset, rows, len(ids))
    for name in want:
        if name.rsplit(".", 1)[-1] in ("main_kv", "index_k"):
            want[name] = want[name][: len(got[name])]
        elif len(want[name]) == len(kept) != len(got[name]):
            got[name] = got[name][kept]
    assert compare(got, want, mini_model(folder)[1], rows) == {}


def test_prefix_of_the_prefill(folder, run):
    check_prefill(folder, run, PREFIX)


@pytest.mark.slow
def test_whole_prefill(folder, run):
    check_prefill(folder, run)


@pytest.mark.slow
def test_batch_rows(folder, run):
    ids = load(folder / "inputs.safetensors")["batch_ids"]
    want = load(folder / "batch_f32.safetensors")
    for row, last, mid in zip(ids, want["logits_last"], want["logits_mid"], strict=True):
        logits = run(row)["logits"]
        np.testing.assert_allclose(logits[-1], last, atol=BOUND, rtol=0)
        np.testing.assert_allclose(logits[31], mid, atol=BOUND, rtol=0)


@pytest.mark.prove
def test_rounded_caches(folder, run):
    ids = load(folder / "inputs.safetensors")["text_ids"]
    want = load(folder / "prefill_f32qat.safetensors")["logits"]
    logits = run(ids, numerics="f32qat")["logits"]
    assert np.abs(logits - want).mean() < 0.02
    assert (logits.argmax(-1) == want.argmax(-1)).mean() > 0.98
