"""Constants of the n-gram hash, report §2.4.2, against the published tables."""

import json

import pytest

from openv41.config import EngramConfig
from openv41.ngram_hash_constants import hash_constants, hash_primes, num_embeddings


def load(path):
    return json.loads(path.read_text(encoding="utf-8"))


def lists(constants, name):
    return [[list(row) for row in getattr(one, name)] for one in constants]


def test_released_tables_equal_the_published_ones(golden_dir):
    want = load(golden_dir / "ops" / "released_engram_tables.json")
    got = hash_constants(EngramConfig(layer_ids=(1, 14), num_embeddings=(384006168, 384016682)))
    assert lists(got, "primes") == want["primes"]
    assert [c.num_rows for c in got] == want["rows"] == [384006168, 384016682]
    assert [[str(m) for m in c.multipliers] for c in got] == want["multipliers"]
    assert [c.layer for c in got] == want["layer_ids"]


@pytest.mark.parametrize("name", ["A", "B"])
def test_golden_tables_follow_from_the_config(golden_dir, name):
    want = load(golden_dir / name / "engram_tables.json")
    text = load(golden_dir / name / "checkpoint" / "config.json")["text_config"]
    got = hash_constants(
        EngramConfig(
            layer_ids=tuple(text["engram_layer_ids"]),
            num_embeddings=tuple(text["engram_num_embeddings"]),
            max_ngram=text["engram_max_ngram_size"],
            table_size=text["engram_vocab_size"],
            num_heads=text["engram_n_heads"],
            head_dim=text["engram_head_dim"],
            compressed_vocab_size=text["engram_compressed_vocab_size"],
        )
    )
    assert lists(got, "primes") == want["primes"]
    assert [c.num_rows for c in got] == want["num_embeddings"]
    assert [[o for order in c.offsets for o in order] for c in got] == want["offsets"]
    assert [[str(m) for m in c.multipliers] for c in got] == want["multipliers"]


def test_primes_are_distinct_and_start_at_the_table_size():
    primes = [p for layer in hash_primes(2, 3, 2, 11) for order in layer for p in order]
    assert primes == [11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53]
    assert num_embeddings(2, 3, 2, 11) == (sum(primes[:6]), sum(primes[6:]))


def test_a_compressed_id_times_a_multiplier_never_overflows():
    for vocab in (1, 2, 207, 99092):
        engram = EngramConfig(
            layer_ids=(3,), num_embeddings=(1,), table_size=50, compressed_vocab_size=vocab
        )
        (constants,) = hash_constants(engram)
        assert len(constants.multipliers) == 4
        assert all(m % 2 for m in constants.multipliers)
        assert max(constants.multipliers) * (vocab - 1) < 2**63
