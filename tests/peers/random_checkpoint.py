"""Writes a plain float32 checkpoint with random weights for the speed comparison."""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file

from openv41.config import ModelConfig
from openv41.io.hf_config import write_config
from openv41.io.tensor_names import tensor_table

SHARD = "model-00001-of-00001.safetensors"


def write_random(folder, config: ModelConfig, seed=0):
    """Write config.json, tokenizer.json and one shard; every token is a class of its own."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_config(config, folder, quantized=False, dtype="float32")
    (folder / "tokenizer.json").write_text(json.dumps(word_tokenizer(config.vocab_size)))
    generator = torch.Generator().manual_seed(seed)
    specs = tensor_table(config, variant="float32")
    weights = {s.released: _values(s.released, s.shape, generator) for s in specs}
    save_file(weights, folder / SHARD, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, SHARD)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _values(name, shape, generator):
    """Ones for norms, standard normal embeddings, unit-variance products for matrices.

    Engram tables hold FP8 values, so that they can be written either way.
    """
    if "norm" in name or name.endswith(("q_weight", "k_weight")):
        return torch.ones(shape)
    if len(shape) == 1:
        return torch.zeros(shape) + (0.5 if name.endswith("_scale") else 0.0)
    drawn = torch.randn(shape, generator=generator)
    if "engram.embed" in name:
        return drawn.to(torch.float8_e4m3fn).float()
    return drawn if "embed" in name else drawn / math.sqrt(shape[-1])


def word_tokenizer(size):
    """Return a tokenizer.json of `size` whole words w0, w1, ..."""
    vocab = {f"w{i}": i for i in range(size)}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "w0"},
    }
