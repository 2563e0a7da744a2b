"""Golden sets A and B on a GPU with every kernel required, within the bounds of the golden data.

A kernel runs wherever an op has one, or the test fails with the reason for which it was refused.
The float32 cases prove structure to 2e-4, so their kernels must multiply in full float32; the
released numerics (bfloat16, rounded caches and inputs) run the kernels in the form that is served.
"""

from dataclasses import fields, replace

import pytest
import torch

from openv41.engine.paged_store import CacheConfig, PagedStore
from openv41.io.checkpoint import load_model
from openv41.io.compare import compare_tensors
from openv41.io.trace import TRACE_DTYPES, TRACE_NUMERICS, read_feed, run_case
from openv41.io.trace_values import feed_tokens, leaf
from openv41.model.cache import DenseStore
from openv41.ops import kernels
from openv41.ops._dispatch import Op
from tests.close import assert_close
from tests.golden_cases.test_prefill import BOUND, DISCRETE, by_expert, visible

pytestmark = [pytest.mark.golden, pytest.mark.gpu]

STEPS = 12  # of a decode
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MODE = "required" if torch.cuda.is_available() else "reference"  # without a GPU a rehearsal


def moved(value):
    """A dataclass of inputs, or a mapping, with its tensors on the GPU."""
    if isinstance(value, torch.Tensor):
        return value.to(DEVICE)
    if isinstance(value, dict):
        return {name: moved(part) for name, part in value.items()}
    if hasattr(value, "__dataclass_fields__"):
        return replace(value, **{f.name: moved(getattr(value, f.name)) for f in fields(value)})
    return value


def model_of(golden, mode):
    numerics, dtype = TRACE_NUMERICS[mode], TRACE_DTYPES[mode]
    return load_model(golden.checkpoint, numerics=numerics, dtype=dtype, device=DEVICE)


def trace(golden, case, mode, *, fed=False):
    model, feed = model_of(golden, mode), None
    if fed:
        path = golden.folder / "prefill_released.safetensors"
        feed = moved(read_feed(path, model, golden.inputs))
    with kernels(MODE):
        found = run_case(model, moved(golden.inputs), case, mode, feed)
    return {name: value.cpu() for name, value in found.items()}


def assert_within_the_float32_bound(golden, case):
    got, want = trace(golden, case, "f32"), golden.want(case, "f32")
    for name in want:
        value, expected = got[name], want[name]
        if leaf(name) == "expert_weights" and case == "prefill":
            value, expected = by_expert(got, name), by_expert(want, name)
        elif leaf(name) == "expert_ids":
            value, expected = value.sort(dim=1).values, expected.sort(dim=1).values
        elif leaf(name) == "candidate_mask":
            ratio = golden.config.compress_ratios[int(name.split(".")[1])]
            value, expected = visible(value, ratio), visible(expected, ratio)
        if leaf(name) in DISCRETE or not expected.is_floating_point():
            assert torch.equal(value, expected), name
        else:
            assert_close(name, value, expected, atol=BOUND)


@pytest.mark.parametrize("case", ["prefill", "batch", "image"])
def test_float32_is_within_the_bound_and_choices_are_equal(golden, case):
    assert_within_the_float32_bound(golden, case)


@pytest.mark.parametrize("case", ["prefill", "image"])
def test_rounded_caches_keep_logits_near(golden, case):
    got, want = trace(golden, case, "f32qat"), golden.want(case, "f32qat")
    assert (got["logits"] - want["logits"]).abs().mean() < 0.02
    same = got["logits"].argmax(-1) == want["logits"].argmax(-1)
    assert same.double().mean() > 0.98


def test_each_layer_of_the_released_numerics_on_golden_inputs(golden):
    got = trace(golden, "prefill", "released", fed=True)
    compared = compare_tensors(
        got, golden.want("prefill", "released"), bounds="released-gpu", common=True
    )
    wrong = [t for t in compared.tensors if t.status == "differs"]
    assert not wrong, "\n".join(map(str, wrong[:5]))
    assert len(compared.tensors) > 8 * golden.config.num_layers


def decoded(model, store, inputs, steps):
    """Logits of a prefill's last token and of the tokens after it."""
    ids, first = inputs.text_ids.to(DEVICE), inputs.prefill_len
    with torch.no_grad(), kernels(MODE):
        found = [feed_tokens(model, store, ids[:first], 0)[0]]
        for position in range(first, first + steps):
            step = ids[position : position + 1]
            found.append(feed_tokens(model, store, step, position)[0])
    return torch.stack(found).cpu()


def test_decode_in_float32(golden):
    model, want = model_of(golden, "f32"), golden.want("decode", "f32")["logits"]
    got = decoded(model, DenseStore(model.config.compress_ratios), golden.inputs, STEPS)
    assert_close("logits", got[1:], want[:STEPS], atol=BOUND)


def test_decode_through_packed_pages(golden):
    model, want = model_of(golden, "f32qat"), golden.want("decode", "f32qat")["logits"]
    length = golden.inputs.prefill_len + STEPS
    cache = CacheConfig(num_pages=length // 64 + 2, max_requests=1)
    store = PagedStore(model.config, model.numerics, cache, device=DEVICE)
    store.open(0)
    store.reserve(0, length)
    got = decoded(model, store, golden.inputs, STEPS)
    assert (got[1:] - want[:STEPS]).abs().mean() < 0.02


def test_kernels_did_run(golden, monkeypatch):
    """The required mode proves nothing about an op that is never called."""
    asked, refusal = set(), Op.refusal

    def noted(op, *args, **keywords):
        asked.add(op.reference.__name__)
        return refusal(op, *args, **keywords)

    monkeypatch.setattr(Op, "refusal", noted)
    trace(golden, "prefill", "released")
    assert {"rms_norm", "rotate", "sparse_attention", "index_scores", "select_top_k"} <= asked
