"""Token shards: what goes in comes out, and damage is named."""

import json
import logging

import numpy as np
import pytest

from openv41.errors import DataError
from openv41.train.token_shards import TokenShards, prepare_shards


@pytest.fixture
def shards(text_files, text_tokenizer, tmp_path):
    return prepare_shards(text_files, text_tokenizer, tmp_path / "data", shard_tokens=50)


def edit_index(shards, /, **changes):
    file = shards.folder / "index.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_documents_come_back_byte_for_byte(shards, text_files, text_tokenizer):
    assert [d.source for d in shards.documents] == [file.name for file in text_files]
    for number, file in enumerate(text_files):
        ids = shards.read(*shards.bounds[number : number + 2]).tolist()
        assert (ids[0], ids[-1]) == (0, 1)
        assert ids[1:-1] == text_tokenizer.encode(file.read_bytes().decode())
        assert text_tokenizer.decode_bytes(ids[1:-1]) == file.read_bytes()
        assert shards.documents[number].bytes == file.stat().st_size
    assert shards.num_bytes == sum(file.stat().st_size for file in text_files)


def test_stream_runs_over_many_shard_files(shards):
    sizes = [shard.tokens for shard in shards.index.shards]
    assert len(sizes) > 3
    assert sizes[:-1] == [50] * (len(sizes) - 1)
    files = [np.fromfile(shards.folder / shard.file, "<u2") for shard in shards.index.shards]
    stream = np.concatenate(files)
    for start, stop in [(0, shards.num_tokens), (49, 51), (50, 100), (7, 7), (3, 160)]:
        assert shards.read(start, stop).tolist() == stream[start:stop].tolist()
        assert shards.read(start, stop).dtype == np.int64


def test_large_vocabularies_take_four_bytes(shards, text_files, text_tokenizer, tmp_path):
    text_tokenizer.vocab_size = 65_537
    try:
        wide = prepare_shards(text_files, text_tokenizer, tmp_path / "wide")
    finally:
        text_tokenizer.vocab_size = 290
    assert wide.index.dtype == "uint32"
    (file,) = wide.folder.glob("*.bin")
    stream = np.fromfile(file, "<u4").tolist()
    assert stream == shards.read(0, shards.num_tokens).tolist()


def test_same_input_gives_the_same_files(shards, text_files, text_tokenizer, tmp_path):
    again = prepare_shards(text_files, text_tokenizer, tmp_path / "again", shard_tokens=50)
    first = {path.name: path.read_bytes() for path in shards.folder.iterdir()}
    assert {path.name: path.read_bytes() for path in again.folder.iterdir()} == first
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_text_longer_than_a_piece_is_streamed(text_tokenizer, tmp_path):
    file = tmp_path / "long.txt"
    file.write_bytes(b"The king, the Lords\n" * 20_000)  # several pieces, one batch
    done = []
    found = prepare_shards([file], text_tokenizer, tmp_path / "data", progress=done.append)
    ids = found.read(1, found.num_tokens - 1).tolist()
    assert ids == text_tokenizer.encode(file.read_text())
    assert len(done) > 3
    assert sum(done) == found.num_bytes == file.stat().st_size


def test_empty_files_are_left_out(text_files, text_tokenizer, tmp_path, caplog):
    empty = tmp_path / "empty.txt"
    empty.touch()
    with caplog.at_level(logging.WARNING):
        found = prepare_shards([empty, text_files[2]], text_tokenizer, tmp_path / "data")
    assert f"{empty} is empty and left out" in caplog.text
    assert [(d.source, d.bytes) for d in found.documents] == [("three.txt", 1)]
    with pytest.raises(DataError, match="hold no text; give at least one"):
        prepare_shards([empty], text_tokenizer, tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_bad_text_leaves_the_old_shards_alone(shards, text_tokenizer, tmp_path):
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"good text\n" * 9000 + b"\xff")
    with pytest.raises(DataError, match=r"bad.txt: not UTF-8 text: byte 0xff at offset 90000"):
        prepare_shards([bad], text_tokenizer, shards.folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.txt", "data"]
    assert TokenShards(shards.folder).num_tokens == shards.num_tokens


def test_shards_are_replaced_other_folders_are_not(shards, text_files, text_tokenizer, tmp_path):
    again = prepare_shards(text_files[2:3], text_tokenizer, shards.folder)
    assert (len(again.documents), len(list(again.folder.glob("*.bin")))) == (1, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("precious")
    with pytest.raises(DataError, match="mine exists and holds no token shards"):
        prepare_shards(text_files, text_tokenizer, tmp_path / "mine")
    with pytest.raises(DataError, match=r"no such text file: .*gone.txt"):
        prepare_shards([tmp_path / "gone.txt"], text_tokenizer, tmp_path / "new")


def test_truncated_shard_is_named(shards):
    file = shards.folder / "tokens-00001.bin"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"tokens-00001.bin: 99 bytes, the index says 100"):
        TokenShards(shards.folder)


def test_flipped_bit_is_found(shards):
    file = shards.folder / "tokens-00002.bin"
    data = bytearray(file.read_bytes())
    data[17] ^= 1
    file.write_bytes(data)
    with pytest.raises(DataError, match=r"tokens-00002.bin: the content does not have the hash"):
        TokenShards(shards.folder)


def test_missing_shard_is_named(shards):
    (shards.folder / "tokens-00000.bin").unlink()
    with pytest.raises(DataError, match=r"tokens-00000.bin: cannot read the shard: No such file"):
        TokenShards(shards.folder)


def test_missing_index_says_how_to_make_one(tmp_path):
    with pytest.raises(DataError, match=r"index.json: cannot read .*'openv41 data prepare'"):
        TokenShards(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", "3", "\0"])
def test_index_that_is_none(shards, content):
    (shards.folder / "index.json").write_text(content)
    with pytest.raises(DataError, match=r"index.json: not an index of token shards: "):
        TokenShards(shards.folder)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"version": 2}, "format 'openv41-token-shards' version 2"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"colour": 1}, "unexpected keyword argument 'colour'"),
        ({"documents": []}, "it lists no document"),
        ({"vocab_size": -1}, "a count is no positive integer"),
        ({"documents": [{"source": "a", "tokens": 9, "bytes": 9}]}, "the documents 9"),
        (
            {"shards": [{"file": "../x.bin", "tokens": 9, "sha256": ""}]},
            "a shard lies outside the folder",
        ),
    ],
)
def test_wrong_index_entry_is_named(shards, changes, problem):
    edit_index(shards, **changes)
    with pytest.raises(DataError, match=problem):
        TokenShards(shards.folder)


def test_other_tokenizer_is_refused(shards, text_tokenizer, monkeypatch):
    shards.check_tokenizer(text_tokenizer)
    monkeypatch.setattr(text_tokenizer, "sha256", "0" * 64)
    with pytest.raises(DataError, match=r"prepared with the tokenizer .* has 0000"):
        shards.check_tokenizer(text_tokenizer)
