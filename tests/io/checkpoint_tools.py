"""Makes checkpoints of any size for tests, and reads files without the code under test."""

import shutil
from dataclasses import replace

import torch
from safetensors.torch import load_file

from openv41.io.checkpoint_writer import write_checkpoint
from openv41.io.weight_rows import Rows
from openv41.ngram_hash_constants import num_embeddings
from openv41.presets import bench30m, tiny


def raw(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def read_tensors(folder):
    """Every tensor of a folder, through the safetensors library."""
    return {k: t for f in sorted(folder.glob("*.safetensors")) for k, t in load_file(f).items()}


def assert_same_tensors(folder, other):
    a, b = read_tensors(folder), read_tensors(other)
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert (tensor.dtype, tensor.shape) == (b[name].dtype, b[name].shape), name
        assert torch.equal(raw(tensor), raw(b[name])), name


def copy_golden(golden_dir, letter, target):
    """A writable copy: loading keeps a token map beside the tokenizer."""
    shutil.copytree(golden_dir / letter / "checkpoint", target)
    target.chmod(0o755)
    return target


class RandomSource:
    """Weights from a repeated random pattern: fast, whatever the size."""

    def __init__(self, seed=0):
        generator = torch.Generator().manual_seed(seed)
        codes = torch.randint(0, 254, (1 << 22,), dtype=torch.uint8, generator=generator)
        self.codes = codes + (codes >= 127)  # no NaN
        self.numbers = torch.randn(1 << 20, generator=generator)

    def rows(self, weight, start, stop):
        shape = (stop - start, *weight.spec.shape[1:])
        size = torch.Size(shape).numel()
        if weight.scale is None:
            return Rows(self.numbers[:size].reshape(shape), None)
        first, last = weight.scale_rows(start, stop)
        values = self.codes[:size].reshape(shape)
        if weight.spec.dtype == "F8_E4M3":
            values = values.view(torch.float8_e4m3fn)
        scale_shape = (last - first, *weight.scale.shape[1:])
        size = torch.Size(scale_shape).numel()
        scales = (self.codes[:size] % 16 + 110).reshape(scale_shape)
        return Rows(values, scales.view(torch.float8_e8m0fnu))


def write_random(config, folder, variant="released"):
    write_checkpoint(RandomSource(), config, folder, variant=variant, companions={})


def small_config():
    """The tiny preset with a smaller n-gram memory and fewer experts: 2 MB, a text model alone."""
    config = tiny()
    return replace(
        config,
        vocab_size=64,
        image_token_id=63,
        moe=replace(config.moe, num_experts=3),
        engram=_engram(config.engram, table_size=50, head_dim=48, vocab_size=64),
    )


def big_config():
    """More than 1 GB as released; the largest tensor is an n-gram table of 307 MB."""
    config = bench30m()
    return replace(
        config,
        hidden_size=512,
        moe=replace(config.moe, num_experts=64, expert_dim=1024),
        engram=_engram(config.engram, table_size=200_000, head_dim=256, vocab_size=4096),
    )


def _engram(engram, *, table_size, head_dim, vocab_size):
    rows = num_embeddings(len(engram.layer_ids), 3, 2, table_size)
    return replace(
        engram,
        num_heads=2,
        table_size=table_size,
        head_dim=head_dim,
        num_embeddings=rows,
        compressed_vocab_size=vocab_size,
    )
