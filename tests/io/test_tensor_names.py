"""The table of the released checkpoint, against published totals and the golden files."""

import json
from collections import Counter
from dataclasses import replace

import pytest

from openv41.io.hf_config import read_config
from openv41.io.tensor_names import num_shards, shard_name, tensor_table
from openv41.presets import released, thin, tiny


def by_name(config, variant="released"):
    return {spec.released: spec for spec in tensor_table(config, variant=variant)}


def bytes_by(attribute):
    out = Counter()
    for spec in tensor_table(released()):
        out[getattr(spec, attribute)] += spec.num_bytes
    return out


def header(path):
    data = path.read_bytes()
    out = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    out.pop("__metadata__", None)
    return out


def test_released_totals():
    table = tensor_table(released())
    assert len(table) == 96_085
    assert len({spec.released for spec in table}) == 96_085
    assert sum(spec.num_bytes for spec in table) == 510_286_023_000
    assert num_shards(released()) == 48


def test_released_bytes_by_dtype():
    got = {dtype: round(count / 1e9, 3) for dtype, count in bytes_by("dtype").items()}
    want = {"I8": 278.586, "F8_E4M3": 204.015, "F8_E8M0": 23.563, "BF16": 3.953, "F32": 0.169}
    assert got == want


def test_released_bytes_and_tensors_by_shard():
    count = Counter(spec.shard for spec in tensor_table(released()))
    size = bytes_by("shard")
    plain, full, reindex = (7_389_500_888, 2334), (7_405_694_680, 2342), (7_395_076_568, 2337)
    special = dict.fromkeys((2, 8, 14), full) | dict.fromkeys((24, 28, 32, 36), reindex)
    special[20] = (7_400_451_800, 2341)
    for layer in range(40):
        assert (size[layer + 3], count[layer + 3]) == special.get(layer, plain), layer
    assert [size[s] for s in (44, 45, 46)] == [2_652_643_800, 2_573_913_560, 2_706_317_272]
    assert size[47] + size[48] == 203_073_076_240
    assert [count[s] for s in (1, 2, 43, 47, 48)] == [266, 1, 2, 6, 6]
    assert count[44] + count[45] + count[46] == 2401


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "shard"),
    [
        ("image_start", "BF16", (5120,), 1),
        ("embed.weight", "BF16", (129280, 5120), 2),
        ("layers.0.attn.wq_b.weight", "F8_E4M3", (32768, 1280), 3),
        ("layers.0.attn.wq_b.scale", "F8_E8M0", (1024, 40), 3),
        ("layers.39.ffn.experts.383.w1.weight", "I8", (2304, 2560), 42),
        ("layers.39.ffn.experts.383.w2.scale", "F8_E8M0", (5120, 72), 42),
        ("layers.8.attn.compressor.wgate.weight", "BF16", (512, 5120), 11),
        ("layers.36.attn.indexer.wq_b.weight", "F8_E4M3", (4096, 1280), 39),
        ("norm.weight", "BF16", (5120,), 43),
        ("mtp.0.main_proj.weight", "F8_E4M3", (5120, 15360), 44),
        ("mtp.2.confidence_head.proj.weight", "BF16", (1, 5376), 46),
        ("mtp.1.hc_ffn_fn", "F32", (24, 20480), 45),
        ("layers.1.engram.embed.weight", "F8_E4M3", (384006168, 256), 47),
        ("layers.14.engram.embed.scale", "F8_E8M0", (384016682, 8), 48),
        ("layers.14.engram.wkv.weight", "F8_E4M3", (25600, 6144), 48),
    ],
)
def test_released_tensor(name, dtype, shape, shard):
    spec = by_name(released())[name]
    assert (spec.dtype, spec.shape, spec.shard) == (dtype, shape, shard)


def test_what_the_release_does_not_hold():
    names = by_name(released())
    assert "layers.20.attn.compressor.wgate.weight" not in names  # ratio 1 pools nothing
    assert "layers.24.attn.indexer.wk.weight" not in names  # its keys are layer 20's
    assert not [n for n in names if "image_pad" in n or "hc_head" in n or "mtp.0.embed" in n]


@pytest.mark.parametrize("name", ["A", "B"])
def test_table_equals_the_golden_files(golden_dir, name):
    folder = golden_dir / name / "checkpoint"
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= {k: (v["dtype"], tuple(v["shape"])) for k, v in header(path).items()}
    table = tensor_table(read_config(folder))
    assert {spec.released: (spec.dtype, spec.shape) for spec in table} == found


def test_a_weight_and_its_scale_belong_to_one_parameter_of_ours():
    names = by_name(tiny())
    weight = names["layers.2.ffn.experts.5.w3.weight"]
    scale = names["layers.2.ffn.experts.5.w3.scale"]
    assert weight.ours == scale.ours == "layers.2.moe.experts.w3.weight"
    assert (weight.expert, scale.expert) == (5, 5)
    assert (weight.part, scale.part) == ("weight", "scale")
    assert weight.stored_as == "layers.2.moe.experts.w3.codes"
    assert scale.stored_as == "layers.2.moe.experts.w3.scales"
    assert weight.weight_format == scale.weight_format == "fp4"
    sink = names["layers.0.attn.attn_sink"]
    assert (sink.ours, sink.stored_as, sink.part) == (*["layers.0.attention.sink"] * 2, "plain")
    assert sink.weight_format is None
    assert names["layers.1.engram.embed.weight"].weight_format == "fp8_rows"


def test_the_drafter_has_its_released_number_of_tensors():
    drafter = [spec for spec in tensor_table(released()) if spec.released.startswith("mtp.")]
    assert len(drafter) == 2401
    assert all(spec.ours.startswith("drafter.") for spec in drafter)
    stages = [sum(s.released.startswith(f"mtp.{stage}.") for s in drafter) for stage in range(3)]
    assert stages == [801, 798, 802]
    assert not any(word in s.released for s in drafter for word in ("hc_head", "mtp.0.embed"))


def test_short_blocks_at_the_edge_have_a_scale_of_their_own():
    config = replace(tiny(), attention=replace(tiny().attention, q_rank=40))
    names = by_name(config)
    assert names["layers.0.attn.wq_a.weight"].shape == (40, 64)
    assert names["layers.0.attn.wq_a.scale"].shape == (2, 2)
    assert names["layers.0.attn.wq_b.scale"].shape == (2, 2)


@pytest.mark.parametrize(("variant", "plain"), [("bfloat16", "BF16"), ("float32", "F32")])
def test_plain_variants_hold_the_same_weights_as_numbers(variant, plain):
    stored, got = by_name(tiny()), by_name(tiny(), variant)
    assert set(got) == {name for name, spec in stored.items() if spec.part != "scale"}
    assert got["layers.0.ffn.experts.0.w1.weight"].shape == (64, 64)
    assert got["layers.0.ffn.experts.0.w1.weight"].dtype == plain
    assert got["layers.0.ffn.experts.0.w1.weight"].weight_format == "fp4"
    assert got["layers.0.hc_attn_fn"].dtype == "F32"  # an island in every variant
    assert {spec.part for spec in got.values()} == {"plain"}
    assert {name: spec.ours for name, spec in got.items()} == {
        name: stored[name].ours for name in got
    }


def test_shards_of_a_text_model_without_drafter():
    config = thin()
    shards = {spec.released: spec.shard for spec in tensor_table(config)}
    assert num_shards(config) == 1 + 40 + 1 + 2
    assert shards["embed.weight"] == 1
    assert shards["layers.0.attn_norm.weight"] == 2
    assert shards["head.weight"] == shards["norm.weight"] == 42
    assert (shards["layers.1.engram.wkv.weight"], shards["layers.14.engram.wkv.weight"]) == (43, 44)
    assert num_shards(replace(config, engram=None)) == 42
    assert shard_name(3, 48) == "model-00003-of-00048.safetensors"
