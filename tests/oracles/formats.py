"""Decode the stored number formats by table, and read a released checkpoint into float64."""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

TEXT = ("embed.", "layers.", "norm.", "head.", "mtp.")
E2M1_VALUES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def e4m3_value(code):
    """S EEEE MMM with bias 7; 0x7f and 0xff are NaN, there is no infinity."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 0xF, code & 0x7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    if exponent == 0:
        return sign * mantissa / 8 * 2.0**-6
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def e8m0_value(code):
    """A power of two with bias 127; 255 is NaN."""
    return float("nan") if code == 255 else 2.0 ** (code - 127)


def e2m1_value(code):
    """S EE M: eight magnitudes and a sign."""
    return (-1.0 if code & 8 else 1.0) * E2M1_VALUES[code & 7]


E4M3_TABLE = np.array([e4m3_value(code) for code in range(256)])
E8M0_TABLE = np.array([e8m0_value(code) for code in range(256)])
E2M1_TABLE = np.array([e2m1_value(code) for code in range(16)])


def unpack_e2m1(packed):
    """Two codes per byte, the even column in the low nibble."""
    out = np.empty((*packed.shape[:-1], 2 * packed.shape[-1]))
    out[..., 0::2] = E2M1_TABLE[packed & 0xF]
    out[..., 1::2] = E2M1_TABLE[packed >> 4]
    return out


def dequantize_tiles(codes, scales, tile=32):
    """FP8 weight [out, in], one scale per 32 x 32 tile."""
    rows = np.arange(codes.shape[0]) // tile
    columns = np.arange(codes.shape[1]) // tile
    return E4M3_TABLE[codes] * E8M0_TABLE[scales][np.ix_(rows, columns)]


def dequantize_rows(values, scales, group=32):
    """Decoded values [rows, columns], one scale per row and 32 columns."""
    return values * E8M0_TABLE[scales][:, np.arange(values.shape[1]) // group]


def _bytes(tensor):
    return tensor.contiguous().view(torch.uint8).numpy()


def _decode(name, tensor, scale):
    if scale is None:
        return tensor.to(torch.float64).numpy()
    codes, scales = _bytes(tensor), _bytes(scale)
    if tensor.dtype == torch.int8:
        return dequantize_rows(unpack_e2m1(codes), scales)
    if name.endswith("engram.embed.weight"):
        return dequantize_rows(E4M3_TABLE[codes], scales)
    return dequantize_tiles(codes, scales)


def read_checkpoint(folder):
    """Return {released name: float64 array} of all but images, scales applied; and its config."""
    folder = Path(folder)
    stored = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            names = [n for n in file.keys() if n.startswith(TEXT)]  # noqa: SIM118
            stored.update({name: file.get_tensor(name) for name in names})
    weights = {}
    for name, tensor in stored.items():
        if not name.endswith(".scale"):
            scale = stored.get(name.removesuffix(".weight") + ".scale")
            weights[name] = _decode(name, tensor, scale)
    return weights, json.loads((folder / "config.json").read_text())["text_config"]


def pow2_ceil(value):
    """Smallest power of two that is >= value > 0, after rounding value to float32."""
    mantissa, exponent = np.frexp(np.float32(value))
    return 2.0 ** (exponent - 1 if mantissa == 0.5 else exponent)


def round_to_grid(value, grid):
    """Nearest of the non-negative ``grid`` (code order), ties to the even code, sign kept."""
    distance = np.abs(grid - abs(value))
    nearest = np.flatnonzero(distance == distance.min())
    code = nearest[0] if len(nearest) == 1 else next(c for c in nearest if c % 2 == 0)
    return np.copysign(grid[code], value)


E4M3_GRID = E4M3_TABLE[:127]


def fake_fp8(vector, group=32):
    """Groups of 32: power-of-two scale of max(amax, 1e-4) / 448, E4M3 codes."""
    out = np.array(vector, dtype=np.float64)
    for start in range(0, len(out), group):
        part = out[start : start + group]
        amax = np.float32(max(np.abs(part).max(), np.float32(1e-4)))
        scale = pow2_ceil(amax * np.float32(1 / 448))
        part[:] = [scale * round_to_grid(np.clip(x / scale, -448, 448), E4M3_GRID) for x in part]
    return out


def fake_mxfp4(vector, group=32):
    """Groups of 32: power-of-two scale of max(amax, 6 * 2^-126) / 6, E2M1 codes."""
    out = np.array(vector, dtype=np.float64)
    for start in range(0, len(out), group):
        part = out[start : start + group]
        amax = np.float32(max(np.abs(part).max(), 6 * 2.0**-126))
        scale = pow2_ceil(amax * np.float32(1 / 6))
        part[:] = [scale * round_to_grid(np.clip(x / scale, -6, 6), E2M1_VALUES) for x in part]
    return out


def fake_fp4_e4m3(vector, group=16):
    """Groups of 16: E4M3 scale of max(amax, 6 * 2^-9) / 6, E2M1 codes."""
    out = np.array(vector, dtype=np.float64)
    for start in range(0, len(out), group):
        part = out[start : start + group]
        amax = np.float32(max(np.abs(part).max(), 6 * 2.0**-9))
        scale = round_to_grid(min(float(amax / np.float32(6)), 448.0), E4M3_GRID)
        part[:] = [scale * round_to_grid(np.clip(x / scale, -6, 6), E2M1_VALUES) for x in part]
    return out
