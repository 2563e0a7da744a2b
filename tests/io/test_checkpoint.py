"""Checkpoints: exact weights, round trips, every damage, and writing that cannot break."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from openv41.config import NUMERICS
from openv41.errors import CheckpointError, ConfigError, InputError
from openv41.io.checkpoint import convert, load_checkpoint, load_model, save_checkpoint, save_model
from openv41.io.shard_index import INDEX_FILE
from openv41.io.tensor_names import tensor_table
from openv41.layers.batch import Batch
from openv41.model.causal_encoder_decoder import CausalEncoderDecoder
from openv41.model.init import init_weights
from tests.io import checkpoint_tools as tools
from tests.oracles import formats

pytestmark = pytest.mark.unchecked

REPOSITORY = Path(__file__).parents[2]
sets = pytest.mark.parametrize("letter", ["A", "B"])


@pytest.fixture
def golden(golden_dir, tmp_path):
    return lambda letter: tools.copy_golden(golden_dir, letter, tmp_path / "golden")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A small released checkpoint; tests that change it take a copy."""
    folder = tmp_path_factory.mktemp("small") / "checkpoint"
    tools.write_random(tools.small_config(), folder)
    return folder


@pytest.fixture
def broken(small, tmp_path):
    return Path(shutil.copytree(small, tmp_path / "broken"))


def state_bytes(model):
    return {name: tools.raw(tensor) for name, tensor in model.state_dict().items()}


def assert_same_state(a, b):
    a, b = state_bytes(a), state_bytes(b)
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


@pytest.mark.golden
@sets
def test_every_weight_has_the_value_that_a_table_decoder_gives(golden, letter):
    folder = golden(letter)
    model = load_model(folder, dtype=torch.float32)
    want, _ = formats.read_checkpoint(folder)
    found = tools.read_tensors(folder).items()
    stored = {n: t.double().numpy() for n, t in found if t.dtype == torch.bfloat16}  # images
    state, seen = model.state_dict(), set()
    for spec in tensor_table(model.config, variant="float32"):
        value = state[spec.ours] if spec.expert is None else state[spec.ours][spec.expert]
        expected = want[spec.released] if spec.released in want else stored[spec.released]
        assert np.array_equal(value.double().numpy(), expected), spec.released
        seen.add(spec.ours)
    assert seen == set(state)


@pytest.mark.golden
def test_stored_codes_give_the_same_logits_as_dequantised_weights(golden):
    folder = golden("B")
    batch = Batch.from_documents([list(range(60, 120))])
    logits = []
    for dtype in ("stored", torch.bfloat16):
        model = load_model(folder, dtype=dtype)
        with torch.no_grad():
            logits.append(model.logits(model(batch).hidden))
    assert torch.equal(*logits)


@pytest.mark.golden
def test_the_two_routing_biases_are_not_mixed_up(golden):
    folder = golden("A")
    tensors = tools.read_tensors(folder)
    gate = load_model(folder).layers[3].moe.gate
    assert torch.equal(gate.bias, tensors["layers.3.ffn.gate.bias"])
    assert torch.equal(gate.bias_vl, tensors["layers.3.ffn.gate.bias_vl"])
    assert not torch.equal(gate.bias, gate.bias_vl)
    assert not gate.bias.requires_grad


@pytest.mark.golden
def test_islands_are_float32_and_codes_survive_a_cast(golden):
    model = load_model(golden("A"), dtype="stored")
    before = state_bytes(model)
    kept = {".fn", ".base", ".scale", ".sink", ".bias", ".bias_vl"}
    model.to(torch.bfloat16)
    for name, tensor in model.state_dict().items():
        leaf = "" if name.startswith("vision.") else f".{name.rpartition('.')[2]}"
        if leaf in {".codes", ".scales"}:
            assert tensor.dtype in {torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu}
        else:
            assert tensor.dtype == (torch.float32 if leaf in kept else torch.bfloat16), name
    assert before.keys() == state_bytes(model).keys()
    assert all(torch.equal(before[name], raw) for name, raw in state_bytes(model).items())


@pytest.mark.golden
def test_the_token_map_comes_from_the_tokenizer(golden, golden_dir):
    folder = golden("A")
    want = json.loads((golden_dir / "A" / "engram_tables.json").read_text())
    token_map = load_model(folder).token_map.tolist()
    assert token_map in want.values()
    (folder / "tokenizer.json").unlink()
    model = load_model(folder)
    with pytest.raises(InputError, match="no token map"):
        model(Batch.from_documents([[5, 6]]))


def test_placement_of_tensors_in_files_does_not_matter(small, broken):
    tensors = tools.read_tensors(broken)
    for file in broken.glob("*.safetensors"):
        file.unlink()
    names = sorted(tensors)
    order = torch.randperm(len(names)).tolist()
    files = {f"part-{k}.safetensors": [names[i] for i in order[k::3]] for k in range(3)}
    for file, members in files.items():
        save_file({name: tensors[name] for name in members}, broken / file)
    weight_map = {name: file for file, members in files.items() for name in members}
    (broken / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    assert_same_state(load_model(small), load_model(broken))


@pytest.mark.golden
@sets
def test_round_trip_is_identical_after_the_source_is_gone(golden, letter, tmp_path):
    folder = golden(letter)
    kept = Path(shutil.copytree(folder, tmp_path / "kept"))
    checkpoint = load_checkpoint(folder)
    shutil.rmtree(folder)
    save_checkpoint(checkpoint, folder)
    tools.assert_same_tensors(kept, folder)
    assert (folder / "tokenizer.json").read_bytes() == (kept / "tokenizer.json").read_bytes()
    again = load_checkpoint(folder)
    assert again.model.config == checkpoint.model.config
    vision = dict(again.model.vision.named_parameters())
    assert len(vision) > 20
    assert {p.dtype for p in vision.values()} == {torch.bfloat16}
    assert len(again.model.drafter.state_dict()) > 50


@pytest.mark.golden
@pytest.mark.parametrize(("letter", "variant"), [("A", "float32"), ("B", "bfloat16")])
def test_plain_and_back_keeps_every_value(golden, letter, variant, tmp_path):
    folder = golden(letter)
    convert(folder, tmp_path / "plain", variant=variant)
    convert(tmp_path / "plain", tmp_path / "back", variant="released")
    want, _ = formats.read_checkpoint(folder)
    for name in ("plain", "back"):
        got, _ = formats.read_checkpoint(tmp_path / name)
        assert got.keys() == want.keys()
        assert [key for key in want if not np.array_equal(got[key], want[key])] == []
    plain = tools.read_tensors(tmp_path / "plain")
    assert not any(name.endswith(".scale") for name in plain)
    allowed = {torch.float32} if variant == "float32" else {torch.float32, torch.bfloat16}
    assert {tensor.dtype for tensor in plain.values()} == allowed
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == variant
    assert_same_state(
        load_model(folder, dtype=torch.float32), load_model(tmp_path / "plain", dtype=torch.float32)
    )


@pytest.mark.shapes
@pytest.mark.golden
def test_saving_equals_converting(golden, tmp_path):
    folder = golden("B")
    save_checkpoint(load_checkpoint(folder), tmp_path / "saved", variant="bfloat16")
    convert(folder, tmp_path / "converted", variant="bfloat16")
    tools.assert_same_tensors(tmp_path / "saved", tmp_path / "converted")


@pytest.fixture
def trained():
    """A float32 model with weights that no format holds exactly."""
    model = CausalEncoderDecoder(tools.small_config())
    init_weights(model, seed=1)
    return model


def test_float_weights_are_quantised_on_export_within_half_a_step(trained, tmp_path):
    save_model(trained, tmp_path / "out")
    loaded = load_model(tmp_path / "out", dtype=torch.float32).state_dict()
    step = {torch.uint8: 2**-2, torch.float8_e4m3fn: 2**-4}
    stored = load_model(tmp_path / "out").state_dict()
    for name, value in trained.state_dict().items():
        codes = stored.get(name.removesuffix("weight") + "codes")
        if codes is not None:
            block = value.abs().amax()
            error = (loaded[name] - value).abs()
            assert (error <= step[codes.dtype] * value.abs() + block * 2**-2).all(), name
            assert error.mean() < step[codes.dtype] * block
            assert error.max() > 0
        else:
            torch.testing.assert_close(loaded[name], value, rtol=2**-8, atol=0)


def test_a_model_saved_in_float32_comes_back_bit_for_bit(trained, tmp_path):
    save_model(trained, tmp_path / "out", variant="float32", companions={"tokenizer.json": b"{}"})
    assert_same_state(load_model_without_map(tmp_path / "out"), trained)


def load_model_without_map(folder):
    (folder / "tokenizer.json").unlink()
    return load_model(folder, numerics=NUMERICS["f32"], dtype="stored")


def test_the_index_counts_the_payload_and_names_every_file(small):
    index = json.loads((small / INDEX_FILE).read_text())
    tensors = tools.read_tensors(small)
    assert index["metadata"]["total_size"] == sum(len(tools.raw(t)) for t in tensors.values())
    files = sorted(small.glob("*.safetensors"))
    # image part, embedding, layers, head and norm, n-gram memories
    assert len(files) == 1 + 1 + 8 + 1 + 2
    assert index["weight_map"].keys() == tensors.keys()
    assert set(index["weight_map"].values()) == {file.name for file in files}
    for file in files:
        assert all(index["weight_map"][name] == file.name for name in load_file(file))


def change(folder, name, new):
    """Replace one tensor of a file (None deletes it), keeping the index right."""
    index = json.loads((folder / INDEX_FILE).read_text())
    file = folder / index["weight_map"][name]
    tensors = load_file(file)
    tensors[name] = new(tensors[name]) if new else None
    if tensors[name] is None:
        del tensors[name], index["weight_map"][name]
    save_file(tensors, file)
    (folder / INDEX_FILE).write_text(json.dumps(index))
    return file.name


def test_missing_extra_misshaped_and_mistyped_in_one_error(broken):
    change(broken, "layers.2.attn.wkv.scale", None)
    shape = change(broken, "layers.4.ffn_norm.weight", lambda t: t[:5].clone())
    dtype = change(broken, "head.weight", lambda t: t.float())
    both = change(broken, "layers.1.ffn.experts.2.w1.weight", lambda t: t[:3].to(torch.int32))
    save_file({"layers.9.surprise": torch.ones(2)}, broken / "x.safetensors")
    index = json.loads((broken / INDEX_FILE).read_text())
    index["weight_map"]["layers.9.surprise"] = "x.safetensors"
    (broken / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(CheckpointError) as caught:
        load_model(broken)
    lines = {line.removeprefix("  - ") for line in str(caught.value).splitlines()[1:]}
    assert lines == {
        "layers.2.attn.wkv.scale: missing; must be F8_E8M0 [1, 2]",
        f"{shape}: layers.4.ffn_norm.weight: shape [5], must be [64]",
        f"{dtype}: head.weight: dtype F32, must be BF16",
        f"{both}: layers.1.ffn.experts.2.w1.weight: dtype I32, must be I8",
        f"{both}: layers.1.ffn.experts.2.w1.weight: shape [3, 32], must be [64, 32]",
        "x.safetensors: layers.9.surprise: the model has no such tensor",
    }


@pytest.mark.golden
def test_tensors_of_a_part_that_is_left_out_are_checked_too(golden):
    folder, name = golden("A"), "mtp.1.attn.wkv.weight"
    change(folder, name, lambda t: t[..., :1].contiguous())
    with pytest.raises(CheckpointError, match=rf"{name}: shape .*, must be"):
        load_model(folder, drafter=False)


def put_byte(byte, row, column):
    def new(tensor):
        tensor.view(torch.uint8)[row, column] = byte
        return tensor

    return new


@pytest.mark.parametrize("dtype", ["stored", torch.float32])
@pytest.mark.parametrize(
    ("name", "byte", "place"),
    [
        ("layers.0.attn.wq_a.scale", 255, (0, 1)),
        ("layers.3.ffn.experts.1.w2.scale", 255, (17, 0)),
        ("layers.1.engram.embed.scale", 255, (80, 1)),
        ("layers.5.attn.wo_b.weight", 0x7F, (33, 2)),
        ("layers.2.engram.embed.weight", 0xFF, (100, 47)),
    ],
)
def test_nan_bytes(broken, dtype, name, byte, place):
    file = change(broken, name, put_byte(byte, *place))
    reason = f"{file}: {name}: NaN at row {place[0]}, column {place[1]}; the file is damaged"
    with pytest.raises(CheckpointError, match=reason):
        load_model(broken, dtype=dtype)


def test_nan_bytes_stop_a_conversion_and_leave_nothing(broken, tmp_path):
    change(broken, "layers.0.attn.wq_a.scale", put_byte(255, 0, 0))
    with pytest.raises(CheckpointError, match="NaN at row 0"):
        convert(broken, tmp_path / "out", variant="released")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken"]


def test_values_beyond_float32(broken):
    change(broken, "layers.0.attn.wq_a.scale", put_byte(254, 0, 0))
    load_model(broken)
    with pytest.raises(CheckpointError, match=r"wq_a\.weight: values beyond the range of torch\.f"):
        load_model(broken, dtype=torch.float32)


def test_truncated_shard(broken):
    file = sorted(broken.glob("*.safetensors"))[4]
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=rf"{file.name}: truncated"):
        load_model(broken)


def test_config_that_says_plain_beside_released_files(broken):
    config = json.loads((broken / "config.json").read_text())
    del config["quantization_config"]
    (broken / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"wq_a\.weight: dtype F8_E4M3, must be BF16"):
        load_model(broken)


def test_no_config(broken):
    (broken / "config.json").unlink()
    with pytest.raises((CheckpointError, ConfigError), match=r"config\.json"):
        load_model(broken)


def test_weights_that_cannot_be_quantised_leave_the_old_checkpoint(trained, small, tmp_path):
    target = Path(shutil.copytree(small, tmp_path / "target"))
    trained.layers[3].moe.experts.w1.weight.data[2, 1, 1] = float("inf")
    with pytest.raises(CheckpointError, match=r"experts\.2\.w1\.weight: holds NaN or infinity"):
        save_model(trained, target)
    tools.assert_same_tensors(target, small)
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_an_older_checkpoint_is_replaced(trained, small, tmp_path):
    target = Path(shutil.copytree(small, tmp_path / "target"))
    save_model(trained, target, variant="float32")
    assert_same_state(load_model(target), trained)
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


@pytest.mark.parametrize("name", ["notes.txt", "optimizer.pt", "folder/x"])
def test_nothing_but_a_checkpoint_is_replaced(trained, small, tmp_path, name):
    target = Path(shutil.copytree(small, tmp_path / "target"))
    (target / name).parent.mkdir(exist_ok=True)
    (target / name).write_text("precious")
    with pytest.raises(CheckpointError, match=rf"no part of a checkpoint \({name.split('/')[0]}\)"):
        save_model(trained, target)
    assert (target / name).read_text() == "precious"


def test_a_folder_with_weights_of_something_else_or_a_file_is_refused(trained, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="would be lost"):
        save_model(trained, tmp_path)
    with pytest.raises(CheckpointError, match="is a file; name a folder"):
        save_model(trained, tmp_path / "model.safetensors")


def test_an_empty_folder_is_fine(trained, tmp_path):
    save_model(trained, tmp_path)
    assert (tmp_path / INDEX_FILE).exists()


@pytest.mark.golden
def test_without_the_drafter_the_model_and_what_it_saves_have_none(golden, tmp_path):
    folder = golden("A")
    model = load_model(folder, drafter=False)
    assert model.drafter is None
    assert model.config.dspark is None
    assert load_model(folder).drafter is not None
    save_model(model, tmp_path / "out")
    names = set(tools.read_tensors(tmp_path / "out"))
    assert names == {n for n in tools.read_tensors(folder) if not n.startswith("mtp.")}
    assert load_model(tmp_path / "out").config == model.config


def test_same_source_and_destination(small):
    with pytest.raises(CheckpointError, match="source and destination are the same"):
        convert(small, small / ".." / small.name, variant="float32")


def test_a_disk_error_is_one_message(trained, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("openv41.io.shards.os.fsync", full)
    with pytest.raises(CheckpointError, match="out: cannot write: No space left on device"):
        save_model(trained, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


WRITER = """
import sys
from pathlib import Path
from tests.io import checkpoint_tools as tools
config, folder = tools.small_config(), Path(sys.argv[1])
print("ready", flush=True)
while True:
    tools.write_random(config, folder)
"""


def kill_writers(folder, seconds):
    """Start a process that rewrites the folder for ever, and kill it; returns what it left."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, folder], cwd=REPOSITORY, stdout=subprocess.PIPE
    )
    with process:
        process.stdout.readline()
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
    return folder.exists()


@pytest.mark.slow
def test_kill_while_saving_leaves_a_whole_checkpoint_or_none(small, tmp_path):
    for seconds in (0.05, 0.4):
        if kill_writers(tmp_path / "out", seconds):
            assert_same_state(load_model(tmp_path / "out"), load_model(small))


@pytest.mark.prove
def test_repeated_kills_while_saving(small, tmp_path, record_proof):
    want, absent, rounds = load_model(small), 0, 60
    for seconds in torch.rand(rounds).tolist():
        if kill_writers(tmp_path / "out", seconds):
            assert_same_state(load_model(tmp_path / "out"), want)
        else:
            absent += 1
    record_proof(kills=rounds, absent=absent, broken=0)
