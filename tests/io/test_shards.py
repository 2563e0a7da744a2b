"""Safetensors files and folders of them: agreement with the library, and every way to be wrong."""

import json
import pickle
import re

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from openv41.errors import CheckpointError, InputError
from openv41.io.atomic import atomic_folder, write_atomic
from openv41.io.shard_index import INDEX_FILE, ShardSet
from openv41.io.shards import DTYPES, ShardReader, ShardWriter


def random_tensor(dtype, *shape):
    raw = torch.randint(0, 2, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8)
    return raw.view(dtype)


@pytest.fixture
def tensors():
    """One tensor per dtype, with odd sizes, and an empty one."""
    out = {f"t.{name}": random_tensor(dtype, 5, 3) for name, dtype in DTYPES.items()}
    return out | {
        "vector": torch.randn(7),
        "cube": torch.randn(2, 3, 4),
        "empty": torch.empty(0, 3),
    }


def same(a, b):
    raw = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*raw)


def test_reads_what_the_library_writes(tmp_path, tensors):
    tensors["scalar"] = torch.tensor(3.5)
    save_file(tensors, tmp_path / "a.safetensors", {"note": "kept apart"})
    reader = ShardReader(tmp_path / "a.safetensors")
    assert reader.entries.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert same(reader.read_rows(name, 0, reader.entries[name].num_rows), tensor)
    assert same(reader.read_rows("t.BF16", 2, 4), tensors["t.BF16"][2:4])


def test_the_library_reads_what_we_write_in_any_order(tmp_path, tensors):
    names = {dtype: name for name, dtype in DTYPES.items()}
    layout = {name: (names[t.dtype], tuple(t.shape)) for name, t in tensors.items()}
    pieces = [(name, i) for name, tensor in tensors.items() for i in range(len(tensor))]
    with ShardWriter(tmp_path / "a.safetensors", layout) as writer:
        for k in torch.randperm(len(pieces)).tolist():
            name, i = pieces[k]
            writer.write_rows(name, i, tensors[name][i : i + 1])
    assert all(same(load_file(tmp_path / "a.safetensors")[n], t) for n, t in tensors.items())
    for name, entry in ShardReader(tmp_path / "a.safetensors").entries.items():
        assert entry.offset % DTYPES[entry.dtype].itemsize == 0, name
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_an_incomplete_file_is_a_bug(tmp_path):
    with (
        pytest.raises(AssertionError, match=r"bytes not written: \{'b': 8\}"),
        ShardWriter(tmp_path / "x", {"a": ("F32", (2,)), "b": ("F32", (2,))}) as writer,
    ):
        writer.write_rows("a", 0, torch.ones(2))


def write_raw(path, header, payload=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + payload)


def item(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("header", "payload", "reason"),
    [
        (b"{nonsense", b"", "bad header: "),
        (b"[1]", b"", "bad header: not a JSON object"),
        (b'{"a":\xff}', b"", "bad header: 'utf-8'"),
        (b'{"a":1,"a":2}', b"", "bad header: 'a' stands in it twice"),
        ({"a": 7}, b"", "a: bad header entry: needs dtype, shape and data_offsets, found 7"),
        ({"a": item("F4")}, bytes(8), "a: bad header entry: unknown dtype 'F4'; known are F64"),
        ({"a": item(shape=(-2,))}, bytes(8), r"a: bad header entry: shape \[-2\]"),
        ({"a": item(shape=(3,))}, bytes(8), r"takes 12 bytes, data_offsets give 8"),
        ({"a": item(offsets=(4, 12))}, bytes(12), "starts at byte .*, the tensor before it ends"),
        ({"a": item(), "b": item(offsets=(4, 12))}, bytes(12), "b: bad header entry: starts at"),
        ({"a": item()}, bytes(7), "truncated: .* bytes, the header describes"),
        ({"a": item()}, bytes(9), "followed by other data"),
    ],
)
def test_bad_files_name_file_tensor_and_reason(tmp_path, header, payload, reason):
    write_raw(tmp_path / "bad.safetensors", header, payload)
    with pytest.raises(CheckpointError, match=r"bad\.safetensors: .*" + reason):
        ShardReader(tmp_path / "bad.safetensors")


@pytest.mark.parametrize("keep", [0, 5, 8, 30, -1])
def test_truncated_at_any_place(tmp_path, keep):
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.ones(100)}, path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"a\.safetensors: truncated"):
        ShardReader(path)


def test_header_longer_than_allowed(tmp_path):
    with (tmp_path / "a").open("wb") as file:
        file.write((200_000_000).to_bytes(8, "little"))
        file.truncate(300_000_000)  # sparse
    with pytest.raises(CheckpointError, match="bad header: 200000000 bytes long"):
        ShardReader(tmp_path / "a")


def test_pickles_are_refused_by_content(tmp_path):
    torch.save({"a": torch.ones(300)}, tmp_path / "zip.safetensors")
    (tmp_path / "plain.safetensors").write_bytes(pickle.dumps({"a": list(range(3000))}))
    for name in ("zip", "plain"):
        with pytest.raises(CheckpointError, match=rf"{name}\.safetensors: this is a pickle file"):
            ShardReader(tmp_path / f"{name}.safetensors")


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(CheckpointError, match="nothing: cannot read: No such file"):
        ShardReader(tmp_path / "nothing")


def test_a_file_that_shrinks_after_its_header_was_read(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.ones(100)}, path)
    reader = ShardReader(path)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="a: the file became shorter"):
        reader.read_rows("a", 0, 100)


@pytest.fixture
def folder(tmp_path):
    """Two files and their index."""
    save_file({"a": torch.ones(2), "b": torch.ones(3)}, tmp_path / "1.safetensors")
    save_file({"c": torch.ones(4)}, tmp_path / "2.safetensors")
    put_index(tmp_path, a="1.safetensors", b="1.safetensors", c="2.safetensors")
    return tmp_path


def put_index(folder, **weight_map):
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_a_sound_folder(folder):
    files = ShardSet(folder)
    assert set(files.file_of) == {"a", "b", "c"}
    assert files["c"].shape == (4,)
    assert files.read_rows("b", 1, 3).tolist() == [1.0, 1.0]


def test_one_file_without_index(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    assert ShardSet(tmp_path).file_of == {"a": "model.safetensors"}


def test_every_contradiction_of_the_index_in_one_error(folder):
    save_file(
        {"c": torch.ones(4), "d": torch.ones(1), "a": torch.ones(2)}, folder / "2.safetensors"
    )
    put_index(folder, a="1.safetensors", b="2.safetensors", c="2.safetensors", e="9.safetensors")
    with pytest.raises(CheckpointError) as caught:
        ShardSet(folder)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{folder}: 5 problem(s)"
    assert {line.removeprefix("  - ") for line in lines[1:]} == {
        "9.safetensors: the index names this file, it does not exist",
        "2.safetensors: b: the index says it is in this file, it is not",
        "1.safetensors: b: in two files, or the index is wrong: it names 2.safetensors",
        "2.safetensors: d: not in the index",
        "2.safetensors: a: in two files, or the index is wrong: it names 1.safetensors",
    }


def test_damaged_files_are_named_together(folder):
    for name in ("1.safetensors", "2.safetensors"):
        (folder / name).write_bytes((folder / name).read_bytes()[:-1])
    with pytest.raises(
        CheckpointError,
        match=r"2 problem(?s:.*)1\.safetensors: truncated(?s:.*)"
        r"2\.safetensors: truncated",
    ):
        ShardSet(folder)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "bad index: JSONDecodeError"),
        ("[]", "bad index: TypeError"),
        ("[" * 100_000, "bad index: RecursionError"),
        ("{}", "bad index: KeyError"),
        ('{"weight_map": {}}', "weight_map must name at least one tensor"),
        (
            '{"weight_map": {"a": "../x.safetensors"}}',
            "a: bad index: '../x.safetensors' is no file",
        ),
        ('{"weight_map": {"a": 3}}', "a: bad index: 3 is no file name"),
        (
            '{"metadata": [7], "weight_map": {"a": "x.safetensors"}}',
            "bad index: metadata is a list, must be an object",
        ),
    ],
)
def test_bad_index(folder, content, reason):
    (folder / INDEX_FILE).write_text(content)
    with pytest.raises(CheckpointError, match=reason):
        ShardSet(folder)


def test_no_checkpoint_at_all(tmp_path):
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors\.index\.json nor"):
        ShardSet(tmp_path)
    with pytest.raises(CheckpointError, match="there is no such folder"):
        ShardSet(tmp_path / "nowhere")
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    with pytest.raises(CheckpointError, match=r"only pickle files \(pytorch_model\.bin\)"):
        ShardSet(tmp_path)


def test_a_folder_is_no_file_to_write(tmp_path):
    with pytest.raises(InputError, match=re.escape(f"{tmp_path} is a folder; name a file")):
        write_atomic(tmp_path, b"")


def content(folder):
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_atomic_folder_appears_whole_and_replaces(tmp_path):
    target = tmp_path / "deep" / "target"
    for text in ("one", "two"):
        with atomic_folder(target) as partial:
            (partial / text).write_text(text)
        assert content(target) == {text: text}
    assert [path.name for path in target.parent.iterdir()] == ["target"]


def write_and_fail(target, error):
    with atomic_folder(target) as partial:
        (partial / "new").write_text("new")
        raise error


def test_atomic_folder_keeps_the_old_one_on_failure(tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    (target / "old").write_text("old")
    with pytest.raises(KeyboardInterrupt):
        write_and_fail(target, KeyboardInterrupt)
    assert content(target) == {"old": "old"}
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_atomic_folder_puts_back_what_a_dead_process_set_aside(tmp_path):
    for name in (".target.old", ".target.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a").write_text(name)
    with pytest.raises(RuntimeError, match="again"):
        write_and_fail(tmp_path / "target", RuntimeError("again"))
    assert content(tmp_path / "target") == {"a": ".target.old"}
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
