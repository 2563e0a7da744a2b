"""Reads a checkpoint in the released format, or a plain one, as float32 tensors.

A small reader of its own, apart from `openv41.io`, so that the peers do not depend on what they
are compared with. Names stay as in the file.
"""

import json
from pathlib import Path

import torch
from safetensors import safe_open

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
TILE = 32


def read_config(folder):
    """Return config.json as a dictionary."""
    return json.loads((Path(folder) / "config.json").read_text())


def unpack_fp4(packed):
    """Return the float32 values of packed FP4 codes [.., n/2], even column in the low nibble."""
    byte = packed.view(torch.uint8).to(torch.int64)
    codes = torch.stack((byte & 15, byte >> 4), -1).flatten(-2)
    return torch.where(codes >= 8, -1.0, 1.0) * E2M1[codes & 7]


def power_of_two(scale):
    """Return the float32 value 2^(byte - 127) of E8M0 scales."""
    return torch.exp2(scale.view(torch.uint8).to(torch.float32) - 127)


def dequantize(weight, scale):
    """Return weight times scale in float32: per 32x32 tile, or per row and 32 columns."""
    values = unpack_fp4(weight) if weight.dtype in (torch.int8, torch.uint8) else weight.float()
    factor = power_of_two(scale)
    if factor.shape[0] != values.shape[0]:
        factor = factor.repeat_interleave(TILE, 0)[: values.shape[0]]
    return values * factor.repeat_interleave(TILE, 1)[:, : values.shape[1]]


def read_weights(folder, *, prefixes=("embed.", "head.", "norm.", "layers.")):
    """Return {released name: float32 tensor} of the text backbone, scales folded in."""
    raw = {}
    for shard in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(shard, "pt") as file:
            names = file.offset_keys()
            raw.update((n, file.get_tensor(n)) for n in names if n.startswith(prefixes))
    scales = {n.removesuffix("scale") + "weight": n for n in raw if n.endswith(".scale")}
    return {
        n: dequantize(t, raw[scales[n]]) if n in scales else t.float()
        for n, t in raw.items()
        if not n.endswith(".scale")
    }
