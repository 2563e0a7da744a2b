"""Engram tables outside the model: in host memory, or left in their file. Report §3.1.3.

The rows of a step are hashes of its tokens alone, so they are known before the first layer runs. A
table removes repeats, reads the rest in one batch in a thread of its own while the first layers
compute, and hands the rows over when its Engram layer asks. What is read are the bytes of the
checkpoint, and they become numbers by the functions that a table in the model uses: all placements
give the same bits.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields
from functools import partial
from threading import Lock
from time import perf_counter
from typing import ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int64, Shaped, UInt8
from torch import Tensor, nn

from openv41.errors import CheckpointError
from openv41.io.shard_index import ShardSet
from openv41.io.shards import DTYPES
from openv41.io.weight_rows import FileSource, Rows, Weight, as_plain
from openv41.model.causal_encoder_decoder import CausalEncoderDecoder
from openv41.ops.quantize import dequantize_fp8_rows

EngramPlacement = Literal["resident", "host", "mmap"]
ReadRows = Callable[[Int64[np.ndarray, " rows"]], UInt8[np.ndarray, "rows size"]]

CACHE_ROWS = 65_536  # per table: 17 MB of the released format
_READ_THREADS = 16  # pages of a mapped file that the disk is asked for at once
_ROWS_PER_THREAD = 64
_E8M0_NAN = 0xFF
_E4M3_NAN = 0x7F  # with either sign


@dataclass(frozen=True, kw_only=True, slots=True)
class EngramCounters:
    """What lookups in tables outside the model have cost so far."""

    lookups: int = 0  # one per Engram layer and step
    rows: int = 0  # fetched, repeats included
    unique_rows: int = 0  # of these, without the repeats within a lookup
    hits: int = 0  # of these, found among the recently read rows of a mapped table
    reads: int = 0  # batches read: at most one per fetch
    bytes_read: int = 0
    prefetched: int = 0  # lookups whose rows were asked for ahead
    stalls: int = 0  # lookups that had to wait
    stall_seconds: float = 0.0

    def __add__(self, other: "EngramCounters") -> "EngramCounters":
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        return EngramCounters(**sums)


def engram_counters(model: nn.Module) -> EngramCounters:
    """Sum over all tables outside a model; zero where they are resident."""
    tables = (module for module in model.modules() if isinstance(module, StoredTable))
    return sum((table.counters for table in tables), start=EngramCounters())


def move_tables_out(
    model: CausalEncoderDecoder,
    source: FileSource,
    placement: Literal["host", "mmap"],
    dtype: torch.dtype | None,
    device: torch.device,
) -> set[str]:
    """Replace the Engram tables of a model; return the parameters that it no longer has.

    ``dtype`` is that of the parameters which the tables stand for, None for codes and scales. The
    model will run on ``device``.
    """
    moved = set()
    for weight in source.weights.values():
        ours = weight.spec.ours
        if weight.spec.weight_format != "fp8_rows":
            continue
        if placement == "mmap":
            read = MappedTable(source.files, weight)
            table = StoredTable(read, weight, dtype, cache_rows=CACHE_ROWS)
        else:
            table = table_in_memory(read_into_memory(source, weight), weight, dtype, device)
        model.set_submodule(ours.removesuffix(".weight"), table)
        moved.add(ours)
    return moved


class StoredTable(nn.Module):
    """Takes the place of an Engram layer's ``QuantizedTable``, for inference.

    ``read`` gives a record for each of some ascending, different rows: the bytes of its values as
    in the file, then its scales where the file has them. It runs in the table's own thread.
    """

    reads_on_host = True

    def __init__(
        self, read: ReadRows, weight: Weight, dtype: torch.dtype | None, *, cache_rows: int = 0
    ) -> None:
        super().__init__()
        self.read = read
        self.counters = EngramCounters()
        self._weight, self._dtype = weight, dtype
        self._cache = RecentRows(cache_rows, _record_bytes(weight)) if cache_rows else None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="engram")
        self._pending: _Fetch | None = None
        self._lock = Lock()

    def prefetch(self, rows: Int[Tensor, "T lookups"]) -> None:
        """Start fetching the rows of the next lookup."""
        self._pending = self._fetch(rows)

    def forward(
        self, rows: Int[Tensor, "T lookups"], dtype: torch.dtype
    ) -> Float[Tensor, "T lookups width"]:
        """Look rows up, as values of ``dtype``; other rows than were prefetched are read now."""
        fetch, self._pending = self._pending, None
        is_prefetched = fetch is not None and fetch.rows is rows
        if fetch is None or not is_prefetched:
            fetch = self._fetch(rows)
        records, places = self._wait(fetch, is_prefetched=is_prefetched)
        stored = _from_records(records.to(rows.device, non_blocking=True), self._weight)
        places = places.to(rows.device, non_blocking=True)
        values = self._values(stored, dtype).index_select(0, places)
        return values.view(*rows.shape, values.shape[-1])

    def stored_rows(self, start: int, stop: int) -> Rows:
        """Rows as a table in the model would hold them, for saving."""
        records = torch.from_numpy(self.read(np.arange(start, stop, dtype=np.int64)))
        stored = _from_records(records, self._weight)
        if self._dtype is None:
            return stored
        return Rows(as_plain(stored, self._weight, self._dtype), None)

    def _values(self, stored: Rows, dtype: torch.dtype) -> Float[Tensor, "rows width"]:
        if self._dtype is not None:
            return as_plain(stored, self._weight, self._dtype).to(dtype)
        assert stored.scales is not None, f"{self._weight.name} has no codes"
        return dequantize_fp8_rows(stored.values, stored.scales, dtype)

    def _fetch(self, rows: Int[Tensor, "T lookups"]) -> "_Fetch":
        flat = rows.flatten().cpu().numpy()  # here: in the thread it would wait for later layers
        return _Fetch(rows, self._worker.submit(self._find, flat, pinned=rows.is_cuda))

    def _wait(self, fetch: "_Fetch", *, is_prefetched: bool) -> tuple[Tensor, Tensor]:
        stalled, start = not fetch.found.done(), perf_counter()
        found = fetch.found.result()
        waited = perf_counter() - start if stalled else 0.0
        self._count(
            EngramCounters(
                lookups=1, prefetched=is_prefetched, stalls=stalled, stall_seconds=waited
            )
        )
        return found

    def _find(
        self, flat: Int64[np.ndarray, " lookups"], *, pinned: bool
    ) -> tuple[UInt8[Tensor, "rows size"], Int64[Tensor, " lookups"]]:
        """Records of the different rows, and the place of each row among them."""
        rows, places = np.unique(flat, return_inverse=True)
        self._count(EngramCounters(rows=len(flat), unique_rows=len(rows)))
        records = torch.from_numpy(self._records(rows))
        found = records, torch.from_numpy(places)
        return (found[0].pin_memory(), found[1].pin_memory()) if pinned else found

    def _records(self, rows: Int64[np.ndarray, " rows"]) -> UInt8[np.ndarray, "rows size"]:
        if self._cache is None:
            return self._read(rows)
        records, is_hit = self._cache.find(rows)
        self._count(EngramCounters(hits=int(is_hit.sum())))
        if not is_hit.all():
            missed = rows[~is_hit]
            records[~is_hit] = fresh = self._read(missed)
            self._cache.keep(missed, fresh)
        return records

    def _read(self, rows: Int64[np.ndarray, " rows"]) -> UInt8[np.ndarray, "rows size"]:
        records = self.read(rows)
        self._count(EngramCounters(reads=1, bytes_read=records.nbytes))
        return records

    def _count(self, more: EngramCounters) -> None:
        with self._lock:
            self.counters += more


class PinnedTable(StoredTable):
    """A table in host memory that the GPU reads by itself, on a stream beside the first layers.

    Nothing waits on the host, so that a CUDA graph can hold the lookup; its counters then stand
    still.
    """

    reads_on_host = False

    def __init__(
        self, records: UInt8[np.ndarray, "rows size"], weight: Weight, dtype: torch.dtype | None
    ) -> None:
        super().__init__(partial(records.take, axis=0), weight, dtype)
        status = torch.cuda.cudart().cudaHostRegister(records.ctypes.data, records.nbytes, 0)
        if int(status):
            raise CheckpointError(
                f"{weight.name}: {records.nbytes:,} bytes of host memory cannot be shared with the "
                f"GPU (CUDA error {int(status)}); leave the tables in their file (mmap)"
            )
        self._rows = seen_by_gpu(widest(records))
        self._stream = torch.cuda.Stream()
        self._found: tuple[Tensor, Tensor] | None = None

    def prefetch(self, rows: Int[Tensor, "T lookups"]) -> None:
        """Start reading the rows of the next lookup."""
        flat, records = rows.flatten(), self._rows.new_empty(rows.numel(), self._rows.shape[1])
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            torch.index_select(self._rows, 0, flat, out=records)
        self._found = rows, records

    def forward(
        self, rows: Int[Tensor, "T lookups"], dtype: torch.dtype
    ) -> Float[Tensor, "T lookups width"]:
        """Look rows up, as values of ``dtype``; other rows than were prefetched are read now."""
        is_prefetched = self._found is not None and self._found[0] is rows
        if not is_prefetched:
            self.prefetch(rows)
        assert self._found is not None, "prefetch leaves what it reads"
        records = self._found[1].view(torch.uint8)
        torch.cuda.current_stream().wait_stream(self._stream)
        num = rows.numel()
        self._count(
            EngramCounters(
                lookups=1,
                rows=num,
                unique_rows=num,
                reads=1,
                bytes_read=records.numel(),
                prefetched=is_prefetched,
            )
        )
        self._found = None
        values = self._values(_from_records(records, self._weight), dtype)
        return values.view(*rows.shape, values.shape[-1])

    def _values(self, stored: Rows, dtype: torch.dtype) -> Float[Tensor, "rows width"]:
        """As the others' values, without a look at them on the host."""
        if stored.scales is None:
            return stored.values.to(self._dtype or dtype).to(dtype)
        return dequantize_fp8_rows(stored.values, stored.scales, self._dtype or dtype).to(dtype)


def table_in_memory(
    records: UInt8[np.ndarray, "rows size"],
    weight: Weight,
    dtype: torch.dtype | None,
    device: torch.device,
) -> StoredTable:
    """A table of these records, for a model on this device."""
    if device.type == "cuda":
        return PinnedTable(records, weight, dtype)
    return StoredTable(partial(records.take, axis=0), weight, dtype)


def widest(records: UInt8[np.ndarray, "rows size"]) -> Int[np.ndarray, "rows words"]:
    """The same bytes in the widest words that a record is made of."""
    size = next(size for size in (8, 4, 2, 1) if records.shape[1] % size == 0)
    return records.view(f"i{size}" if size > 1 else "u1")


def seen_by_gpu(array: Shaped[np.ndarray, "rows words"]) -> Shaped[Tensor, "rows words"]:
    """Registered host memory as a tensor of the GPU, which reads it over the bus."""

    class Seen:
        kept = array
        __cuda_array_interface__: ClassVar[dict[str, object]] = {
            "shape": array.shape,
            "typestr": array.dtype.str,
            "data": (array.ctypes.data, False),
            "version": 2,
        }

    return torch.as_tensor(Seen(), device="cuda")


@dataclass(frozen=True, eq=False, slots=True)
class _Fetch:
    """Rows that were asked for, and what comes of them."""

    rows: Tensor
    found: Future[tuple[Tensor, Tensor]]


class RecentRows:
    """Records of recently read rows. A row has one slot; the last row read into it stays."""

    def __init__(self, num_slots: int, record_bytes: int) -> None:
        self._rows = np.full(num_slots, -1, np.int64)
        self._records = np.empty((num_slots, record_bytes), np.uint8)

    def find(
        self, rows: Int64[np.ndarray, " rows"]
    ) -> tuple[UInt8[np.ndarray, "rows size"], Bool[np.ndarray, " rows"]]:
        """What the slots of these rows hold, and whether it is the rows' own."""
        slots = rows % len(self._rows)
        return self._records[slots], self._rows[slots] == rows

    def keep(
        self, rows: Int64[np.ndarray, " rows"], records: UInt8[np.ndarray, "rows size"]
    ) -> None:
        """Put records into their slots; of rows that share a slot one stays."""
        slots = rows % len(self._rows)
        self._rows[slots] = rows
        stays = self._rows[slots] == rows
        self._records[slots[stays]] = records[stays]


class MappedTable:
    """Reads records from the memory map of a checkpoint's file; a NaN in them is an error."""

    def __init__(self, files: ShardSet, weight: Weight) -> None:
        self._values = files.map_rows(weight.name)
        self._scales = None if weight.scale is None else files.map_rows(weight.scale.released)
        self._where = files.folder / files.file_of[weight.name]
        self._weight = weight
        self._threads = ThreadPoolExecutor(_READ_THREADS, thread_name_prefix="engram-read")

    def __call__(self, rows: Int64[np.ndarray, " rows"]) -> UInt8[np.ndarray, "rows size"]:
        """Read in several threads, so that the disk serves many pages at once."""
        num_spans = min(_READ_THREADS, len(rows) // _ROWS_PER_THREAD)
        if num_spans < 2:
            return self._read(rows)
        spans = np.array_split(rows, num_spans)
        return np.concatenate(list(self._threads.map(self._read, spans)))

    def _read(self, rows: Int64[np.ndarray, " rows"]) -> UInt8[np.ndarray, "rows size"]:
        values = self._values.take(rows)
        if self._scales is None:
            return values
        scales = self._scales.take(rows)
        is_nan = (values & _E4M3_NAN == _E4M3_NAN).any(1) | (scales == _E8M0_NAN).any(1)
        if is_nan.any():
            raise CheckpointError(
                f"{self._where}: {self._weight.name}: NaN in row {rows[is_nan.argmax()]} or its "
                "scales; the file is damaged"
            )
        return np.concatenate([values, scales], axis=1)


def read_into_memory(source: FileSource, weight: Weight) -> UInt8[np.ndarray, "rows size"]:
    """Read the records of a whole table, a few rows at a time."""
    records = np.empty((weight.spec.shape[0], _record_bytes(weight)), np.uint8)
    for start, stop in weight.chunks():
        rows = source.rows(weight, start, stop)
        parts = [part.view(torch.uint8) for part in rows if part is not None]
        torch.cat(parts, dim=1, out=torch.from_numpy(records[start:stop]))
    return records


def _record_bytes(weight: Weight) -> int:
    return _value_bytes(weight) + (weight.scale.shape[1] if weight.scale else 0)


def _value_bytes(weight: Weight) -> int:
    return weight.spec.shape[1] * DTYPES[weight.spec.dtype].itemsize


def _from_records(records: UInt8[Tensor, "rows size"], weight: Weight) -> Rows:
    size = _value_bytes(weight)
    values = records[:, :size].contiguous().view(DTYPES[weight.spec.dtype])
    if weight.scale is None:
        return Rows(values, None)
    return Rows(values, records[:, size:].contiguous().view(DTYPES[weight.scale.dtype]))
