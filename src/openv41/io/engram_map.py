"""Token map of a checkpoint's n-gram memory, kept beside the tokenizer. Report §2.4.2."""

import hashlib
import json
import logging
from pathlib import Path

import tokenizers
import torch
from jaxtyping import Int
from torch import Tensor

from openv41.config import ModelConfig
from openv41.errors import DataError
from openv41.io.atomic import write_atomic
from openv41.io.released_tokenizer import RELEASED_TOKENIZER_SHA256
from openv41.io.token_classes import compress_vocabulary, map_sha256
from openv41.io.tokenizer import TOKENIZER_FILE, load_tokenizer

CACHE_FILE = "openv41_token_map.json"
RELEASED_NUM_CLASSES = 99092
# Of the map as little-endian int32, with tokenizers 0.23.3.
RELEASED_MAP_SHA256 = "c60a86322ec17b4142bfef3c57a8d81fb428550cdf487f88a4320cb59fe46481"

logger = logging.getLogger(__name__)


def token_map_for(folder: Path, config: ModelConfig) -> Int[Tensor, " V"]:
    """Token map of a checkpoint folder's tokenizer, checked against the configuration.

    The map is kept beside the tokenizer; a copy that is damaged or belongs to another tokenizer is
    made anew. A folder that cannot be written works too, only slower.
    """
    file = folder / TOKENIZER_FILE
    try:
        tokenizer_sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as error:
        raise DataError(
            f"{file}: cannot read the tokenizer: {error.strerror}; the n-gram memory needs it"
        ) from None
    token_map = _read_cache(folder / CACHE_FILE, tokenizer_sha256)
    if token_map is None:
        token_map = compress_vocabulary(load_tokenizer(folder).backend)
        _write_cache(folder / CACHE_FILE, tokenizer_sha256, token_map)
    _check(file, tokenizer_sha256, token_map, config)
    return torch.tensor(token_map, dtype=torch.int64)


def _read_cache(file: Path, tokenizer_sha256: str) -> list[int] | None:
    """The stored map, or None where there is none that can be used."""
    if not file.exists():
        return None
    try:
        stored = json.loads(file.read_bytes())
        token_map = [int(class_id) for class_id in stored["token_map"]]
        found = stored["tokenizer_sha256"], stored["map_sha256"]
        if found == (tokenizer_sha256, map_sha256(token_map)):
            return token_map
        reason = "it belongs to another tokenizer or its hash is wrong"
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        reason = f"it cannot be read ({type(error).__name__}: {error})"
    logger.warning("%s: %s; the map is made anew", file, reason)
    return None


def _write_cache(file: Path, tokenizer_sha256: str, token_map: list[int]) -> None:
    stored = {
        "tokenizer_sha256": tokenizer_sha256,
        "tokenizers_version": tokenizers.__version__,
        "map_sha256": map_sha256(token_map),
        "num_classes": len(set(token_map)),
        "token_map": token_map,
    }
    try:
        write_atomic(file, json.dumps(stored).encode())
    except OSError as error:
        logger.info("%s: the map is not kept (%s)", file, error.strerror)


def _check(file: Path, tokenizer_sha256: str, token_map: list[int], config: ModelConfig) -> None:
    num_classes = len(set(token_map))
    released = tokenizer_sha256 == RELEASED_TOKENIZER_SHA256
    if released and map_sha256(token_map) != RELEASED_MAP_SHA256:
        raise DataError(
            f"{file}: tokenizers {tokenizers.__version__} gives {num_classes} classes, the "
            f"released model has {RELEASED_NUM_CLASSES} (another Unicode version?); "
            f"install tokenizers 0.23.3 and delete {CACHE_FILE}"
        )
    if len(token_map) != config.vocab_size:
        raise DataError(
            f"{file}: {len(token_map)} tokens, the configuration has vocab_size "
            f"{config.vocab_size}; give the tokenizer that belongs to this model"
        )
    if config.engram and num_classes != config.engram.compressed_vocab_size:
        raise DataError(
            f"{file}: {num_classes} classes of tokens, the configuration has "
            f"engram.compressed_vocab_size {config.engram.compressed_vocab_size}; "
            "give the tokenizer that belongs to this model"
        )
