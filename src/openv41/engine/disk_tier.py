"""The disk tier of the prefix cache: page records in one bounded file.

    file  = header (4096 bytes), group, group, ...
    group = 64 slot headers of 64 bytes, then the 64 records of record_bytes bytes each
    slot  = key, generation (a larger one was used later), checksums of the record and of the header

The file is read and written, never mapped: a full disk or a file that somebody cuts off would be a
signal there, and is an error here. The process may die at any time: a slot's header is cleared
before its record is overwritten, and written after it. Every checksum is keyed with the fingerprint
and the record size.
"""

import fcntl
import hashlib
import logging
import os
import struct
from collections import OrderedDict
from contextlib import ExitStack
from pathlib import Path

from openv41.errors import InputError

FILE_NAME = "prefix-pages.bin"
KEY_BYTES = 32

_FILE_HEADER = struct.Struct("<8s32sQ")  # magic, layout, record_bytes
_FILE_HEADER_BYTES = 4096
_MAGIC = b"OV41PFX1"
_SLOT = struct.Struct("<32sQ8s")  # key, generation, checksum of the record; then its own checksum
_SLOT_BYTES = 64
_CHECKSUM_BYTES = 8
_EMPTY = bytes(_SLOT_BYTES)
_GROUP_SLOTS = 64
_GROUP_HEADER_BYTES = _GROUP_SLOTS * _SLOT_BYTES

logger = logging.getLogger(__name__)


def key_of(parent_key: bytes, tokens: tuple[int | bytes, ...]) -> bytes:
    """Chain a page's key to that of the page before it (b"" for the first): it names the prefix.

    Tokens are token ids, or bytes for other content; the key is the same in every process.
    """
    assert all(type(token) in (int, bytes) for token in tokens), (
        f"keys are made of int and bytes, got {sorted({type(t).__name__ for t in tokens})}"
    )
    return hashlib.blake2b(repr(tokens).encode(), key=parent_key, digest_size=KEY_BYTES).digest()


class DiskTier:
    """A persistent store of records of ``record_bytes`` bytes; its file has at most ``max_bytes``.

    When full, the least recently used record makes room. Damaged records are dropped with a
    warning, and so is all that another ``fingerprint`` (model and layout of a page) or record size
    left in the folder. For one process and one thread at a time.
    """

    def __init__(
        self, folder: Path, *, record_bytes: int, fingerprint: str, max_bytes: int
    ) -> None:
        assert record_bytes > 0, f"record_bytes is {record_bytes}"
        self._path = folder / FILE_NAME
        self._record_bytes = record_bytes
        self._group_bytes = _GROUP_HEADER_BYTES + _GROUP_SLOTS * record_bytes
        layout = f"{record_bytes} {fingerprint}".encode()
        self._layout = hashlib.blake2b(layout, digest_size=32).digest()
        self._num_slots = self._count_slots(max_bytes)
        self._index: OrderedDict[bytes, tuple[int, bytes]] = OrderedDict()  # least recent first
        self._free: list[int] = []
        self._generation = 0
        self._is_open = self._is_writable = True
        with ExitStack() as stack:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
                stack.callback(os.close, self._file)
                self._lock()
                stored = self._prepare()
                size = self._record_start(self._num_slots - 1) + record_bytes
                os.ftruncate(self._file, size)
            except OSError as error:
                raise InputError(
                    f"the disk tier cannot use the folder {folder}: {error.strerror or error}; "
                    "name a folder on a local disk that you may write to"
                ) from error
            self._scan(stored)
            self._stack = stack.pop_all()

    def __len__(self) -> int:
        """Count the records."""
        return len(self._index)

    def __contains__(self, key: bytes) -> bool:
        """Tell whether there is a record; only ``get`` finds out whether it is sound."""
        return key in self._index

    @property
    def num_slots(self) -> int:
        """Number of records that fit."""
        return self._num_slots

    def get(self, key: bytes) -> bytes | None:
        """Read a record and mark it as used; None if there is none, or none that is sound."""
        assert self._is_open, f"{self._path} is closed"
        if key not in self._index:
            return None
        slot, checksum = self._index[key]
        record = self._read(self._record_start(slot), self._record_bytes)
        if self._digest(key, record) != checksum:
            logger.warning(
                "%s: record %s is damaged; it is dropped, and computed again",
                self._path,
                key.hex(),
            )
            del self._index[key]
            self._free.append(slot)
            self._write(self._header_start(slot), _EMPTY)
            return None
        self._use(key, slot, checksum)
        return record

    def put(self, key: bytes, record: bytes | bytearray | memoryview) -> None:
        """Store a record, or mark the one already under this key as used."""
        assert self._is_open, f"{self._path} is closed"
        data = memoryview(record).cast("B")
        assert len(key) == KEY_BYTES, f"a key has {KEY_BYTES} bytes, got {len(key)}"
        assert data.nbytes == self._record_bytes, (
            f"a record has {self._record_bytes} bytes, got {data.nbytes}"
        )
        if key in self._index:
            self._use(key, *self._index[key])
        elif self._is_writable:
            slot = self._free.pop() if self._free else self._reclaim()
            self._write(self._record_start(slot), data)
            if self._is_writable:
                self._use(key, slot, self._digest(key, data))

    def flush(self) -> None:
        """Put everything on the disk, so that it also survives a power cut."""
        try:
            os.fsync(self._file)
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Flush, and leave the folder to others."""
        if self._is_open:
            self._is_open = False
            self.flush()
            self._stack.close()

    def _count_slots(self, max_bytes: int) -> int:
        groups, rest = divmod(max(0, max_bytes - _FILE_HEADER_BYTES), self._group_bytes)
        last = max(0, rest - _GROUP_HEADER_BYTES) // self._record_bytes
        if not groups and not last:
            least = _FILE_HEADER_BYTES + _GROUP_HEADER_BYTES + self._record_bytes
            raise InputError(
                f"the disk tier may take {max_bytes} bytes, but one page record of "
                f"{self._record_bytes} bytes needs {least}; allow at least that"
            )
        return groups * _GROUP_SLOTS + last

    def _header_start(self, slot: int) -> int:
        group, index = divmod(slot, _GROUP_SLOTS)
        return _FILE_HEADER_BYTES + group * self._group_bytes + index * _SLOT_BYTES

    def _record_start(self, slot: int) -> int:
        group, index = divmod(slot, _GROUP_SLOTS)
        start = _FILE_HEADER_BYTES + group * self._group_bytes + _GROUP_HEADER_BYTES
        return start + index * self._record_bytes

    def _digest(self, *parts: bytes | memoryview) -> bytes:
        digest = hashlib.blake2b(key=self._layout, digest_size=_CHECKSUM_BYTES)
        for part in parts:
            digest.update(part)
        return digest.digest()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"the disk tier's folder {self._path.parent} is in use by another engine; "
                "stop that one or name another folder"
            ) from None

    def _prepare(self) -> int:
        """Make the file ours; return how many bytes of it may hold something."""
        wanted = _FILE_HEADER.pack(_MAGIC, self._layout, self._record_bytes)
        found = os.pread(self._file, len(wanted), 0)
        if found == wanted:
            unused = -self._num_slots % _GROUP_SLOTS  # of the last group, under a larger bound used
            self._write(self._header_start(self._num_slots - 1) + _SLOT_BYTES, _EMPTY * unused)
            return os.fstat(self._file).st_size
        if found:
            logger.warning(
                "%s is damaged, or of another model, layout or record size than %d bytes; it is "
                "emptied, and its pages are computed again",
                self._path,
                self._record_bytes,
            )
        os.ftruncate(self._file, 0)
        os.fsync(self._file)  # a power cut must not bring old slots back under a new header
        _write_all(self._file, 0, wanted)
        return 0

    def _scan(self, stored: int) -> None:
        """Read the slots' headers; only the first ``stored`` bytes of the file are not new."""
        found, lost = [], []
        headers = b""  # of a group
        for slot in reversed(range(self._num_slots)):
            group, index = divmod(slot, _GROUP_SLOTS)
            if not headers or index == _GROUP_SLOTS - 1:
                start = self._header_start(group * _GROUP_SLOTS)
                headers = self._read(start, _GROUP_HEADER_BYTES).ljust(_GROUP_HEADER_BYTES, b"\0")
            header = headers[index * _SLOT_BYTES : (index + 1) * _SLOT_BYTES]
            if header == _EMPTY:
                self._free.append(slot)
                continue
            fields, own = header[: _SLOT.size], header[_SLOT.size :][:_CHECKSUM_BYTES]
            is_cut = self._record_start(slot) + self._record_bytes > stored
            if is_cut or self._digest(fields) != own:
                lost.append(slot)
            else:
                key, generation, checksum = _SLOT.unpack(fields)
                found.append((generation, slot, key, checksum))
        for generation, slot, key, checksum in sorted(found):
            # Twice after a power cut, where the old slot was cleared, but not on the disk.
            if key in self._index:
                self._free.append(self._index[key][0])
            self._index[key] = (slot, checksum)
            self._index.move_to_end(key)
            self._generation = generation
        if lost:
            logger.warning(
                "%s: %d records are damaged or cut off; they are dropped, and computed again",
                self._path,
                len(lost),
            )
        for slot in lost:
            self._write(self._header_start(slot), _EMPTY)
            self._free.append(slot)

    def _use(self, key: bytes, slot: int, checksum: bytes) -> None:
        """Mark a record as used last, in its header too."""
        self._generation += 1
        self._index[key] = (slot, checksum)
        self._index.move_to_end(key)
        fields = _SLOT.pack(key, self._generation, checksum)
        self._write(self._header_start(slot), fields + self._digest(fields))

    def _reclaim(self) -> int:
        """Clear the slot of the least recently used record."""
        _, (slot, _) = self._index.popitem(last=False)
        self._write(self._header_start(slot), _EMPTY)
        return slot

    def _read(self, start: int, count: int) -> bytes:
        """Read up to ``count`` bytes: fewer where the file ends, none where it cannot be read."""
        try:
            return os.pread(self._file, count, start)
        except OSError as error:
            logger.warning("%s: %s", self._path, error.strerror or error)
            return b""

    def _write(self, start: int, data: bytes | memoryview) -> None:
        """Write unless writing failed before; the cache goes on without what cannot be stored."""
        if not self._is_writable:
            return
        try:
            _write_all(self._file, start, data)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._is_writable = False
        logger.warning("%s: %s; no more pages are stored", self._path, error.strerror or error)


def _write_all(file: int, start: int, data: bytes | memoryview) -> None:
    rest = memoryview(data)
    while rest:
        written = os.pwrite(file, rest, start)
        start, rest = start + written, rest[written:]
