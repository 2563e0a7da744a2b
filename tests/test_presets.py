"""Ready-made sizes."""

from dataclasses import replace

import pytest

from openv41.errors import ConfigError
from openv41.ngram_hash_constants import hash_constants
from openv41.presets import PRESETS, bench30m, preset, released, small, thin, tiny, with_vocabulary


def test_an_unknown_name_lists_the_presets():
    text = r"there is no preset 'tinny'; choose one of tiny, bench30m, thin, small, released"
    with pytest.raises(ConfigError, match=text):
        preset("tinny")


@pytest.mark.parametrize("name", PRESETS)
def test_table_rows_follow_from_the_hash_constants(name):
    engram = preset(name).engram
    assert tuple(c.num_rows for c in hash_constants(engram)) == engram.num_embeddings


def test_tiny_is_the_demo_size():
    config = tiny()
    assert (config.hidden_size, config.num_layers, config.vocab_size) == (64, 8, 1024)
    assert config.attention.window_size == 32
    assert {config.compress_ratios[s] for s in config.kv_sources} == {1, 2}
    assert config.compress_ratios[config.indexer.candidate_source] == 1
    assert max(config.engram.layer_ids) < config.num_layers // 2


def test_thin_keeps_the_released_schedule():
    for name in ("num_layers", "compress_ratios", "kv_sources", "index_sources"):
        assert getattr(thin(), name) == getattr(released(), name)
    assert thin().engram.layer_ids == (1, 14)
    assert thin().indexer.candidate_source == 20
    assert thin().hidden_size < 256


def test_small_keeps_the_released_widths_that_kernels_see():
    attention, indexer = small().attention, small().indexer
    assert (attention.head_dim, attention.rope_dim) == (512, 64)
    assert (indexer.num_heads, indexer.head_dim) == (32, 128)
    assert (small().hidden_size, small().num_layers) == (1024, 16)
    assert (small().moe.num_experts, small().moe.top_k) == (64, 6)


def test_a_tokenizer_brings_its_own_sizes():
    config = with_vocabulary(bench30m(), vocab_size=2000, compressed_vocab_size=1500)
    assert (config.vocab_size, config.engram.compressed_vocab_size) == (2000, 1500)
    assert config.engram.num_embeddings == bench30m().engram.num_embeddings
    back = with_vocabulary(config, vocab_size=4096, compressed_vocab_size=4096)
    assert back == bench30m()
    without = with_vocabulary(replace(tiny(), engram=None), vocab_size=9, compressed_vocab_size=5)
    assert (without.vocab_size, without.engram) == (9, None)


def test_a_map_with_more_classes_than_tokens_is_refused():
    with pytest.raises(ConfigError, match=r"is 900, must be at most vocab_size \(800\)"):
        with_vocabulary(tiny(), vocab_size=800, compressed_vocab_size=900)
