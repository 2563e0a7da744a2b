"""The drafter at its released shape, all 2,401 tensors of it, loaded and saved on the meta device.

The files are as large as the released ones and hold nothing; rows of them have dtype and shape.
"""

import json
from dataclasses import replace

import pytest
import torch

from openv41.errors import CheckpointError
from openv41.io import checkpoint_writer, weight_rows
from openv41.io.checkpoint import load_model, save_model
from openv41.io.hf_config import write_config
from openv41.io.shard_index import write_index
from openv41.io.shards import DTYPES, ShardReader
from openv41.io.tensor_names import shard_name, tensor_table
from openv41.presets import released

pytestmark = pytest.mark.unchecked

BYTES = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1}
TILED = {  # FP8 with a scale for each 32 x 32
    "attn.wq_a": (1280, 5120),
    "attn.wq_b": (32768, 1280),
    "attn.wkv": (512, 5120),
    "attn.wo_a": (8192, 4096),
    "attn.wo_b": (5120, 8192),
    "ffn.shared_experts.w1": (2304, 5120),
    "ffn.shared_experts.w2": (5120, 2304),
    "ffn.shared_experts.w3": (2304, 5120),
}
PLAIN = {
    **{f"hc_{site}_fn": ("F32", (24, 20480)) for site in ("attn", "ffn")},
    **{f"hc_{site}_base": ("F32", (24,)) for site in ("attn", "ffn")},
    **{f"hc_{site}_scale": ("F32", (3,)) for site in ("attn", "ffn")},
    **{f"{site}_norm.weight": ("BF16", (5120,)) for site in ("attn", "ffn")},
    "attn.attn_sink": ("F32", (64,)),
    "attn.q_norm.weight": ("BF16", (1280,)),
    "attn.kv_norm.weight": ("BF16", (512,)),
    "ffn.gate.weight": ("BF16", (128, 5120)),
    "ffn.gate.bias": ("F32", (128,)),
    "ffn.gate.bias_vl": ("F32", (128,)),
}
EXPERT = {  # two FP4 values to a byte, a scale for 32 of them
    "w1.weight": ("I8", (2304, 2560)),
    "w1.scale": ("F8_E8M0", (2304, 160)),
    "w2.weight": ("I8", (5120, 1152)),
    "w2.scale": ("F8_E8M0", (5120, 72)),
    "w3.weight": ("I8", (2304, 2560)),
    "w3.scale": ("F8_E8M0", (2304, 160)),
}
ENDS = {
    "mtp.0.main_proj.weight": ("F8_E4M3", (5120, 15360)),
    "mtp.0.main_proj.scale": ("F8_E8M0", (160, 480)),
    "mtp.0.main_norm.weight": ("BF16", (5120,)),
    "mtp.2.norm.weight": ("BF16", (5120,)),
    "mtp.2.markov_head.embed.weight": ("BF16", (129280, 256)),
    "mtp.2.markov_head.head.weight": ("BF16", (129280, 256)),
    "mtp.2.confidence_head.proj.weight": ("BF16", (1, 5376)),
}


def drafter_tensors():
    """Names, dtypes and shapes as released, written down without the package's table."""
    found = dict(ENDS)
    for stage in range(3):
        found |= {f"mtp.{stage}.{name}": value for name, value in PLAIN.items()}
        for name, (rows, cols) in TILED.items():
            found[f"mtp.{stage}.{name}.weight"] = "F8_E4M3", (rows, cols)
            found[f"mtp.{stage}.{name}.scale"] = "F8_E8M0", (rows // 32, cols // 32)
        for expert in range(128):
            base = f"mtp.{stage}.ffn.experts.{expert}"
            found |= {f"{base}.{name}": value for name, value in EXPERT.items()}
    return found


def small_backbone():
    """The released model with a fraction of its backbone's experts, and no tables or eyes."""
    model = released()
    moe = replace(model.moe, num_experts=8)
    return replace(model, moe=moe, engram=None, vision=None)


def write_hollow(folder, tensors):
    """A checkpoint of one file whose rows are a hole."""
    header, offset = {}, 0
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: -BYTES[item[1][0]]):
        size = BYTES[dtype] * torch.Size(shape).numel()
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    data = json.dumps(header).encode()
    data += b" " * (-len(data) % 8)
    file = shard_name(1, 1)
    folder.mkdir()
    with (folder / file).open("wb") as out:
        out.write(len(data).to_bytes(8, "little") + data)
        out.truncate(8 + len(data) + offset)
    write_index(folder, dict.fromkeys(tensors, file), offset)
    write_config(small_backbone(), folder, quantized=True, dtype="bfloat16")
    return folder


@pytest.fixture(scope="module")
def tensors():
    """Those of the drafter as released, and of the backbone as the table has them."""
    table = tensor_table(replace(small_backbone(), dspark=None))
    return {spec.released: (spec.dtype, spec.shape) for spec in table} | drafter_tensors()


@pytest.fixture
def hollow(monkeypatch):
    """Let rows of files have no bytes, and all rows of a weight come at once."""

    def rows(reader, name, start, stop):
        entry = reader.entries[name]
        shape = (stop - start, *entry.shape[1:])
        return torch.empty(shape, dtype=DTYPES[entry.dtype], device="meta")

    monkeypatch.setattr(ShardReader, "read_rows", rows)
    monkeypatch.setattr(weight_rows.FileSource, "_refuse_nan", lambda *_: None)
    monkeypatch.setattr(weight_rows, "CHUNK_ELEMENTS", 1 << 40)


def test_the_table_has_the_released_tensors():
    table = tensor_table(released())
    found = {spec.released: (spec.dtype, spec.shape) for spec in table}
    drafter = {name: value for name, value in found.items() if name.startswith("mtp.")}
    assert len(drafter_tensors()) == 2401
    assert drafter == drafter_tensors()


class Recorder:
    """Takes the place of a file that is written: every row of its layout, once."""

    written = None  # of all files

    def __init__(self, path, layout):
        self.layout, self.rows = layout, dict.fromkeys(layout, 0)

    def write_rows(self, name, start, rows):
        dtype, shape = self.layout[name]
        assert (rows.dtype, tuple(rows.shape[1:])) == (DTYPES[dtype], shape[1:]), name
        assert start == self.rows[name], name
        self.rows[name] += len(rows)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for name, (dtype, shape) in self.layout.items():
            assert self.rows[name] == shape[0], name
            Recorder.written[name] = dtype, shape


def test_the_released_drafter_is_loaded_whole_and_saved_as_it_came(
    tensors, hollow, tmp_path, monkeypatch
):
    model = load_model(write_hollow(tmp_path / "x", tensors), device="meta")
    state = {n: v for n, v in model.state_dict().items() if n.startswith("drafter.")}
    assert all(value.is_meta for value in state.values())
    sizes = sum(v.numel() * v.element_size() for v in state.values())
    want = sum(BYTES[d] * torch.Size(shape).numel() for d, shape in drafter_tensors().values())
    assert sizes == want
    stack = state["drafter.stages.1.moe.experts.w2.codes"]
    assert (stack.dtype, tuple(stack.shape)) == (torch.uint8, (128, 5120, 1152))
    scales = state["drafter.main_proj.scales"]
    assert (scales.dtype, tuple(scales.shape)) == (torch.float8_e8m0fnu, (160, 480))
    sink = state["drafter.stages.2.attention.sink"]
    assert (sink.dtype, tuple(sink.shape)) == (torch.float32, (64,))
    Recorder.written = {}
    monkeypatch.setattr(checkpoint_writer, "ShardWriter", Recorder)
    save_model(model, tmp_path / "again", companions={})
    assert Recorder.written == tensors


@pytest.mark.parametrize(
    ("name", "found", "message"),
    [
        ("mtp.1.attn.wkv.scale", None, "missing; must be F8_E8M0 [16, 160]"),
        ("mtp.2.ffn.experts.127.w3.weight", None, "missing; must be I8 [2304, 2560]"),
        ("mtp.2.markov_head.embed.weight", None, "missing; must be BF16 [129280, 256]"),
        ("mtp.0.ffn.gate.bias_vl", ("BF16", (128,)), "dtype BF16, must be F32"),
        ("mtp.2.confidence_head.proj.weight", ("BF16", (1, 5120)), "must be [1, 5376]"),
        ("mtp.0.ffn.experts.128.w1.weight", ("I8", (2304, 2560)), "has no such tensor"),
        ("mtp.2.markov_w1.weight", ("BF16", (129280, 256)), "has no such tensor"),
        ("mtp.1.main_norm.weight", ("BF16", (5120,)), "has no such tensor"),
    ],
)
def test_one_tensor_that_differs_is_named(tensors, tmp_path, name, found, message):
    """Before any row is read: nothing here could be."""
    changed = {key: value for key, value in tensors.items() if key != name}
    if found is not None:
        changed[name] = found
    with pytest.raises(CheckpointError, match="1 problem") as caught:
        load_model(write_hollow(tmp_path / "x", changed))
    assert name in str(caught.value)
    assert message in str(caught.value)
