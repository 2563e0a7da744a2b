"""A forward over whole texts that sees what serving sees after a bounded prefill."""

import pytest
import torch

from openv41.config import NUMERICS
from openv41.errors import InputError
from openv41.layers.batch import Batch
from openv41.layers.geometry import lookback_rows
from openv41.layers.objectives import Objectives
from openv41.layers.probe import CHOICES, Probe
from openv41.model.cache import DenseStore
from openv41.model.prefill import (
    PrefillMode,
    ReplayVariant,
    layer_rows,
    prompt_rows,
    replay_bounds,
)
from tests.close import assert_close
from tests.layers.mini import mini_config, mini_model, random_ids, run_oracle

pytestmark = pytest.mark.unchecked

WINDOW, CUT = 4, 5  # of the mini model
TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-4}
variants = pytest.mark.parametrize("variant", list(ReplayVariant))


def bounds(model, prompts, variant):
    return replay_bounds(model.config, prompts, cut=CUT, variant=variant)


def tame(model):
    """Routes and choices that differ from token to token."""
    with torch.no_grad():
        for layer in model.layers:
            layer.moe.gate.bias *= 0.1
    return model


@torch.no_grad()
def served(model, documents, prompts, variant):
    """Hidden rows of each document from P - W on: a bounded prefill, one token, two, the rest."""
    config, store = model.config, DenseStore(model.config.compress_ratios, poison=True)
    rows = {
        number: prompt_rows(config, PrefillMode.BOUNDED, prompt, cut=CUT, variant=variant)
        for number, prompt in enumerate(prompts)
    }
    left = [list(ids) for ids in documents]
    parts = [[] for _ in documents]
    for sizes in (prompts, *([n] * len(left) for n in (1, 2, 99))):
        new = [ids[:size] for ids, size in zip(left, sizes, strict=True)]
        starts = [len(ids) - len(rest) for ids, rest in zip(documents, left, strict=True)]
        batch = Batch(
            torch.tensor([token for ids in new for token in ids], dtype=torch.int64),
            tuple(rows),
            tuple(starts),
            tuple(map(len, new)),
        )
        prefill = layer_rows(config, rows) if sizes is prompts else None
        found = model(batch, store, rows=prefill)
        for own, hidden in zip(parts, found.hidden.split(found.batch.counts), strict=True):
            own.append(hidden)
        left = [ids[size:] for ids, size in zip(left, sizes, strict=True)]
    assert not any(left)
    return [torch.cat(own) for own in parts]


def floor_of(prompt):
    return max(0, prompt - WINDOW)


@pytest.mark.parametrize(
    ("dtype", "numerics", "variant"),
    [
        *((torch.float64, "f32", variant) for variant in ReplayVariant),
        (torch.float64, "f32qat", ReplayVariant.FIRST_LAYER_FULL_WINDOW),
        (torch.float32, "f32", ReplayVariant.ALL_BOUNDED),
    ],
)
def test_rows_are_those_that_serving_computes(dtype, numerics, variant):
    """Prompts below, at and above the window, odd and even, in one packed batch."""
    model = tame(mini_model(3, dtype, NUMERICS[numerics]))
    cases = {23: 9, 17: 3, 26: 14, 12: 4, 21: 5, 19: 18, 15: 15}  # length: P
    documents = [random_ids(length, seed=length) for length in cases]
    prompts = list(cases.values())
    with torch.no_grad():
        replay = bounds(model, prompts, variant)
        hidden = model(Batch.from_documents(documents), replay=replay).hidden
        whole = model(Batch.from_documents(documents)).hidden
    tolerance, moved = TOLERANCES[dtype], []
    for length, got, full, want in zip(
        cases,
        hidden.split(list(cases)),
        whole.split(list(cases)),
        served(model, documents, prompts, variant),
        strict=True,
    ):
        floor, name = floor_of(cases[length]), f"{length} tokens, prompt {cases[length]}"
        assert_close(name, got[floor:], want, rtol=tolerance, atol=tolerance)
        assert_close(f"{name}: before", got[:floor], full[:floor], rtol=tolerance, atol=tolerance)
        moved.append(not torch.allclose(got[floor:], full[floor:], rtol=1e-3, atol=1e-3))
    assert moved == [floor_of(prompt) > 0 for prompt in prompts]


def test_the_variants_differ_in_the_first_decoder_layer_alone():
    model = tame(mini_model(3, torch.float64))
    ids, prompt = random_ids(20, seed=8), 10
    seen = {}
    for variant in ReplayVariant:
        probe = Probe(lambda name: name.endswith((".out", "main_kv", "index_k")))
        with torch.no_grad():
            model(Batch.from_documents([ids]), replay=bounds(model, [prompt], variant), probe=probe)
        seen[variant] = probe.values
    free = Probe()
    with torch.no_grad():
        model(Batch.from_documents([ids]), probe=free)
    first, all_ = seen.values()
    for layer in range(model.config.num_layers):
        same = [torch.equal(s[f"layers.{layer}.out"], free.values[f"layers.{layer}.out"])
                for s in (first, all_)]  # fmt: skip
        assert same == [layer <= CUT, layer < CUT], layer
    for name, value in first.items():
        if not name.endswith(".out"):
            assert torch.equal(value, all_[name]), name
            assert torch.equal(value, free.values[name]), name


@variants
def test_against_the_oracle(variant):
    """Token by token in float64, with windows that end at P - W; rotations here are float32."""
    model = tame(mini_model(6, torch.float64))
    ids, prompt = random_ids(21, seed=4), 11
    first = CUT if variant is ReplayVariant.ALL_BOUNDED else CUT + 1
    want = run_oracle(model, ids, window_floor=(first, prompt - WINDOW))
    with torch.no_grad():
        replay = bounds(model, [prompt], variant)
        got = model(Batch.from_documents([ids]), replay=replay).hidden
    assert_close("hidden", got, torch.tensor(want["final_hidden"]), rtol=2e-5, atol=2e-5)


def test_windows_by_hand():
    """Rows 0 to 6 are of a request with floor 3, rows 7 to 9 of one without."""
    batch = Batch.from_documents([list(range(7)), list(range(3))])
    rows = lookback_rows(batch, 3, (0, 0), (3, 0)).tolist()
    assert rows == [
        [-1, -1, 0], [-1, 0, 1], [0, 1, 2],
        [-1, -1, 3], [-1, 3, 4], [3, 4, 5], [4, 5, 6],
        [-1, -1, 7], [-1, 7, 8], [7, 8, 9],
    ]  # fmt: skip


@pytest.mark.shapes
@variants
def test_gradients_are_equal_with_recomputation(variant):
    lengths, prompts = (13, 1, 30), (9, 1, 17)
    documents = [random_ids(n, seed=n) for n in lengths]
    model = mini_model(0, torch.float32)
    replay, found = bounds(model, prompts, variant), []
    for recompute in (False, True):
        model.zero_grad()
        out = model(
            Batch.from_documents(documents),
            objectives=Objectives(indexer="mean", balance=True),
            replay=replay,
            recompute=recompute,
        )
        (out.hidden.square().sum() + out.losses.indexer + out.losses.balance).backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        found.append((out, gradients))
    (plain, want), (again, got) = found
    assert torch.equal(plain.hidden, again.hidden)
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], gradient) for name, gradient in want.items())
    assert all(torch.equal(again.expert_counts[i], n) for i, n in plain.expert_counts.items())


def test_loads_and_losses_of_layers_are_those_of_the_rows_that_serving_computes():
    """From the cut on they do not move with a row before P - W; their mean is over all tokens."""
    model = tame(mini_model(2, torch.float64))
    ids, prompt = random_ids(24, seed=2), 15
    floor, top_k = floor_of(prompt), model.config.moe.top_k
    replay = bounds(model, [prompt], ReplayVariant.FIRST_LAYER_FULL_WINDOW)
    objectives = Objectives(indexer="own", balance=True)
    probe = Probe.recording_choices()
    with torch.no_grad():
        out = model(Batch.from_documents([ids]), replay=replay, objectives=objectives, probe=probe)
        free = model(Batch.from_documents([ids]), objectives=objectives)
    for layer, counts in out.expert_counts.items():
        first = floor if layer >= CUT else 0
        own = probe.values[f"layers.{layer}.expert_ids"][first:]
        assert counts[0].tolist() == own.flatten().bincount(minlength=5).tolist()
        assert counts.sum() == (len(ids) - first) * top_k
    altered = {n: v.clone() for n, v in probe.values.items() if "mask" not in n}
    for name, value in altered.items():
        layer, kind = int(name.split(".")[1]), name.rpartition(".")[2]
        if kind == "expert_ids" and layer >= CUT:
            value[:floor] = torch.tensor([0, 1])
        elif kind == "topk_indices" and layer >= CUT:
            value[:floor] = torch.tensor([0, -1, -1])
    assert set(CHOICES) >= {n.rpartition(".")[2] for n in altered}
    with torch.no_grad():
        other = model(
            Batch.from_documents([ids]),
            replay=replay,
            objectives=objectives,
            probe=Probe.replaying(altered),
        )
    for name in ("indexer", "balance"):
        got, want = getattr(other.losses, name), getattr(out.losses, name)
        assert_close(name, got, want, rtol=1e-9, atol=0)
        assert got != getattr(free.losses, name), name


def test_it_needs_whole_texts():
    model = mini_model(0)
    replay = bounds(model, [9], ReplayVariant.ALL_BOUNDED)
    store = DenseStore(model.config.compress_ratios)
    with pytest.raises(InputError, match="objectives and replay need whole texts"):
        model(Batch.from_documents([random_ids(12)]), store, replay=replay)


def test_bounds_by_hand():
    config = mini_config()
    found = replay_bounds(config, [9, 3, 4, 5], cut=CUT, variant=ReplayVariant.ALL_BOUNDED)
    assert found.floors == (5, 0, 0, 1)
    assert (found.first_layer, found.first_bounded) == (5, 5)
    kept = ReplayVariant.FIRST_LAYER_FULL_WINDOW
    assert replay_bounds(config, [9], cut=CUT, variant=kept).first_bounded == 6
    assert found.part(2, 4).floors == (0, 1)
