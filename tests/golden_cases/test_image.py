"""Two images in a text, in float32 and in the released numerics, against the released code."""

import pytest
import torch

from openv41.image_grid import ImageGrid
from openv41.io.tensor_files import read_tensors
from openv41.io.trace import run_case
from openv41.io.trace_values import leaf
from tests.close import assert_close

pytestmark = pytest.mark.golden

BOUND = 2e-4  # README of the golden data: float32 logits, streams, embeddings
PROJECTED = 2e-5  # of what the projector makes: the tanh form of GELU is off by 6e-4 or more
DISCRETE = {"topk_indices", "expert_ids", "engram_hash_ids", "decode_ids", "subset_positions"}


@pytest.mark.parametrize(
    "mode", [pytest.param("f32", marks=pytest.mark.shapes), "f32qat", "released"]
)
def test_trace_has_the_names_shapes_and_dtypes_of_the_golden_file(golden, mode):
    got, want = golden.trace("image", mode), golden.want("image", mode)
    assert {n: (t.shape, t.dtype) for n, t in got.items()} == {
        n: (t.shape, t.dtype) for n, t in want.items()
    }
    assert torch.equal(got["subset_positions"], want["subset_positions"])


def test_float_tensors_are_within_the_bound(golden):
    got, want = golden.trace("image", "f32"), golden.want("image", "f32")
    names = [name for name in want if leaf(name) not in DISCRETE]
    for name in names:
        atol = PROJECTED if leaf(name) == "aligner_out" else BOUND
        assert_close(name, got[name], want[name], atol=atol)
    assert {"logits", "decode_logits", "embed", "image1.vision_out"} < set(names)


def test_discrete_results_are_equal(golden):
    got, want = golden.trace("image", "f32"), golden.want("image", "f32")
    for name in want:
        if leaf(name) in DISCRETE:
            value, expected = got[name], want[name]
            if leaf(name) == "expert_ids":
                value, expected = value.sort(dim=1).values, expected.sort(dim=1).values
            assert torch.equal(value, expected), name


def test_the_gate_is_zero_inside_spans_alone(golden):
    got = golden.trace("image", "f32")
    inside = golden.inputs.images.ids == golden.config.image_token_id
    for layer in golden.config.engram.layer_ids:
        gate = got[f"layers.{layer}.engram_gate"]
        assert torch.equal((gate == 0).all(dim=1), inside)


def test_cache_rounding_keeps_logits_near(golden):
    got, want = golden.trace("image", "f32qat"), golden.want("image", "f32qat")
    error = (got["logits"] - want["logits"]).abs().mean()
    agree = (got["logits"].argmax(-1) == want["logits"].argmax(-1)).double().mean()
    assert error < 0.02
    assert agree > 0.98


def product_of_pairs(x, weight, bias=None, *, deterministic=False):
    """The bfloat16 instruction of recent CPUs: two products at a time, float32 between them."""
    total = torch.zeros(len(x), len(weight))
    for columns in range(0, x.shape[1], 2):
        pair = (t[:, columns : columns + 2].double() for t in (x, weight))
        total = total + torch.mm(next(pair), next(pair).T).float()
    return (total if bias is None else total + bias.float()).to(x.dtype)


def test_the_released_encoder_is_met_bit_for_bit(golden, monkeypatch):
    """With the sums of a CPU like that of the golden data; one other rounding moves all patches."""
    monkeypatch.setattr("openv41.layers.quantized_linear.ops.linear", product_of_pairs)
    model, images = golden.model("released"), golden.inputs.images
    want, first = golden.want("image", "released"), 0
    for number, (rows, cols) in enumerate(images.sizes):
        grid = ImageGrid(rows, cols, golden.config.vision.downsample_ratio)
        with torch.no_grad():
            encoded = model.vision.encoder(images.patches[first : first + rows * cols], [grid])
            cells = model.vision.projector(encoded, [grid])
        assert torch.equal(encoded, want[f"image{number}.vision_out"])
        assert torch.equal(cells, want[f"image{number}.aligner_out"])
        first += rows * cols


def test_the_released_encoder_is_near_on_any_cpu(golden):
    got, want = golden.trace("image", "released"), golden.want("image", "released")
    for name in (n for n in want if leaf(n) in ("vision_out", "aligner_out")):
        error = (got[name] - want[name]).float().abs()
        assert error.mean() < 0.01 * want[name].float().std(), name


@pytest.mark.parametrize("fault", ["bf16 scores", "tanh"])
def test_another_rounding_is_seen(golden, monkeypatch, fault):
    """The control of the test before."""

    def narrow(q, k, v, lengths):
        heads = (t.transpose(0, 1)[None] for t in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(*heads)[0].transpose(0, 1)

    exact = torch.nn.functional.gelu

    if fault == "tanh":
        mode, name = "f32", "image1.aligner_out"
        monkeypatch.setattr(
            "openv41.layers.projector.F.gelu", lambda x: exact(x, approximate="tanh")
        )
    else:
        mode, name = "released", "image1.vision_out"
        monkeypatch.setattr("openv41.layers.vision_encoder.ops.image_attention", narrow)
    got = run_case(golden.model(mode), golden.inputs, "image", mode)[name]
    assert (got - golden.want("image", mode)[name]).abs().max() > PROJECTED


def test_spans_stand_as_the_golden_token_types_say(golden, golden_dir):
    inputs = read_tensors(golden_dir / golden.folder.name / "inputs.safetensors")
    types, starts = inputs["image_token_types"], inputs["image_starts"]
    ratio = golden.config.vision.downsample_ratio
    for start, (rows, cols) in zip(starts.tolist(), golden.inputs.images.sizes, strict=True):
        layout = ImageGrid(rows, cols, ratio).layout()
        assert types[start : start + len(layout)].tolist() == layout
