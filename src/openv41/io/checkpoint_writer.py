"""Writes checkpoint folders from any source of weights, whole or not at all. Report §2.1."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from openv41.config import ModelConfig
from openv41.errors import CheckpointError
from openv41.io.atomic import atomic_folder, write_atomic
from openv41.io.engram_map import CACHE_FILE
from openv41.io.hf_config import FILE_NAME as CONFIG_FILE
from openv41.io.hf_config import write_config
from openv41.io.shard_index import INDEX_FILE, SINGLE_FILE, write_index
from openv41.io.shards import DTYPES, ShardWriter
from openv41.io.tensor_names import TensorSpec, Variant, num_shards, shard_name, tensor_table
from openv41.io.tokenizer import SETTINGS_FILE, TOKENIZER_FILE
from openv41.io.weight_rows import Source, Weight, as_plain, as_stored, weights_of

COMPANION_FILES = (
    TOKENIZER_FILE,
    SETTINGS_FILE,
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)
_REPLACEABLE = {CONFIG_FILE, INDEX_FILE, CACHE_FILE, "README.md", *COMPANION_FILES}
PLAIN_DTYPES: dict[Variant, torch.dtype] = {
    "released": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}
Progress = Callable[[int, int], None]  # weights done, weights in all


def write_checkpoint(
    source: Source,
    config: ModelConfig,
    folder: Path,
    *,
    variant: Variant,
    companions: Mapping[str, bytes],
    progress: Progress | None = None,
) -> None:
    """Write a whole checkpoint, a few rows at a time; ``companions`` are small files by name.

    An older checkpoint in the folder is replaced. A folder that holds anything else is refused.
    """
    _check_replaceable(folder)
    table = tensor_table(config, variant=variant)
    try:
        with atomic_folder(folder) as partial:
            _write_shards(source, partial, table, num_shards(config), progress)
            for name, data in companions.items():
                write_atomic(partial / name, data)
            dtype = str(PLAIN_DTYPES[variant]).removeprefix("torch.")
            write_config(config, partial, quantized=variant == "released", dtype=dtype)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot write: {error.strerror}") from None


def read_companions(folder: Path) -> dict[str, bytes]:
    """The tokenizer's and other small files that belong to a checkpoint."""
    paths = (folder / name for name in COMPANION_FILES)
    return {path.name: path.read_bytes() for path in paths if path.is_file()}


def _check_replaceable(folder: Path) -> None:
    """Refuse to delete what is not a checkpoint."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: is a file; name a folder to write the checkpoint to")
    found = {path.name for path in folder.iterdir()}
    foreign = sorted(
        name for name in found if name not in _REPLACEABLE and not name.endswith(".safetensors")
    )
    is_checkpoint = CONFIG_FILE in found and found & {INDEX_FILE, SINGLE_FILE}
    if foreign or (found and not is_checkpoint):
        listed = ", ".join((foreign or sorted(found))[:5])
        raise CheckpointError(
            f"{folder}: holds files that are no part of a checkpoint ({listed}) and would be lost; "
            "name an empty or new folder"
        )


def _write_shards(
    source: Source,
    folder: Path,
    table: tuple[TensorSpec, ...],
    total: int,
    progress: Progress | None,
) -> None:
    """Write every shard and the index."""
    weights = weights_of(table)
    num_done = 0
    for shard in range(1, total + 1):
        layout = {s.released: (s.dtype, s.shape) for s in table if s.shard == shard}
        with ShardWriter(folder / shard_name(shard, total), layout) as writer:
            for weight in weights:
                if weight.spec.shard == shard:
                    _write_weight(source, weight, writer)
                    num_done += 1
                    if progress:
                        progress(num_done, len(weights))
    file_of = {spec.released: shard_name(spec.shard, total) for spec in table}
    write_index(folder, file_of, sum(spec.num_bytes for spec in table))


def _write_weight(source: Source, weight: Weight, writer: ShardWriter) -> None:
    dtype = DTYPES[weight.spec.dtype]
    for start, stop in weight.chunks():
        rows = source.rows(weight, start, stop)
        if weight.scale is None:
            writer.write_rows(weight.name, start, as_plain(rows, weight, dtype))
            continue
        codes, scales = as_stored(rows, weight)
        writer.write_rows(weight.name, start, codes.view(dtype))
        writer.write_rows(weight.scale.released, weight.scale_rows(start, stop)[0], scales)
