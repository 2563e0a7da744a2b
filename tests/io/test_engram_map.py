"""Token map of the n-gram memory: the rule, the released map, the copy kept with a checkpoint."""

import json
import logging

import pytest
import torch
from tokenizers import Tokenizer, decoders, models

from openv41.errors import DataError
from openv41.io import engram_map
from openv41.io.engram_map import CACHE_FILE, token_map_for
from openv41.io.token_classes import compress_vocabulary, map_sha256
from openv41.presets import tiny, with_vocabulary


def tokenizer_of(*tokens):
    """Word-level tokenizer with these tokens, ids ascending."""
    return Tokenizer(models.WordLevel({t: i for i, t in enumerate(tokens)}, unk_token=tokens[0]))


def config_for(num_tokens, num_classes):
    return with_vocabulary(tiny(), vocab_size=num_tokens, compressed_vocab_size=num_classes)


@pytest.fixture
def checkpoint(tmp_path):
    tokenizer_of("<bos>", "<eos>", "<pad>", "a", "A", "b").save(str(tmp_path / "tokenizer.json"))
    return tmp_path


CHECKPOINT_MAP = [0, 1, 2, 3, 3, 4]


@pytest.mark.parametrize(
    ("tokens", "classes"),
    [
        (["the", "The", "THE", " the", "the\n", "then"], [0, 0, 0, 0, 0, 1]),
        (["e", "\u00e9", "e\u0301", "\u00c9", "\u0301"], [0, 0, 0, 0, 1]),  # accents; one alone
        (["fi", "\ufb01", "1", "\u00b9", "\uff11"], [0, 0, 1, 1, 1]),  # compatibility forms
        ([" ", "\n", "\t \r\n", "  ", ""], [0, 0, 0, 0, 1]),  # blanks fold into one, not to nothing
        (["a b", "a\n\nb", "a \t b", "ab", "a\u000bb"], [0, 0, 0, 1, 2]),  # not every white space
        (["x", "y", "X", "z", "Y"], [0, 1, 0, 2, 1]),  # numbered as they appear
    ],
)
def test_rule(tokens, classes):
    assert compress_vocabulary(tokenizer_of(*tokens)) == classes


def test_byte_fragments_stay_apart_by_their_raw_string():
    tokens = ["\u00c3", "\u00e3", "\u0120\u00c3", "\u00c3\u00a9", "e"]  # C3, E3, 20 C3, C3 A9 = e'
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    assert compress_vocabulary(tokenizer) == [0, 1, 2, 3, 3]


@pytest.mark.golden
@pytest.mark.parametrize("name", ["A", "B"])
def test_golden_maps(golden_dir, name):
    expected = json.loads((golden_dir / name / "engram_tables.json").read_text())
    file = golden_dir / name / "checkpoint" / "tokenizer.json"
    found = compress_vocabulary(Tokenizer.from_file(str(file)))
    assert found == expected["token_map"]
    assert len(set(found)) == expected["compressed_vocab_size"]


@pytest.mark.slow
def test_released_map(released_tokenizer):
    found = compress_vocabulary(released_tokenizer.backend)
    assert (len(found), len(set(found))) == (129280, 99092)
    assert found[:3] == [0, 1, 2]
    assert found[129264] == 99076
    assert found[released_tokenizer.special_id("<\uff5cUser\uff5c>")] == 98615
    assert found[released_tokenizer.special_id("<\uff5cSystem\uff5c>")] == 98611
    words = [released_tokenizer.encode(text) for text in (" the", "the", "The", "THE")]
    assert [[found[i] for i in ids] for ids in words] == [[237]] * 4
    assert map_sha256(found) == engram_map.RELEASED_MAP_SHA256


def test_map_is_kept_with_the_checkpoint_and_read_back(checkpoint, monkeypatch):
    config = config_for(6, 5)
    first = token_map_for(checkpoint, config)
    assert first.dtype == torch.int64
    assert first.tolist() == CHECKPOINT_MAP
    assert sorted(p.name for p in checkpoint.iterdir()) == [CACHE_FILE, "tokenizer.json"]
    monkeypatch.setattr(engram_map, "compress_vocabulary", lambda _: pytest.fail("made anew"))
    assert token_map_for(checkpoint, config).tolist() == CHECKPOINT_MAP


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: text.replace('"token_map": [0', '"token_map": [1'),
        lambda text: text.replace('"token_map": [0', '"token_map": [99999999999'),
        lambda text: text.replace('"token_map"', '"map"'),
        lambda _: "[]",
        lambda _: "\0\xff",
    ],
)
def test_damaged_copy_is_made_anew(checkpoint, damage, caplog):
    config = config_for(6, 5)
    token_map_for(checkpoint, config)
    file = checkpoint / CACHE_FILE
    good = file.read_bytes()
    file.write_text(damage(good.decode()))
    with caplog.at_level(logging.WARNING):
        assert token_map_for(checkpoint, config).tolist() == CHECKPOINT_MAP
    assert f"{file}: it " in caplog.text
    assert file.read_bytes() == good


def test_copy_of_another_tokenizer_is_not_used(checkpoint):
    token_map_for(checkpoint, config_for(6, 5))
    tokenizer_of("<bos>", "<eos>", "<pad>", "b", "A", "a").save(str(checkpoint / "tokenizer.json"))
    assert token_map_for(checkpoint, config_for(6, 5)).tolist() == [0, 1, 2, 3, 4, 4]


def test_folder_that_cannot_be_written(checkpoint, monkeypatch):
    def refuse(path, data):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(engram_map, "write_atomic", refuse)
    assert token_map_for(checkpoint, config_for(6, 5)).tolist() == CHECKPOINT_MAP
    assert [p.name for p in checkpoint.iterdir()] == ["tokenizer.json"]


def test_wrong_tokenizer_for_the_model(checkpoint):
    with pytest.raises(DataError, match="6 tokens, the configuration has vocab_size 7"):
        token_map_for(checkpoint, config_for(7, 5))
    with pytest.raises(DataError, match=r"5 classes of tokens, .*compressed_vocab_size 6"):
        token_map_for(checkpoint, config_for(6, 6))


def test_no_tokenizer(tmp_path):
    with pytest.raises(DataError, match=r"tokenizer.json: cannot read the tokenizer: No such"):
        token_map_for(tmp_path, config_for(6, 5))


def test_library_with_other_unicode_tables_is_an_error(checkpoint, monkeypatch):
    token_map_for(checkpoint, config_for(6, 5))
    stored = json.loads((checkpoint / CACHE_FILE).read_text())
    monkeypatch.setattr(engram_map, "RELEASED_TOKENIZER_SHA256", stored["tokenizer_sha256"])
    with pytest.raises(DataError, match=r"gives 5 classes, the released model has 99092"):
        token_map_for(checkpoint, config_for(6, 5))
