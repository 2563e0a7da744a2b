"""Configuration: every class names all of its problems at once."""

from dataclasses import FrozenInstanceError, replace

import pytest

from openv41.config import (
    NUMERICS,
    AttentionConfig,
    DsparkConfig,
    EngramConfig,
    IndexerConfig,
    MhcConfig,
    MoeConfig,
    NumericsConfig,
    VisionConfig,
    YarnConfig,
    as_dict,
)
from openv41.errors import ConfigError
from openv41.presets import released, tiny

NAN = float("nan")
INDEXER = {"num_heads": 4, "head_dim": 32, "top_k": 8, "candidate_source": 4}
INDEXER |= {"candidate_blocks": 6, "block_size": 4}
ATTENTION = {"num_heads": 4, "head_dim": 32, "rope_dim": 16, "q_rank": 32, "o_rank": 16}
ATTENTION |= {"o_groups": 2, "window_size": 8}
MOE = {"num_experts": 8, "top_k": 2, "expert_dim": 64}
ENGRAM = {"layer_ids": (1, 3), "num_embeddings": (100, 100)}
VISION = {"num_layers": 2, "hidden_size": 64, "num_heads": 2, "intermediate_size": 96}
DSPARK = {"num_stages": 2, "block_size": 3, "noise_token_id": 5, "target_layer_ids": (5, 6)}
DSPARK |= {"markov_rank": 8, "num_experts": 4, "top_k": 2}

WRONG = [
    (YarnConfig, {}, {"factor": 0.5}, r"yarn: 1 problem.*factor is 0.5, must be at least 1"),
    (YarnConfig, {}, {"beta_slow": 40.0}, r"beta_fast \(32.0\) must be above beta_slow \(40.0\)"),
    (AttentionConfig, ATTENTION, {"rope_dim": 15}, r"rope_dim is 15, must be even and at most"),
    (AttentionConfig, ATTENTION, {"rope_dim": 64}, r"rope_dim is 64, .*at most head_dim \(32\)"),
    (AttentionConfig, ATTENTION, {"o_groups": 3}, r"o_groups \(3\) must divide num_heads \(4\)"),
    (AttentionConfig, ATTENTION, {"window_size": 0}, r"window_size is 0, must be at least 1"),
    (AttentionConfig, ATTENTION, {"rope_theta": NAN}, r"rope_theta is nan, must be at least 1"),
    (IndexerConfig, INDEXER, {"top_k": 0}, r"indexer: 1 problem.*top_k is 0"),
    (IndexerConfig, INDEXER, {"candidate_source": -1}, r"candidate_source is -1"),
    (IndexerConfig, INDEXER, {"head_dim": 33}, r"head_dim is 33, must be even"),
    (MoeConfig, MOE, {"top_k": 9}, r"moe: .*top_k is 9, above num_experts \(8\)"),
    (MoeConfig, MOE, {"num_shared": 2}, r"num_shared is 2, only 1 is supported"),
    (MoeConfig, MOE, {"expert_dim": 63}, r"expert_dim is 63, must be even"),
    (MoeConfig, MOE, {"swiglu_limit": 0.0}, r"swiglu_limit is 0.0, must be above 0"),
    (MoeConfig, MOE, {"gate_temperature": NAN}, r"gate_temperature is nan, must be above 0"),
    (MhcConfig, {}, {"num_streams": 0}, r"mhc: .*num_streams is 0"),
    (MhcConfig, {}, {"eps": 0.0}, r"eps is 0.0, must be above 0"),
    (EngramConfig, ENGRAM, {"layer_ids": (3, 1)}, r"layer_ids is \(3, 1\), must ascend"),
    (EngramConfig, ENGRAM, {"layer_ids": (-1, 1)}, r"layer_ids holds \[-1\], layers count from 0"),
    (EngramConfig, ENGRAM, {"num_embeddings": (9,)}, r"1 entries for 2 layer_ids; give one per"),
    (EngramConfig, ENGRAM, {"num_embeddings": (9, 0)}, r"num_embeddings holds \[0\]"),
    (EngramConfig, {}, {"layer_ids": (), "num_embeddings": ()}, r"layer_ids is empty; leave"),
    (EngramConfig, ENGRAM, {"max_ngram": 1}, r"max_ngram is 1, must be at least 2"),
    (EngramConfig, ENGRAM, {"table_size": 2**40}, r"table_size is 1099511627776, must be at most"),
    (VisionConfig, VISION, {"num_heads": 32}, r"hidden_size is 64, must be a multiple of 4 x"),
    (VisionConfig, VISION, {"patch_size": 0}, r"vision: .*patch_size is 0"),
    (VisionConfig, VISION, {"max_wh_ratio": -1.0}, r"max_wh_ratio is -1.0, must be above 0"),
    (DsparkConfig, DSPARK, {"top_k": 5}, r"dspark: .*top_k is 5, above num_experts \(4\)"),
    (DsparkConfig, DSPARK, {"target_layer_ids": ()}, r"target_layer_ids is empty"),
    (DsparkConfig, DSPARK, {"target_layer_ids": (6, 5)}, r"target_layer_ids is \(6, 5\), must asc"),
]

WRONG_MODELS = [
    ({"vocab_size": 0}, r"model: 1 problem.*vocab_size is 0, must be at least 1"),
    ({"hidden_size": 63}, r"hidden_size is 63, must be even"),
    ({"norm_eps": 0.0}, r"norm_eps is 0.0, must be above 0"),
    ({"num_layers": 9}, r"compress_ratios has 8 entries, must have num_layers \(9\)"),
    ({"compress_ratios": (0, 4, 4, 4, 1, 1, 1, 1)}, r"holds \[4\], only 0, 1 and 2 are supported"),
    ({"compress_ratios": (2, 2, 2, 2, 1, 1, 1, 1)}, r"layer 0 has ratio 2 but no kv source at or"),
    ({"compress_ratios": (0, 2, 2, 1, 1, 1, 1, 1)}, r"layer 3 has ratio 1, its kv source 1 has 2"),
    ({"compress_ratios": (0, 2, 2, 2, 1, 1, 0, 1)}, r"layer 6 is a source but its compress ratio"),
    ({"kv_sources": (4, 1)}, r"kv_sources is \(4, 1\), must ascend without repeats"),
    ({"kv_sources": (1, 8)}, r"kv_sources names layers \[8\], there are 8"),
    ({"index_sources": (1, 3, 6)}, r"kv_sources \[4\] are not in index_sources; every one must"),
    ({"indexer": replace(tiny().indexer, candidate_source=6)}, r"candidate_source is 6, must be o"),
    ({"eos_token_id": 1024}, r"eos_token_id is 1024, outside the vocabulary of 1024"),
    ({"engram": replace(tiny().engram, layer_ids=(1, 9))}, r"engram.layer_ids names layers \[9\]"),
    ({"engram": replace(tiny().engram, pad_token_id=2000)}, r"engram.pad_token_id is 2000, outsi"),
    ({"engram": replace(tiny().engram, compressed_vocab_size=2000)}, r"at most vocab_size \(1024"),
    (
        {"vision": VisionConfig(**VISION), "image_token_id": 1024},
        r"image_token_id is 1024, outside the vocabulary",
    ),
    ({"dspark": DsparkConfig(**DSPARK | {"noise_token_id": 1024})}, r"noise_token_id is 1024, out"),
    ({"dspark": DsparkConfig(**DSPARK | {"target_layer_ids": (8,)})}, r"names layers \[8\], there"),
    (
        {
            "attention": replace(tiny().attention, rope_dim=32),
            "indexer": IndexerConfig(**INDEXER | {"head_dim": 16}),
        },
        r"rope_dim is 32, must be at most indexer.head_dim \(16\)",
    ),
]


@pytest.mark.parametrize(("build", "good", "bad", "text"), WRONG)
def test_a_wrong_value_is_named(build, good, bad, text):
    if good:
        build(**good)
    with pytest.raises(ConfigError, match=f"(?s){text}"):
        build(**{**good, **bad})


@pytest.mark.parametrize(("bad", "text"), WRONG_MODELS)
def test_parts_that_do_not_fit_together_are_named(bad, text):
    with pytest.raises(ConfigError, match=f"(?s){text}"):
        replace(tiny(), **bad)


def test_all_problems_come_in_one_error():
    with pytest.raises(ConfigError, match=r"model: 3 problem\(s\)") as error:
        replace(tiny(), bos_token_id=-1, eos_token_id=5000, norm_eps=-1.0)
    assert error.value.problems == (
        "bos_token_id is -1, outside the vocabulary of 1024",
        "eos_token_id is 5000, outside the vocabulary of 1024",
        "norm_eps is -1.0, must be above 0",
    )


def test_configurations_are_frozen_and_hashable():
    config = tiny()
    with pytest.raises(FrozenInstanceError):
        config.vocab_size = 5
    assert hash(config) == hash(tiny())
    assert config != released()


def test_derived_sizes_of_the_released_model():
    config = released()
    assert config.indexer.pool_size == 16384
    assert (config.engram.num_orders, config.engram.num_lookups) == (3, 24)


def test_numeric_modes_round_where_the_table_says():
    assert as_dict(NUMERICS["f32"]) == {
        "linear_input": "off",
        "window_kv": "off",
        "main_kv": "off",
        "index": "off",
        "expert_weights": "off",
        "score_dtype": "float32",
        "compute_dtype": "weights",
        "deterministic": False,
    }
    qat, exact = NUMERICS["f32qat"], NUMERICS["released"]
    assert (qat.linear_input, qat.window_kv, qat.main_kv, qat.index) == ("off", *["fake"] * 3)
    assert {exact.linear_input, exact.window_kv, exact.main_kv, exact.index} == {"exact"}


def test_a_wrong_rounding_is_named():
    broken = object.__new__(NumericsConfig)  # the type checker of the tests guards __init__
    for name, value in as_dict(NUMERICS["f32"]).items():
        object.__setattr__(broken, name, value)
    object.__setattr__(broken, "main_kv", "fp4")
    object.__setattr__(broken, "score_dtype", "float64")
    object.__setattr__(broken, "compute_dtype", "float16")
    with pytest.raises(ConfigError, match=r"numerics: 3 problem\(s\)") as error:
        broken.__post_init__()
    assert error.value.problems == (
        "main_kv is 'fp4', must be one of ('off', 'fake', 'exact')",
        "score_dtype is 'float64', must be float32 or bfloat16",
        "compute_dtype is 'float16', must be weights or bfloat16",
    )


def test_as_dict_nests_and_turns_tuples_into_lists():
    out = as_dict(tiny())
    assert out["attention"]["yarn"]["original_max_position"] == 512
    assert out["compress_ratios"] == [0, 2, 2, 2, 1, 1, 1, 1]
    assert out["vision"]["patch_size"] == 14
    assert out["dspark"] is None
