"""config.json: both forms, strictness, and the way back."""

import json
from copy import deepcopy

import pytest

from openv41.config import ModelConfig
from openv41.errors import ConfigError
from openv41.io.hf_config import read_config, read_variant, to_document, write_config
from openv41.io.hf_keys import FIXED, IGNORED, KEYS, QUANTIZATION
from openv41.plan import plan_layers
from openv41.presets import PRESETS, preset, released, thin, tiny

RELEASED = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "model_type": "deepseek_v41",
    "dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "image_token_id": 129264,
    "transformers_version": "5.6.0",
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [32, 32],
        "scale_fmt": "ue8m0",
        "expert_dtype": "fp4",
    },
    "text_config": {
        "model_type": "deepseek_v41_text",
        "vocab_size": 129280,
        "hidden_size": 5120,
        "num_hidden_layers": 40,
        "max_position_embeddings": 1048576,
        "tie_word_embeddings": False,
        "num_attention_heads": 64,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 1280,
        "o_lora_rank": 1024,
        "o_groups": 8,
        "attention_bias": False,
        "sliding_window": 128,
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 65536,
        },
        "rms_norm_eps": 1e-20,
        "compress_ratios": [0, 0] + [2] * 18 + [1] * 20 + [0] * 3,
        "kv_source_layer_ids": [2, 8, 14, 20],
        "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 512,
        "candidate_source_layer_id": 20,
        "candidate_topk_blocks": 2048,
        "candidate_block_size": 8,
        "moe_intermediate_size": 2304,
        "n_routed_experts": 384,
        "n_shared_experts": 1,
        "num_experts_per_tok": 6,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "hidden_act": "silu",
        "swiglu_limit": 10.0,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "engram_layer_ids": [1, 14],
        "engram_num_embeddings": [384006168, 384016682],
        "engram_max_ngram_size": 4,
        "engram_vocab_size": 16000000,
        "engram_n_heads": 8,
        "engram_head_dim": 256,
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": 99092,
        "num_nextn_predict_layers": 3,
        "dspark_block_size": 5,
        "dspark_noise_token_id": 128799,
        "dspark_target_layer_ids": [37, 38, 39],
        "dspark_markov_rank": 256,
        "dspark_n_routed_experts": 128,
        "dspark_num_experts_per_tok": 3,
    },
    "vision_config": {
        "model_type": "deepseek_v41_vision",
        "num_hidden_layers": 32,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "intermediate_size": 2816,
        "patch_size": 14,
        "rope_theta": 10000,
        "downsample_ratio": 3,
        "max_image_tokens": 1024,
        "min_pixels": 295936,
        "max_wh_ratio": None,
    },
}

FLAT = {
    "vocab_size": 129280,
    "dim": 5120,
    "moe_inter_dim": 2304,
    "n_layers": 40,
    "n_mtp_layers": 3,
    "n_heads": 64,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "n_activated_experts": 6,
    "score_func": "sqrtsoftplus",
    "route_scale": 1.5,
    "swiglu_limit": 10.0,
    "q_lora_rank": 1280,
    "head_dim": 512,
    "rope_head_dim": 64,
    "norm_eps": 1e-20,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "window_size": 128,
    "kv_source_layers": [2, 8, 14, 20],
    "index_source_layers": [2, 8, 14, 20, 24, 28, 32, 36],
    "original_seq_len": 65536,
    "rope_theta": 10000,
    "rope_factor": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 512,
    "candidate_source_layer": 20,
    "candidate_topk_blocks": 2048,
    "candidate_block_size": 8,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "engram_layer_ids": [1, 14],
    "engram_vocab_size": 16000000,
    "engram_num_embeddings": [384006168, 384016682],
    "engram_max_ngram_size": 4,
    "engram_n_heads": 8,
    "engram_head_dim": 256,
    "engram_pad_id": 2,
    "engram_compressed_vocab_size": 99092,
    "dtype": "fp8",
    "expert_dtype": "fp4",
    "compress_rope_theta": 160000,
    "compress_ratios": [0, 0] + [2] * 18 + [1] * 20 + [0] * 3,
    "vision_n_layers": 32,
    "vision_dim": 1024,
    "vision_n_heads": 16,
    "vision_inter_dim": 2816,
    "vision_patch_size": 14,
    "vision_downsample_ratio": 3,
    "vision_max_n_token": 1024,
    "vision_min_pixels": 295936,
    "vision_max_wh_ratio": None,
    "vision_rope_theta": 10000,
    "image_token_id": 129264,
    "dspark_block_size": 5,
    "dspark_noise_token_id": 128799,
    "dspark_target_layer_ids": [37, 38, 39],
    "dspark_markov_rank": 256,
    "dspark_n_routed_experts": 128,
    "dspark_n_activated_experts": 3,
}

ABSENT = object()


def changed(path, value, document=RELEASED):
    """A copy of the document with one value set, or removed."""
    out = deepcopy(document)
    *sections, name = path.split(".")
    place = out
    for section in sections:
        place = place[section]
    if value is ABSENT:
        del place[name]
    else:
        place[name] = value
    return out


def problems(document):
    with pytest.raises(ConfigError) as error:
        read_config(document)
    return error.value.problems


def test_both_released_forms_are_the_preset():
    assert read_config(RELEASED) == released()
    assert read_config(FLAT) == released()


@pytest.mark.parametrize("name", ["A", "B"])
def test_golden_configurations(golden_dir, name):
    folder = golden_dir / name / "checkpoint"
    config = read_config(folder)
    text = json.loads((folder / "config.json").read_text())["text_config"]
    assert isinstance(config, ModelConfig)
    assert config == read_config(folder / "config.json")
    assert config.hidden_size == text["hidden_size"]
    assert list(config.kv_sources) == text["kv_source_layer_ids"]
    assert config.moe.swiglu_limit == text["swiglu_limit"]
    assert config.dspark.top_k == text["dspark_num_experts_per_tok"]
    assert len(plan_layers(config)) == text["num_hidden_layers"]
    assert config.image_token_id == config.vocab_size - 1


@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize("name", PRESETS)
def test_writing_and_reading_gives_the_equal_object(tmp_path, name, quantized):
    write_config(preset(name), tmp_path, quantized=quantized)
    assert read_config(tmp_path) == preset(name)
    assert read_variant(tmp_path) == ("released" if quantized else "bfloat16")
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_golden_configurations_survive_the_way_back(golden_dir, tmp_path):
    for name in "AB":
        config = read_config(golden_dir / name / "checkpoint")
        write_config(config, tmp_path / "other.json", quantized=True)
        assert read_config(tmp_path / "other.json") == config


def test_the_written_file_holds_the_released_keys_and_values():
    written = to_document(released(), quantized=True)
    want = deepcopy(RELEASED)
    del want["transformers_version"], want["quantization_config"]["fmt"]
    del want["text_config"]["tie_word_embeddings"]
    assert written.pop("tie_word_embeddings") is False
    assert written == want


def test_plain_variants_say_what_they_hold(tmp_path):
    write_config(tiny(), tmp_path, quantized=False, dtype="float32")
    document = json.loads((tmp_path / "config.json").read_text())
    assert "quantization_config" not in document
    assert read_variant(tmp_path) == "float32"
    assert read_variant(FLAT) == "released"
    with pytest.raises(ConfigError, match=r'dtype is "float16", must be "bfloat16" or "float32"'):
        read_variant({"dtype": "float16"})


def test_a_gate_temperature_is_kept_but_never_written_as_the_default():
    assert "gate_temp" not in to_document(released(), quantized=True)["text_config"]
    config = read_config(changed("text_config.gate_temp", 2))
    assert config.moe.gate_temperature == 2.0
    assert read_config(to_document(config, quantized=True)) == config


def test_both_spellings_of_the_engram_pad_key():
    other = changed("text_config.engram_pad_token_id", ABSENT)
    other["text_config"]["engram_pad_id"] = 7
    assert read_config(other).engram.pad_token_id == 7
    flat = changed("engram_pad_id", ABSENT, FLAT) | {"engram_pad_token_id": 7}
    assert read_config(flat).engram.pad_token_id == 7
    both = changed("text_config.engram_pad_id", 3)
    assert problems(both) == (
        "text_config.engram_pad_token_id is 2 but text_config.engram_pad_id is 3; they are the "
        "same setting and must agree",
    )


def test_parts_can_be_left_out():
    document = changed("vision_config", ABSENT)
    document["text_config"]["num_nextn_predict_layers"] = 0
    document["text_config"]["compress_ratios"] = [0, 0] + [2] * 18 + [1] * 20
    document["text_config"]["engram_layer_ids"] = []
    config = read_config(document)
    assert (config.vision, config.dspark, config.engram) == (None, None, None)
    assert read_config(changed("vision_config", None)).vision is None
    assert read_config(to_document(thin(), quantized=False)).vision is None


def test_what_a_file_may_leave_out():
    document = changed("text_config.candidate_source_layer_id", ABSENT)
    del document["text_config"]["norm_topk_prob"], document["transformers_version"]
    del document["bos_token_id"], document["vision_config"]["max_wh_ratio"]
    assert read_config(document) == released()


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        ("model_type", "deepseek_v4", 'model_type is "deepseek_v4", must be "deepseek_v41"'),
        ("model_type", "deepseek_v41x", 'model_type is "deepseek_v41x", must be "deepseek_v41"'),
        ("model_type", ABSENT, 'model_type is missing, must be "deepseek_v41"'),
        ("text_config.hidden_act", "gelu", 'text_config.hidden_act is "gelu", must be "silu"'),
        (
            "text_config.scoring_func",
            "softmax",
            'scoring_func is "softmax", must be "sqrtsoftplus"',
        ),
        ("text_config.attention_bias", True, "text_config.attention_bias is true, must be false"),
        ("text_config.num_key_value_heads", 8, "text_config.num_key_value_heads is 8, must be 1"),
        ("text_config.num_key_value_heads", True, "num_key_value_heads is true, must be 1"),
        ("text_config.tie_word_embeddings", True, "tie_word_embeddings is true, must be false"),
        ("text_config.topk_method", "greedy", 'topk_method is "greedy", must be "noaux_tc"'),
        ("text_config.rope_scaling.rope_type", "linear", 'rope_type is "linear", must be "yarn"'),
        ("text_config.n_shared_experts", 2, "moe: num_shared is 2, only 1 is supported"),
        ("quantization_config.weight_block_size", [128, 128], "is [128, 128], must be [32, 32]"),
        ("quantization_config.expert_dtype", ABSENT, 'expert_dtype is missing, must be "fp4"'),
        ("dtype", "float16", 'dtype is "float16", must be "bfloat16" or "float32"'),
        ("text_config.hidden_size", "4", 'text_config.hidden_size is "4", must be an integer'),
        ("text_config.hidden_size", 4.0, "text_config.hidden_size is 4.0, must be an integer"),
        ("text_config.hidden_size", True, "text_config.hidden_size is true, must be an integer"),
        ("text_config.hidden_size", None, "text_config.hidden_size is null, must be an integer"),
        ("text_config.hidden_size", 10**30, "must be an integer"),
        ("text_config.hidden_size", ABSENT, "hidden_size is missing, must be an integer"),
        ("text_config.hc_eps", "1e-6", 'hc_eps is "1e-6", must be a finite number'),
        ("text_config.hc_eps", float("nan"), "hc_eps is NaN, must be a finite number"),
        ("text_config.hc_eps", False, "hc_eps is false, must be a finite number"),
        ("text_config.norm_topk_prob", 1, "norm_topk_prob is 1, must be true or false"),
        ("text_config.kv_source_layer_ids", 2, "is 2, must be a list of integers"),
        ("text_config.kv_source_layer_ids", [2, True], "is [2, true], must be a list of integers"),
        ("vision_config.max_wh_ratio", "x", 'is "x", must be a finite number or null'),
        ("vision_config", 3, "vision_config is 3, must be an object"),
        ("text_config.rope_scaling.factor", ABSENT, "rope_scaling.factor is missing"),
        ("text_config.dspark_markov_rank", ABSENT, "text_config.dspark_markov_rank is missing"),
        ("text_config.engram_layer_ids", ABSENT, "text_config.engram_layer_ids is missing"),
        (
            "text_config.compress_ratios",
            [0] * 40,
            "has 40 entries, must have 43: one per",
        ),
        ("text_config.qk_rope_head_dim", 63, "attention: rope_dim is 63, must be even"),
        ("text_config.eos_token_id", 5, "eos_token_id is 1 but text_config.eos_token_id is 5"),
        ("text_config.dtype", "float64", 'text_config.dtype is "float64"'),
        ("text_config.engram_num_embeddings", [1, 2], "must be [384006168, 384016682]: the sums"),
    ],
)
def test_a_wrong_value_is_named_with_its_key(path, value, text):
    assert any(text in problem for problem in problems(changed(path, value)))


def test_drafter_ratios_must_be_zero():
    ratios = [0, 0] + [2] * 18 + [1] * 20 + [0, 1, 0]
    assert problems(changed("text_config.compress_ratios", ratios)) == (
        "text_config.compress_ratios ends with [0, 1, 0]; the last 3 belong to the drafter and "
        "must be 0",
    )


@pytest.mark.parametrize(
    ("path", "closest"),
    [
        ("text_config.hiden_size", "text_config.hidden_size"),
        ("text_config.kv_source_layers", "text_config.kv_source_layer_ids"),
        ("text_config.index_top_k", "text_config.index_topk"),
        ("dspark_block_size", "text_config.dspark_block_size"),
        ("vision_config.patchsize", "vision_config.patch_size"),
        ("quantization_config.weight_block", "quantization_config.weight_block_size"),
        ("text_config.rope_scaling.beta_fats", "text_config.rope_scaling.beta_fast"),
        ("model_typ", "model_type"),
    ],
)
def test_an_unknown_key_names_the_closest_known_one(path, closest):
    assert problems(changed(path, 1)) == (f"{path} is unknown; the closest known key is {closest}",)


def test_an_unknown_key_of_the_flat_form():
    assert problems(FLAT | {"window_sise": 8}) == (
        "window_sise is unknown; the closest known key is window_size",
    )


def test_all_problems_come_in_one_error():
    document = changed("text_config.hiden_size", 1)
    document["model_type"] = "deepseek_v3"
    document["text_config"]["index_topk"] = "512"
    document["text_config"]["hc_mult"] = 0
    document["text_config"]["num_experts_per_tok"] = 500
    assert problems(document) == (
        "text_config.hiden_size is unknown; the closest known key is text_config.hidden_size",
        'model_type is "deepseek_v3", must be "deepseek_v41"',
        'text_config.index_topk is "512", must be an integer',
        "moe: top_k is 500, above num_experts (384)",
        "mhc: num_streams is 0, must be at least 1",
    )


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"{", "no valid JSON at line 1 column 2: Expecting property name"),
        (b"[1]", r"holds \[1\], must hold one JSON object"),
        (b'{"dim": 1, "dim": 2}', "dim is given more than once"),
        (b"\xff\xfe", "no valid JSON: 'utf-8' codec can't decode"),
        (b"", "no valid JSON at line 1 column 1"),
        (b"[" * 100_000, "no valid JSON: maximum recursion depth"),
        (b"{}", "text_config is missing; the released form holds it"),
    ],
)
def test_a_file_that_is_no_configuration(tmp_path, content, text):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=text) as error:
        read_config(tmp_path)
    assert error.value.where == str(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="no such file; give a checkpoint folder") as error:
        read_config(tmp_path / "nothing")
    assert str(tmp_path / "nothing") in str(error.value)
    with pytest.raises(ConfigError, match=r"config\.json: .*\n.*no such file"):
        read_config(tmp_path)


def test_no_key_has_two_meanings_and_every_ignored_key_a_reason():
    for form in ("nested", "flat"):
        names = [name for entry in KEYS for name in getattr(entry, form)]
        names += [name for entry in (*FIXED, *QUANTIZATION) for name in getattr(entry, form)]
        assert len(names) == len(set(names))
        assert not set(names) & set(IGNORED)
    assert all(len(reason) > 10 for reason in IGNORED.values())
    for path in ("text_config.attention_dropout", "text_config.rope_scaling.type"):
        assert read_config(changed(path, 0.0)) == released()
