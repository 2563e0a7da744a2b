"""Token shards: written from text files, read through memory maps.

A folder holds one long stream of token ids, document after document, each with its BOS and EOS,
cut into ``tokens-00000.bin`` and so on: bare little-endian uint16 (uint32 above 65,536 tokens).
``index.json`` lists these files with their hashes, and the documents with their tokens and bytes;
a copy of the tokenizer lies beside it.
"""

import bisect
import hashlib
import json
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import numpy as np

from openv41.errors import DataError
from openv41.io.atomic import atomic_folder, write_atomic
from openv41.io.tokenizer import BOS_ID, EOS_ID, TextTokenizer, read_pieces
from openv41.train.mapped_arrays import Array, map_array, read_index

INDEX_FILE = "index.json"
FORMAT, FORMAT_VERSION = "openv41-token-shards", 1
SHARD_TOKENS = 1 << 27

_BATCH = 32  # pieces of text encoded at once

logger = logging.getLogger(__name__)
TokenIds = np.ndarray[tuple[int], np.dtype[np.int64]]
Progress = Callable[[int], None]  # gets the bytes of text done since the last call


@dataclass(frozen=True, slots=True)
class Document:
    """One text: its file name, its tokens with BOS and EOS, its bytes."""

    source: str
    tokens: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of token ids."""

    file: str
    tokens: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """Content of the index file."""

    dtype: str
    vocab_size: int
    tokenizer_sha256: str
    bos_token_id: int
    eos_token_id: int
    shards: list[Shard]
    documents: list[Document]

    def __post_init__(self) -> None:
        counts = [self.vocab_size, *(shard.tokens for shard in self.shards)]
        counts += [count for d in self.documents for count in (d.tokens, d.bytes)]
        if not all(isinstance(count, int) and count > 0 for count in counts):
            raise ValueError("a count is no positive integer")
        if self.dtype not in ("uint16", "uint32"):
            raise ValueError(f"dtype is {self.dtype!r}")
        if not self.documents:
            raise ValueError("it lists no document")
        if any(Path(shard.file).name != shard.file for shard in self.shards):
            raise ValueError("a shard lies outside the folder")
        stored = sum(shard.tokens for shard in self.shards)
        listed = sum(document.tokens for document in self.documents)
        if stored != listed:
            raise ValueError(f"the shards hold {stored} tokens, the documents {listed}")


def prepare_shards(
    files: Sequence[Path],
    tokenizer: TextTokenizer,
    out: Path,
    *,
    shard_tokens: int = SHARD_TOKENS,
    progress: Progress = lambda _: None,
) -> "TokenShards":
    """Write UTF-8 text files as token shards, one document per file, streamed.

    The folder ``out`` appears whole or not at all; shards that were there before are replaced.
    """
    if out.exists() and not (out / INDEX_FILE).is_file() and not _is_empty_folder(out):
        raise DataError(f"{out} exists and holds no token shards; name a new or empty folder")
    if missing := [str(file) for file in files if not file.is_file()]:
        raise DataError(f"no such text file: {', '.join(missing)}")
    out = out.resolve()
    try:
        with atomic_folder(out) as partial:
            _write_folder(files, tokenizer, partial, shard_tokens, progress)
    except OSError as error:
        raise DataError(f"{out}: cannot write token shards: {error}") from None
    return TokenShards(out, verify=False)


def require_index(folder: Path) -> None:
    """Raise DataError where a folder of token shards is not there, or is none."""
    if not (folder / INDEX_FILE).is_file():
        found = f"it has no {INDEX_FILE}" if folder.is_dir() else "there is no such folder"
        raise DataError(
            f"{folder} holds no token shards: {found}; name a folder that 'openv41 data prepare' "
            "has written"
        )


def _write_folder(
    files: Sequence[Path],
    tokenizer: TextTokenizer,
    folder: Path,
    shard_tokens: int,
    progress: Progress,
) -> None:
    dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
    documents = []
    with closing(_ShardWriter(folder, dtype, shard_tokens)) as writer:
        for file in files:
            document = _write_document(file, tokenizer, writer, progress)
            if document.bytes:
                documents.append(document)
            else:
                logger.warning("%s is empty and left out", file)
        writer.finish_shard()
    if not documents:
        raise DataError("the given files hold no text; give at least one that is not empty")
    tokenizer.save(folder)
    index = Index(
        dtype=dtype,
        vocab_size=tokenizer.vocab_size,
        tokenizer_sha256=tokenizer.sha256,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        shards=writer.shards,
        documents=documents,
    )
    content = {"format": FORMAT, "version": FORMAT_VERSION, **asdict(index)}
    write_atomic(folder / INDEX_FILE, json.dumps(content, indent=1).encode() + b"\n")


def _write_document(
    file: Path, tokenizer: TextTokenizer, writer: "_ShardWriter", progress: Progress
) -> Document:
    """Stream one text into the shards; an empty one leaves nothing."""
    num_tokens = num_bytes = 0
    pieces = read_pieces(file)
    while batch := list(islice(pieces, _BATCH)):
        if not num_bytes:
            writer.add([BOS_ID])
        for piece, ids in zip(batch, tokenizer.encode_batch(batch), strict=True):
            writer.add(ids)
            num_tokens += len(ids)
            num_bytes += len(piece.encode())
            progress(len(piece.encode()))
    if num_bytes:
        writer.add([EOS_ID])
    return Document(file.name, num_tokens + 2, num_bytes)


class _ShardWriter:
    """Appends ids to shard files of at most ``shard_tokens`` tokens each."""

    def __init__(self, folder: Path, dtype: str, shard_tokens: int) -> None:
        self.shards: list[Shard] = []
        self._folder, self._shard_tokens = folder, shard_tokens
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._start_shard()

    def add(self, ids: Sequence[int]) -> None:
        """Append token ids, over as many shards as it takes."""
        data = np.asarray(ids, dtype=self._dtype)
        while data.size:
            if self._tokens == self._shard_tokens:
                self.finish_shard()
                self._start_shard()
            part = data[: self._shard_tokens - self._tokens]
            self._file.write(part.tobytes())
            self._hash.update(part.tobytes())
            self._tokens += part.size
            data = data[part.size :]

    def close(self) -> None:
        """Close the current file, finished or not."""
        self._file.close()

    def finish_shard(self) -> None:
        """Put the current shard on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        name = Path(self._file.name).name
        self.shards.append(Shard(name, self._tokens, self._hash.hexdigest()))

    def _start_shard(self) -> None:
        self._file = (self._folder / f"tokens-{len(self.shards):05}.bin").open("wb")
        self._hash, self._tokens = hashlib.sha256(), 0


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


class TokenShards:
    """A folder of token shards: one long stream of ids and the documents in it."""

    def __init__(self, folder: Path, *, verify: bool = True) -> None:
        """Open the folder; ``verify`` reads everything once and compares the hashes."""
        self.folder = folder
        self.index = _read_index(folder / INDEX_FILE)
        self.documents = self.index.documents
        self.bounds = list(accumulate((d.tokens for d in self.documents), initial=0))
        self.num_tokens = self.bounds[-1]  # BOS and EOS of each document included
        self.num_bytes = sum(document.bytes for document in self.documents)
        self._dtype = np.dtype(self.index.dtype).newbyteorder("<")
        shards = self.index.shards
        self._shard_bounds = list(accumulate((s.tokens for s in shards), initial=0))
        self._arrays = [self._map(shard, verify=verify) for shard in shards]

    def read(self, start: int, stop: int) -> TokenIds:
        """Token ids of ``start`` to ``stop`` of the stream."""
        assert 0 <= start <= stop <= self.num_tokens, f"[{start}, {stop}) of {self.num_tokens}"
        parts = []
        while start < stop:
            shard = bisect.bisect_right(self._shard_bounds, start) - 1
            low, high = self._shard_bounds[shard : shard + 2]
            parts.append(self._arrays[shard][start - low : min(stop, high) - low])
            start = min(stop, high)
        return np.concatenate([np.empty(0, np.int64), *parts])

    def check_tokenizer(self, tokenizer: TextTokenizer) -> None:
        """Refuse a tokenizer other than the one that made the shards."""
        wanted = self.index.tokenizer_sha256
        if tokenizer.sha256 != wanted:
            raise DataError(
                f"{self.folder} was prepared with the tokenizer of sha256 {wanted}, "
                f"{tokenizer.where} has {tokenizer.sha256}; prepare the data with this tokenizer"
            )

    def _map(self, shard: Shard, *, verify: bool) -> Array:
        """Memory map of one shard, its size and (if asked) its hash checked."""
        size, digest = shard.tokens * self._dtype.itemsize, shard.sha256 if verify else None
        path = self.folder / shard.file
        return map_array(path, self._dtype.str, size, digest, "prepare the data again")


def _read_index(path: Path) -> Index:
    return read_index(
        path,
        _make_index,
        format_=(FORMAT, FORMAT_VERSION),
        what="token shards",
        remedies=("make them with 'openv41 data prepare'", "prepare the data again"),
    )


def _make_index(content: dict[str, Any]) -> Index:
    content["shards"] = [Shard(**shard) for shard in content["shards"]]
    content["documents"] = [Document(**document) for document in content["documents"]]
    return Index(**content)
