"""Every layer of a mini model, in float64, against the loop oracle."""

import numpy as np
import pytest
import torch

from openv41.config import NUMERICS, NumericsConfig
from openv41.layers.batch import Batch
from openv41.layers.probe import Probe
from tests.close import assert_close
from tests.layers.mini import IMAGE_TOKEN, mini_model, random_ids, run_oracle

BOUND = 2e-5  # rotation tables are float32 in the model, float64 in the oracle
SETS = ("topk_indices", "expert_ids")


def compare(got, want, rows=slice(None)):
    """Every tensor that both have; returns the kinds compared."""
    kinds = set()
    for name, ours in got.items():
        kind = name.rpartition(".")[2]
        if name not in want:
            continue
        kinds.add(kind)
        theirs = want[name]
        if kind in SETS:
            chosen = [set(row) - {-1} for row in ours[rows].tolist()]
            assert chosen == [{int(i) for i in row} for row in theirs], name
        elif kind == "candidate_mask":
            visible = np.tril(np.ones(theirs.shape, dtype=bool))
            np.testing.assert_array_equal(ours[rows, : len(theirs)].numpy() & visible, theirs, name)
        elif kind == "expert_weights":
            pass  # the oracle lists experts by score
        elif kind in ("main_kv", "index_k"):
            if rows == slice(None):
                assert_close(name, ours, torch.from_numpy(theirs), rtol=BOUND, atol=BOUND)
        elif kind != "engram_hash_ids":
            assert_close(name, ours[rows], torch.from_numpy(theirs), rtol=BOUND, atol=BOUND)
    return kinds


def run(model, documents, probe=None):
    probe = probe or Probe()
    images = [token for ids in documents for token in ids if token == IMAGE_TOKEN]
    embeds = model.embed.weight[images] if images else None  # the oracle embeds them so
    out = model(Batch.from_documents(documents, image_embeds=embeds), probe=probe)
    return {**probe.values, "logits": model.logits(out.hidden)}


@pytest.mark.parametrize(
    ("length", "seed"), [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3), (21, 1), (22, 2), (21, 3)]
)
def test_all_layers(length, seed):
    model, ids = mini_model(seed), random_ids(length, seed)
    kinds = compare(run(model, [ids]), run_oracle(model, ids))
    assert kinds >= {"attn_out", "ffn_out", "out", "pre_mix_out", "topk_indices", "expert_ids"}
    assert kinds >= {"after_engram", "engram_gate", "window_kv", "candidate_mask", "logits"}


def test_packed_documents_equal_each_alone():
    """Windows, groups, entries, n-grams and positions restart; lengths are odd and even."""
    model = mini_model(4)
    documents = [random_ids(n, n) for n in (7, 1, 12, 5)]
    got = run(model, documents)
    first = 0
    for ids in documents:
        compare(got, run_oracle(model, ids), rows=slice(first, first + len(ids)))
        first += len(ids)


def test_image_positions():
    """Their own routing bias, dead for n-grams, gate zero: streams pass the Engram unchanged."""
    model, ids = mini_model(5), random_ids(14)
    ids[4:7] = [IMAGE_TOKEN] * 3
    is_image = np.array(ids) == IMAGE_TOKEN
    got, want = run(model, [ids]), run_oracle(model, ids, is_image=is_image)
    compare(got, want)
    assert not got["layers.1.engram_gate"][4:7].any()
    assert got["layers.1.engram_gate"][:4].all()
    assert torch.equal(got["layers.1.after_engram"][4:7], got["layers.0.out"][4:7])
    text = run_oracle(model, ids)
    assert (text["logits"] != want["logits"]).any(), "the image mask must matter"


def test_rounded_caches():
    """The first layers; behind them a rounding flip may move everything."""
    model, ids = mini_model(6, numerics=NUMERICS["f32qat"]), random_ids(21)
    got, want = run(model, [ids]), run_oracle(model, ids, numerics="f32qat")
    early = {f"layers.{i}.{what}" for i in range(3) for what in ("window_kv", "main_kv", "index_k")}
    compare({name: got[name] for name in early if name in got}, want)
    plain = run_oracle(model, ids)
    assert np.abs(want["layers.2.main_kv"] - plain["layers.2.main_kv"]).max() > 0.01


@pytest.mark.parametrize("token", [0, 9, 22])
def test_no_token_moves_anything_before_it(token):
    """Bit for bit, which needs products that do not depend on the number of rows."""
    model, ids = mini_model(7, numerics=NumericsConfig(deterministic=True)), random_ids(23)
    before = run(model, [ids])
    ids[token] = (ids[token] + 5) % IMAGE_TOKEN
    after = run(model, [ids])
    for layer in range(model.config.num_layers):
        name = f"layers.{layer}.out"
        assert torch.equal(after[name][:token], before[name][:token]), name
        assert not torch.equal(after[name][token], before[name][token]), name
