"""Costs counted from built models, against closed formulas and published figures."""

from dataclasses import replace
from math import prod

import pytest
import torch

from openv41.config import ModelConfig
from openv41.io.hf_config import read_config
from openv41.io.tensor_names import tensor_table
from openv41.model.causal_encoder_decoder import CausalEncoderDecoder
from openv41.model.flops import (
    active_parameters,
    cache_bytes,
    component_of,
    count_parameters,
    flops_per_token,
    parameter_shapes,
)
from openv41.model.prefill import find_cut
from openv41.ops import quantize
from openv41.plan import Mode
from openv41.presets import PRESETS, preset, released, thin, tiny


def build(config: ModelConfig):
    return CausalEncoderDecoder(config, device="meta")


@pytest.fixture(scope="module")
def released_model():
    return build(released())


def shapes_of_table(config):
    """What the checkpoint's table says each of our parameters looks like."""
    shapes, experts = {}, {}
    for spec in tensor_table(config, variant="float32"):
        shapes[spec.ours] = spec.shape
        if spec.expert is not None:
            experts[spec.ours] = experts.get(spec.ours, 0) + 1
    return {name: (experts[name], *s) if name in experts else s for name, s in shapes.items()}


@pytest.mark.parametrize("name", [n for n in PRESETS if n != "released"])
def test_the_model_has_exactly_the_parameters_of_the_table(name):
    assert parameter_shapes(build(preset(name))) == shapes_of_table(preset(name))


def test_the_released_model_has_exactly_the_parameters_of_the_table(released_model):
    assert parameter_shapes(released_model) == shapes_of_table(released())


@pytest.mark.parametrize("name", ["A", "B"])
def test_golden_models_have_exactly_the_parameters_of_their_table(golden_dir, name):
    config = read_config(golden_dir / name / "checkpoint")
    assert parameter_shapes(build(config)) == shapes_of_table(config)


def test_released_parameters_by_closed_formula(released_model):
    counts = count_parameters(released_model)
    d, f = 5120, 2304
    assert counts["routed experts"] == 40 * 384 * 3 * d * f == 543_581_798_400
    assert counts["shared experts"] == 40 * 3 * d * f
    assert counts["embedding"] == counts["head"] == 129280 * d
    assert counts["engram tables"] == (384006168 + 384016682) * 256 == 196_613_849_600
    assert counts["engram projections"] == 2 * (25600 * 6144 + 2 * 4 * d)
    low_rank = 1280 * d + 64 * 512 * 1280 + 512 * d
    output = 8 * 1024 * (64 // 8 * 512) + d * 8192
    assert counts["attention"] == 40 * (low_rank + output + 1280 + 512 + 64)
    assert counts["compressors"] == (3 * 2 + 1) * 512 * d + 4 * 512
    assert counts["indexers"] == 8 * (4096 * 1280 + 32 * d) + 4 * (128 * 512 + 128)
    assert counts["hyper-connections"] == 80 * (24 * 4 * d + 24 + 3)
    assert counts["routers"] == 40 * 384 * (d + 2)
    assert counts["norms"] == (2 * 40 + 1) * d


def test_released_totals(released_model):
    counts = count_parameters(released_model)
    engram = counts["engram tables"] + counts["engram projections"]
    backbone = sum(counts.values()) - engram - counts["vision"] - counts["drafter"]
    assert round(backbone / 1e9, 2) == 551.57
    assert round((backbone + counts["vision"]) / 1e9, 2) == 552.05
    assert counts["vision"] == 485_268_480
    assert round(counts["drafter"] / 1e9, 3) == 14.225
    everything = sum(counts.values())
    assert everything == sum(prod(s.shape) for s in tensor_table(released(), variant="bfloat16"))
    assert round(everything / 1e9, 3) == 763.205


def test_released_active_parameters(released_model):
    assert round(active_parameters(released_model, prefill=True) / 1e9, 2) == 7.90
    assert round(active_parameters(released_model, prefill=False) / 1e9, 2) == 16.13


def test_active_parameters_of_tiny_by_hand():
    model = build(tiny())
    counts = count_parameters(model)
    idle = counts["embedding"] + counts["engram tables"] + counts["routed experts"] * 6 // 8
    idle += counts["vision"]  # works on patches, not on tokens
    assert active_parameters(model, prefill=False) == sum(counts.values()) - idle
    per_layer = 3 * 64 * 64 * 6
    encoder = sum(prod(s) for n, s in parameter_shapes(model).items() if n < "layers.4")
    tables = counts["engram tables"]
    encoder -= counts["embedding"] + counts["head"] + tables + 4 * per_layer
    source = 64 + 32 * 64 + 32 + 32 * 64 + 32 + 16 * 32 + 16  # norm, wkv, compressor, index key
    assert active_parameters(model, prefill=True) == encoder + source


def test_stored_codes_count_as_the_numbers_they_hold():
    model = CausalEncoderDecoder(replace(tiny(), engram=None))
    want = count_parameters(model)
    w1, wq_a = model.layers[0].moe.experts.w1, model.layers[0].attention.wq_a
    w1.store(*quantize.quantize_fp4_rows(torch.ones(8, 64, 64)))
    wq_a.store(*quantize.quantize_fp8_tiles(torch.ones(32, 64)))
    assert count_parameters(model) == want
    assert parameter_shapes(model)["layers.0.moe.experts.w1.weight"] == (8, 64, 64)


def test_a_parameter_without_component_is_refused():
    with pytest.raises(AssertionError, match=r"no component for parameter layers\.0\.new"):
        component_of("layers.0.new")


def test_released_cache_bytes():
    cache = cache_bytes(released())
    assert cache.global_per_token == 890
    assert cache.window_per_request == 528 * 128 * 40 == 2_703_360


def test_cache_bytes_count_short_blocks():
    attention = replace(tiny().attention, head_dim=40, rope_dim=8)
    indexer = replace(tiny().indexer, head_dim=34)
    cache = cache_bytes(replace(tiny(), attention=attention, indexer=indexer))
    assert cache.global_per_token == (20 + 3 + 17 + 2) * 1.5  # ratios 2 and 1
    assert cache.window_per_request == (40 + 2) * 32 * 8


def test_released_work_by_closed_formula(released_model):
    work = flops_per_token(released_model, 1_048_576, prefill=False)
    entry = 4 * 64 * 512
    assert work.attention == entry * (40 * 128 + 38 * 512)
    score = 2 * 32 * (128 + 1)
    assert work.indexer == score * (3 * 524_288 + 1_048_576 + 4 * 16_384)
    assert work.streams == 40 * 2 * 2 * 5120 * 4 * (4 + 1 + 1)
    shapes = parameter_shapes(released_model).items()
    text = [shape for name, shape in shapes if not name.startswith(("vision.", "drafter."))]
    vectors = sum(prod(shape) for shape in text if len(shape) == 1)
    assert work.matrices == 2 * (active_parameters(released_model, prefill=False) - vectors)
    assert work.total == work.attention + work.indexer + work.streams + work.matrices


def test_prefill_runs_half_of_the_layers(released_model):
    """Report §2.2: prompt tokens skip the decoder but for one projection."""
    for context in (1, 1000, 65_536, 1_048_576):
        prefill = flops_per_token(released_model, context, prefill=True)
        decode = flops_per_token(released_model, context, prefill=False)
        assert prefill.total < 0.6 * decode.total
        assert prefill.streams * 2 == decode.streams


def test_work_of_short_contexts_counts_what_exists():
    model = build(tiny())
    assert flops_per_token(model, 1, prefill=False).indexer == 2 * 2 * 17 * 2  # ratio 1: 4 and 6
    at_3 = flops_per_token(model, 3, prefill=False)
    assert at_3.attention == 4 * 2 * 32 * (8 * 3 + 3 * 1 + 4 * 3)
    assert at_3.indexer == 2 * 2 * 17 * (1 + 1 + 3 + 3)


def test_the_cut_is_the_last_kv_source():
    assert find_cut(released()) == find_cut(thin()) == (20, "")
    window_only = replace(
        tiny(), compress_ratios=(0,) * 8, kv_sources=(), index_sources=(), engram=None
    )
    assert find_cut(window_only)[0] is None
    model = build(window_only)
    assert {layer.plan.mode for layer in model.layers} == {Mode.WINDOW}
    head = active_parameters(model, prefill=False) - active_parameters(model, prefill=True)
    assert head == 64 * 1024 + 64
