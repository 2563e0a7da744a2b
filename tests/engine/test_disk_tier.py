"""The disk tier on real files: restarts, death at every write, damage at every byte."""

import errno
import hashlib
import os
import re
import signal
import time
import warnings
from contextlib import closing
from unittest.mock import Mock

import pytest

from openv41.engine.disk_tier import FILE_NAME, DiskTier, key_of
from openv41.errors import InputError

pytestmark = pytest.mark.shapes

RECORD_BYTES = 24
HEADERS = 4096 + 64 * 64  # bytes before the first record


@pytest.fixture(autouse=True)
def no_sync(monkeypatch):
    """Spare the disk: what a process wrote outlives it without fsync."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


def key(number):
    return key_of(b"", (number,))


def record(number, size=RECORD_BYTES):
    return hashlib.shake_128(str(number).encode()).digest(size)


def open_tier(folder, *, slots=4, size=RECORD_BYTES, fingerprint="tiny"):
    limit = HEADERS + slots * size
    tier = DiskTier(folder, record_bytes=size, fingerprint=fingerprint, max_bytes=limit)
    assert tier.num_slots == slots
    return closing(tier)


def fill(folder, numbers, **options):
    with open_tier(folder, **options) as tier:
        for number in numbers:
            tier.put(key(number), record(number))


def read(tier, number):
    got = tier.get(key(number))
    assert got in (None, record(number, tier._record_bytes))
    return got is not None


def test_keys_stand_for_the_whole_prefix():
    first = key_of(b"", (1, 2))
    keys = [first, key_of(b"", (12,)), key_of(b"", (b"1", 2)), key_of(first, (3,))]
    keys += [key_of(keys[1], (3,)), key_of(b"", (1, 2, 3)), key_of(b"", ())]
    assert len(set(keys)) == len(keys)
    assert {len(k) for k in keys} == {32}
    # The same in every process, this year and next.
    assert first.hex() == "d41e17faf1d10936a31ee3e69db3f0ee6351537841e21f5695199947584b00d9"
    with pytest.raises(AssertionError, match=re.escape("int and bytes, got ['bool']")):
        key_of(b"", (True,))


def test_records_come_back(tmp_path):
    with open_tier(tmp_path / "new" / "folder") as tier:
        assert tier.get(key(1)) is None
        tier.put(key(1), record(1))
        tier.put(key(2), bytearray(record(2)))
        tier.put(key(1), record(1))
        assert tier.get(key(1)) == record(1)
        assert tier.get(key(2)) == record(2)
        assert key(1) in tier
        assert key(3) not in tier
        assert len(tier) == 2


def test_records_survive_a_restart(tmp_path, caplog):
    fill(tmp_path, range(3))
    with open_tier(tmp_path) as tier:
        assert [read(tier, n) for n in range(4)] == [True, True, True, False]
        assert len(tier) == 3
        tier.close()
        tier.close()
    assert not caplog.records


def test_the_least_recently_used_record_makes_room(tmp_path):
    with open_tier(tmp_path, slots=3) as tier:
        for number in range(3):
            tier.put(key(number), record(number))
        assert read(tier, 0)
        tier.put(key(3), record(3))
        assert [key(n) in tier for n in range(4)] == [True, False, True, True]
        tier.put(key(2), record(2))  # counts as a use
    with open_tier(tmp_path, slots=3) as tier:  # the order survives
        tier.put(key(4), record(4))
        assert [key(n) in tier for n in range(5)] == [False, False, True, True, True]
        tier.put(key(5), record(5))
        assert [read(tier, n) for n in range(6)] == [False, False, True, False, True, True]
        assert read(tier, 2)
    for number in (6, 7):
        fill(tmp_path, [number], slots=3)
    with open_tier(tmp_path, slots=3) as tier:
        assert [n for n in range(8) if read(tier, n)] == [2, 6, 7]


@pytest.mark.parametrize("slots", [1, 63, 64, 65, 130])
def test_the_size_is_bounded(tmp_path, slots):
    headers = 4096 * (1 + -(-slots // 64))
    limit = headers + slots * RECORD_BYTES
    options = {"record_bytes": RECORD_BYTES, "fingerprint": "tiny"}
    with closing(DiskTier(tmp_path, max_bytes=limit, **options)) as tier:
        assert tier.num_slots == slots
        for number in range(slots + 7):
            tier.put(key(number), record(number))
        assert len(tier) == slots
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]
    assert (tmp_path / FILE_NAME).stat().st_size == limit
    with closing(DiskTier(tmp_path, max_bytes=limit, **options)) as tier:
        assert all(read(tier, number) for number in range(7, slots + 7))


def test_another_bound_keeps_what_fits(tmp_path, caplog):
    fill(tmp_path, range(4))
    with open_tier(tmp_path, slots=2) as tier:
        assert [read(tier, n) for n in range(4)] == [True, True, False, False]
    with open_tier(tmp_path, slots=6) as tier:
        assert [read(tier, n) for n in range(4)] == [True, True, False, False]
        for number in range(4):
            tier.put(key(number), record(number))
        assert len(tier) == 4
    assert not caplog.records


def test_too_small_a_bound(tmp_path):
    text = re.escape("may take 8215 bytes, but one page record of 24 bytes needs 8216; allow")
    with pytest.raises(InputError, match=text):
        DiskTier(tmp_path, record_bytes=24, fingerprint="tiny", max_bytes=8215)
    with pytest.raises(InputError, match="may take 0 bytes"):
        DiskTier(tmp_path, record_bytes=24, fingerprint="tiny", max_bytes=0)


@pytest.mark.parametrize("other", [{"fingerprint": "thin"}, {"size": 12}, {"size": 25}])
def test_another_layout_is_never_misread(tmp_path, caplog, other):
    fill(tmp_path, range(3))
    with open_tier(tmp_path, **other) as tier:
        assert len(tier) == 0
        assert not any(key(n) in tier for n in range(3))
    (warning,) = caplog.messages
    assert f"{tmp_path / FILE_NAME} is damaged, or of another model, layout" in warning
    with open_tier(tmp_path) as tier:
        assert len(tier) == 0


def test_a_foreign_slot_is_never_misread(tmp_path, caplog):
    """Even where the file's header matches: the checksums know the layout."""
    fill(tmp_path / "thin", range(3), fingerprint="thin")
    fill(tmp_path / "tiny", [])
    foreign = (tmp_path / "thin" / FILE_NAME).read_bytes()
    ours = (tmp_path / "tiny" / FILE_NAME).read_bytes()
    (tmp_path / "tiny" / FILE_NAME).write_bytes(ours[:4096] + foreign[4096:])
    with open_tier(tmp_path / "tiny") as tier:
        assert len(tier) == 0
    assert len(caplog.messages) == 1
    assert "3 records are damaged or cut off" in caplog.messages[0]


def test_a_folder_has_one_user(tmp_path):
    text = re.escape(f"folder {tmp_path} is in use by another engine; stop that one")
    with open_tier(tmp_path), pytest.raises(InputError, match=text):
        open_tier(tmp_path)
    with open_tier(tmp_path) as tier:  # neither closing nor failing leaves a lock
        assert len(tier) == 0


def test_a_folder_in_use_by_another_process(tmp_path):
    ready, tell = os.pipe()
    child = fork(lambda: [open_tier(tmp_path), os.write(tell, b"x"), time.sleep(60)])
    try:
        assert os.read(ready, 1) == b"x"
        with pytest.raises(InputError, match="is in use by another engine"):
            open_tier(tmp_path)
    finally:
        kill(child)
        os.close(ready)
        os.close(tell)
    with open_tier(tmp_path) as tier:
        assert len(tier) == 0


def test_a_folder_that_cannot_be_used(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / FILE_NAME).mkdir()
    for folder, reason in [
        (tmp_path / "file", "File exists"),
        (tmp_path / "file" / "below", "Not a directory"),
        (tmp_path, "Is a directory"),
    ]:
        text = re.escape(f"cannot use the folder {folder}: {reason}; name a folder on a local disk")
        with pytest.raises(InputError, match=text):
            open_tier(folder)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(InputError, match="Permission denied"):
        open_tier(tmp_path)
    tmp_path.chmod(0o700)


def flips():
    """Bytes at the ends of every field of a file with four slots, three of them in use."""
    yield from (0, 7, 8, 39, 40, 47)  # magic, layout, record_bytes
    for slot in range(4):  # key, generation, checksum of the record, of the header, nothing
        yield from (4096 + slot * 64 + i for i in (0, 17, 31, 32, 39, 40, 47, 48, 55, 56, 63))
        yield from (HEADERS + slot * RECORD_BYTES + i for i in (0, 11, RECORD_BYTES - 1))


def test_a_flipped_byte_costs_one_record(tmp_path, caplog):
    fill(tmp_path, range(3))
    path = tmp_path / FILE_NAME
    whole = path.read_bytes()
    for place in flips():
        damaged = bytearray(whole)
        damaged[place] ^= 0x10
        path.write_bytes(damaged)
        caplog.clear()
        with open_tier(tmp_path) as tier:
            found = [n for n in range(3) if read(tier, n)]
            in_header = place < HEADERS
            slot = (place - 4096) // 64 if in_header else (place - HEADERS) // RECORD_BYTES
            if place < 4096:
                expected, warnings = [], 1
            elif slot == 3:  # empty: only its header matters
                expected, warnings = [0, 1, 2], int(in_header)
            elif in_header and (place - 4096) % 64 >= 56:  # not used
                expected, warnings = [0, 1, 2], 0
            else:
                expected, warnings = [n for n in range(3) if n != slot], 1
            assert (place, found, len(caplog.messages)) == (place, expected, warnings)
            for number in range(3):
                tier.put(key(number), record(number))
        with open_tier(tmp_path) as tier:
            assert [read(tier, n) for n in range(3)] == [True] * 3
        assert len(caplog.messages) == warnings


@pytest.mark.parametrize(
    ("size", "left", "warnings"),
    [
        (0, 0, 0),
        (1, 0, 1),
        (47, 0, 1),
        (48, 0, 0),
        (4096 + 64, 0, 1),
        (4096 + 2 * 64 + 10, 0, 1),
        (HEADERS, 0, 1),
        (HEADERS + RECORD_BYTES - 1, 0, 1),
        (HEADERS + RECORD_BYTES, 1, 1),
        (HEADERS + 3 * RECORD_BYTES - 1, 2, 1),
        (HEADERS + 3 * RECORD_BYTES, 3, 0),
    ],
)
def test_a_file_cut_short(tmp_path, caplog, size, left, warnings):
    fill(tmp_path, range(3))
    os.truncate(tmp_path / FILE_NAME, size)
    for _ in range(2):
        with open_tier(tmp_path) as tier:
            assert [read(tier, n) for n in range(3)] == [n < left for n in range(3)]
            assert len(tier) == left
        assert len(caplog.messages) == warnings
    fill(tmp_path, range(4))
    with open_tier(tmp_path) as tier:
        assert all(read(tier, n) for n in range(4))


@pytest.mark.parametrize("restart", [False, True])
def test_damage_while_open(tmp_path, caplog, restart):
    with open_tier(tmp_path) as tier:
        tier.put(key(1), record(1))
        with (tmp_path / FILE_NAME).open("r+b") as file:
            file.seek(HEADERS + 5)
            file.write(b"?")
        assert key(1) in tier
        assert tier.get(key(1)) is None
        assert key(1) not in tier
        if not restart:
            put_and_read_all(tier)
    if restart:
        with open_tier(tmp_path) as tier:
            assert len(tier) == 0
            put_and_read_all(tier)
    (warning,) = caplog.messages
    assert f"record {key(1).hex()} is damaged; it is dropped" in warning


def put_and_read_all(tier):
    for number in range(tier.num_slots):
        tier.put(key(number), record(number))
    assert all(read(tier, number) for number in range(tier.num_slots))


def test_one_key_in_two_slots(tmp_path):
    """As a power cut can leave it: the slot used last counts, the other is free."""
    path = tmp_path / FILE_NAME
    fill(tmp_path, [0, 1, 2])
    old = path.read_bytes()
    fill(tmp_path, [3, 4, 0, 1, 0])  # slots: 4, 0, 1, 3
    new = bytearray(path.read_bytes())
    for part in (slice(4096, 4096 + 64), slice(HEADERS, HEADERS + RECORD_BYTES)):
        new[part] = old[part]  # slots: 0, 0, 1, 3
    path.write_bytes(new)
    with open_tier(tmp_path) as tier:
        assert len(tier) == 3
        assert tier._index[key(0)][0] == 1
        tier.put(key(9), record(9))
        assert [n for n in range(10) if read(tier, n)] == [0, 1, 3, 9]


def test_a_full_disk_stops_storing(tmp_path, caplog, monkeypatch):
    real = os.pwrite

    def pwrite(file, data, start):
        if start >= HEADERS + 2 * RECORD_BYTES:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data[: len(data) // 2 + 1], start)  # short writes are no error

    monkeypatch.setattr(os, "pwrite", pwrite)
    with open_tier(tmp_path) as tier:
        for number in range(4):
            tier.put(key(number), record(number))
        assert [read(tier, n) for n in range(4)] == [True, True, False, False]
    assert caplog.messages == [
        f"{tmp_path / FILE_NAME}: No space left on device; no more pages are stored"
    ]
    monkeypatch.undo()
    with open_tier(tmp_path) as tier:
        assert [read(tier, n) for n in range(4)] == [True, True, False, False]
        tier.put(key(2), record(2))
        assert read(tier, 2)


def test_a_broken_disk_still_reads(tmp_path, caplog, monkeypatch):
    def pwrite(file, data, start):
        raise OSError(errno.EIO, "Input/output error")

    with open_tier(tmp_path) as tier:
        for number in range(4):
            tier.put(key(number), record(number))
        monkeypatch.setattr(os, "pwrite", pwrite)
        for number in range(4, 8):
            tier.put(key(number), record(number))
        assert [read(tier, n) for n in range(8)] == [False] + [True] * 3 + [False] * 4
    assert len(caplog.messages) == 1
    monkeypatch.undo()
    with open_tier(tmp_path) as tier:
        assert [read(tier, n) for n in range(8)] == [True] * 4 + [False] * 4


def test_a_file_that_is_cut_off_while_open(tmp_path, caplog):
    """Its records are damaged; no access ends the process."""
    with open_tier(tmp_path) as tier:
        for number in range(3):
            tier.put(key(number), record(number))
        os.truncate(tmp_path / FILE_NAME, HEADERS)
        assert [read(tier, n) for n in range(3)] == [False] * 3
        assert len(caplog.messages) == 3
        tier.put(key(3), record(3))
        assert read(tier, 3)
    with open_tier(tmp_path) as tier:
        assert [read(tier, n) for n in range(4)] == [False] * 3 + [True]


def test_a_disk_that_cannot_be_read(tmp_path, caplog, monkeypatch):
    with open_tier(tmp_path) as tier:
        tier.put(key(0), record(0))
        monkeypatch.setattr(os, "pread", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
        assert not read(tier, 0)
    assert caplog.messages[0] == f"{tmp_path / FILE_NAME}: Input/output error"


def test_a_closed_tier_touches_no_file(tmp_path):
    with open_tier(tmp_path) as tier:
        tier.put(key(0), record(0))
    for use in (lambda: tier.get(key(0)), lambda: tier.put(key(1), record(1))):
        with pytest.raises(AssertionError, match=f"{FILE_NAME} is closed"):
            use()


def test_a_failing_flush_is_reported(tmp_path, caplog, monkeypatch):
    synced = []
    with open_tier(tmp_path) as tier:
        tier.put(key(1), record(1))
        monkeypatch.setattr(os, "fsync", synced.append)
        tier.flush()
        assert synced == [tier._file]

        def fail(file):
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(os, "fsync", fail)
    assert caplog.messages == [
        f"{tmp_path / FILE_NAME}: Input/output error; no more pages are stored"
    ]
    with open_tier(tmp_path) as tier:
        assert read(tier, 1)


class Death(BaseException):
    """Ends the process, as far as the files can tell."""


@pytest.mark.parametrize("fraction", [0.0, 0.3, 1.0])
def test_death_at_every_write(tmp_path, caplog, monkeypatch, fraction):
    real = os.pwrite

    def live(folder, writes):
        """Fill two slots with four records; die in the midst of a write."""

        def pwrite(file, data, start):
            nonlocal writes
            writes -= 1
            if writes < 0:
                real(file, data[: int(len(data) * fraction)], start)
                raise Death
            return real(file, data, start)

        monkeypatch.setattr(os, "pwrite", pwrite)
        with open_tier(folder, slots=2) as tier:
            for number in range(4):
                tier.put(key(number), record(number))
                assert tier.get(key(number)) == record(number)

    for writes in range(100):
        folder = tmp_path / str(writes)
        try:
            live(folder, writes)
            break
        except Death:
            monkeypatch.setattr(os, "pwrite", real)
        caplog.clear()
        with open_tier(folder, slots=2) as tier:
            found = [n for n in range(4) if read(tier, n)]
            assert len(caplog.messages) <= 1
            for number in range(4, 6):
                tier.put(key(number), record(number))
            assert all(read(tier, n) for n in range(4, 6))
        assert len(found) >= (writes >= 4)
    assert writes == 1 + 2 * 3 + 2 * 4  # file header; record, header, use; the same and clear


def fork(run):
    """Run a function in a child process that never comes back."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about threads, which do not matter
        child = os.fork()
    if not child:
        try:
            run()
        finally:
            os._exit(1)
    return child


def kill(child):
    os.kill(child, signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


def test_kill_while_writing(tmp_path, caplog):
    size = 1 << 20
    records = [record(number, size) for number in range(7)]
    ready, tell = os.pipe()

    def put_forever():
        with open_tier(tmp_path, slots=3, size=size) as tier:
            for turn in range(1_000_000):
                tier.put(key(turn % 7), records[turn % 7])
                if turn == 7:
                    os.write(tell, b"x")

    for attempt in range(8):
        child = fork(put_forever)
        assert os.read(ready, 1) == b"x"
        time.sleep(0.0007 * attempt)
        kill(child)
        with open_tier(tmp_path, slots=3, size=size) as tier:
            assert 2 <= len(tier) <= 3  # at most the one that was being written is lost
            got = [tier.get(key(number)) for number in range(7)]
            assert sum(g is not None for g in got) == len(tier)
            assert all(g in (None, r) for g, r in zip(got, records, strict=True))
    os.close(ready)
    os.close(tell)
    assert not caplog.messages
