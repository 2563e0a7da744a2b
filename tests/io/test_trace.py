"""Cases, margins, inputs and feeds of a trace, on a small fixture."""

import re
from dataclasses import replace

import pytest
import torch

from openv41.errors import InputError
from openv41.image_grid import ImageGrid
from openv41.io.checkpoint import load_model
from openv41.io.fixture import FixtureOptions, make_fixture
from openv41.io.tensor_files import read_tensors, write_tensors
from openv41.io.trace import TRACE_DTYPES, TRACE_NUMERICS, read_feed, run_case
from openv41.io.trace_inputs import Inputs
from openv41.io.trace_values import margin_of
from openv41.layers.batch import Batch

pytestmark = pytest.mark.unchecked

OPTIONS = FixtureOptions(
    seed=3, vocab_size=64, hidden_size=32, num_experts=2, length=64, outputs=False
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "fixture"
    make_fixture(path, OPTIONS)
    return path


@pytest.fixture(scope="module")
def inputs(folder):
    return Inputs.read(folder / "inputs.safetensors")


@pytest.fixture(scope="module")
def released(folder, inputs):
    """A model with the released numerics, and its own prefill."""
    model = load_model(
        folder / "checkpoint",
        numerics=TRACE_NUMERICS["released"],
        dtype=TRACE_DTYPES["released"],
    )
    return model, run_case(model, inputs, "prefill", "released")


def test_margin_is_last_chosen_less_first_rejected():
    scores = torch.tensor([[4.0, 1.0, 3.0], [2.0, 2.0, 2.0], [1.0, -torch.inf, -torch.inf]])
    assert margin_of(scores, 1).tolist() == [1.0, 0.0, torch.inf]
    assert margin_of(scores, 2).tolist() == [2.0, 0.0, torch.inf]
    assert margin_of(scores, 3).tolist() == [torch.inf] * 3


def test_trace_is_the_model_itself(released, inputs):
    model, trace = released
    with torch.no_grad():
        output = model(Batch.packed(inputs.text_ids, [64]))
        assert torch.equal(trace["logits"], model.logits(output.hidden))
    rows = inputs.subset_positions
    assert torch.equal(trace["final_hidden"], output.hidden[rows])
    assert torch.equal(trace["main_hidden"], output.taps)


def test_own_prefill_as_feed_changes_nothing(released, inputs, tmp_path):
    model, trace = released
    write_tensors(tmp_path / "own", trace, {})
    fed = run_case(model, inputs, "prefill", "released", read_feed(tmp_path / "own", model, inputs))
    assert fed.keys() == trace.keys()
    for name, value in trace.items():
        assert torch.equal(fed[name], value), name


def test_with_a_feed_a_fault_stays_in_its_layer(released, inputs):
    """A changed weight of layer 4 shows in layer 4, and in nothing before or after it."""
    model, trace = released
    weight = model.layers[4].ffn_norm.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight[0] += 1
        fed = run_case(model, inputs, "prefill", "released", trace)
        plain = run_case(model, inputs, "prefill", "released")
        weight.copy_(kept)
    layers = {name.split(".")[1] for name in trace if differs(name, fed, trace)}
    assert layers == {"4"}
    assert differs("logits", plain, trace)


def differs(name, got, want):
    return not torch.equal(got[name], want[name])


def test_feed_needs_every_row_and_every_source(released, inputs, tmp_path):
    model, trace = released
    short = {name: t for name, t in trace.items() if name != "layers.5.main_kv"}
    short["layers.0.out"] = short["layers.0.out"][:9]
    write_tensors(tmp_path / "short", short, {})
    with pytest.raises(InputError) as caught:
        read_feed(tmp_path / "short", model, inputs)
    assert "layers.0.out is [9, 4, 32], must be [64, 4, 32]" in str(caught.value)
    assert "no tensor layers.5.main_kv" in str(caught.value)
    assert "prefill_released file" in str(caught.value)


@pytest.mark.parametrize(
    ("problem", "change"),
    [
        ("layers.0.out is [64, 3, 32], must be [64, 4, 32]", lambda t: t[:, :3]),
        ("layers.0.out is [], must be [64, 4, 32]", lambda t: t.sum()),
        ("layers.0.pre_mix_out is int32, must be floats", lambda t: t.int()),
        ("layers.2.main_kv is [32, 3], must be [32, 32]", lambda t: t[:, :3]),
        ("layers.5.index_k is [63, 32], must be [64, 32]", lambda t: t[1:]),
        ("layers.2.topk_indices holds 32, must be in -1..31", lambda t: 0 * t + 32),
        ("layers.7.topk_indices holds -10, must be in -1..63", lambda t: t - 9),
        ("layers.3.topk_indices is [64], must be [64, any]", lambda t: t[:, 0]),
        ("layers.5.candidate_mask is float32, must be whole numbers", lambda t: t.float()),
        ("layers.5.candidate_mask holds 2, must be in 0..1", lambda t: t + 1),
        ("subset_positions holds 72, must be in 0..63", lambda t: t + 9),
    ],
)
def test_feed_of_another_model(released, inputs, tmp_path, problem, change):
    model, trace = released
    name = problem.split()[0]
    write_tensors(tmp_path / "feed", {**trace, name: change(trace[name])}, {})
    with pytest.raises(InputError, match=re.escape(f"cannot be fed: {problem}; give the")):
        read_feed(tmp_path / "feed", model, inputs)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("image", "case image needs an inputs file with image_ids; this one has none"),
        ("other", "case is 'other', must be one of prefill, decode, batch, replay, image"),
    ],
)
def test_cases_that_cannot_run(released, inputs, case, message):
    with pytest.raises(InputError, match=message):
        run_case(released[0], replace(inputs, images=None), case, "released")


def test_only_a_prefill_can_be_fed(released, inputs):
    model, trace = released
    with pytest.raises(InputError, match="feed works with case prefill, not decode"):
        run_case(model, inputs, "decode", "released", trace)


@pytest.mark.slow
def test_decode_repeats_the_prefill(folder, inputs):
    model = load_model(folder / "checkpoint", dtype=torch.float32)
    prefill = run_case(model, inputs, "prefill", "f32")
    decode = run_case(model, inputs, "decode", "f32")
    rows = decode["positions"].long()
    assert rows.tolist() == list(range(51, 64))
    assert (decode["logits"] - prefill["logits"][rows]).abs().max() < 1e-4
    assert torch.equal(decode["layers.2.topk_indices"], prefill["layers.2.topk_indices"][rows])
    last = decode["greedy_logits"][0] - prefill["logits"][50]
    assert last.abs().max() < 1e-4


def test_batch_rows_do_not_see_each_other(folder, inputs):
    model = load_model(folder / "checkpoint", dtype=torch.float32)
    both = run_case(model, inputs, "batch", "f32")
    alone = run_case(model, replace(inputs, batch_ids=inputs.batch_ids[1:]), "batch", "f32")
    for name, value in both.items():
        assert value.shape == (2, 64)
        assert (value[1] - alone[name][0]).abs().max() < 1e-4, name


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"batch_ids": None}, "no tensor batch_ids"),
        ({"prefill_len": torch.tensor([64])}, "prefill_len is 64, must be in 1..63"),
        ({"prefill_len": torch.tensor([0])}, "prefill_len is 0, must be in 1..63"),
        ({"subset_positions": torch.tensor([3, 64])}, "must be rows of the 64 text_ids"),
    ],
)
def test_inputs_that_cannot_be_used(folder, tmp_path, changed, message):
    tensors = read_tensors(folder / "inputs.safetensors") | changed
    path = tmp_path / "inputs.safetensors"
    write_tensors(path, {n: t for n, t in tensors.items() if t is not None}, {})
    with pytest.raises(InputError, match=message):
        Inputs.read(path)


def test_a_file_that_is_no_safetensors_is_named(tmp_path):
    (tmp_path / "x").write_text("no")
    with pytest.raises(InputError, match="x: not a readable safetensors file"):
        Inputs.read(tmp_path / "x")
    with pytest.raises(InputError, match="absent: not a readable safetensors file"):
        Inputs.read(tmp_path / "absent")


@pytest.mark.shapes
def test_an_image_trace_is_the_model_itself(released, inputs):
    model, images = released[0], inputs.images
    trace = run_case(model, inputs, "image", "released")
    grids = [ImageGrid(*size, model.config.vision.downsample_ratio) for size in images.sizes]
    with torch.no_grad():
        parts = images.patches.split([grid.num_patches for grid in grids])
        spans = [model.vision(own, [grid]) for own, grid in zip(parts, grids, strict=True)]
        output = model(Batch.packed(images.ids, [len(images.ids)], torch.cat(spans)))
    assert torch.equal(trace["logits"], model.logits(output.hidden))
    inside = images.ids == model.config.image_token_id
    assert torch.equal(trace["embed"][inside], torch.cat(spans))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image0.patches": None}, r"found 0 images of \[\] patches"),
        ({"image_grids_vit": None}, r"image_grids_vit with rows x columns of each; found 2 images"),
        ({"image_grids_vit": torch.ones(2, 2, dtype=torch.int32)}, r"grids \[\[1, 1\], \[1, 1\]\]"),
    ],
)
def test_images_that_do_not_fit_their_grids(folder, tmp_path, change, message):
    found = read_tensors(folder / "inputs.safetensors") | change
    write_tensors(tmp_path / "in", {n: t for n, t in found.items() if t is not None}, {})
    with pytest.raises(InputError, match=message):
        Inputs.read(tmp_path / "in")
