"""Prefix reuse: what a new prompt can take over from earlier ones. Report §2.2.

Shared pages hold main KV and index keys, never window KV. A hit in exact mode restores windows from
a snapshot or replays as many rows as its layers see; in bounded mode it replays the last window of
rows, and what is computed after such a replay goes into a tree of its own.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import torch

from openv41 import ops
from openv41.engine.disk_tier import DiskTier, key_of
from openv41.engine.job import Job
from openv41.engine.paged_store import PagedStore, Snapshot
from openv41.engine.pages import OutOfPages
from openv41.engine.prefix_tree import Match, PrefixTree
from openv41.errors import ConfigError
from openv41.layers.store import Slot
from openv41.model.prefill import PrefillMode, PromptRows, ReplayVariant, first_needed, prompt_rows

Keys = Sequence[int | bytes]  # of positions: token ids, or an image's content

logger = logging.getLogger(__name__)


class PrefixCache:
    """The prefix cache of an engine: trees in memory, snapshots of windows, records on disk."""

    def __init__(
        self,
        store: PagedStore,
        *,
        cut: int | None,
        max_snapshots: int,
        disk: DiskTier | None = None,
        variant: ReplayVariant = ReplayVariant.FIRST_LAYER_FULL_WINDOW,
        tail: int = 1,
    ) -> None:
        """``tail`` rows at the end of a prompt are wanted of every layer; a drafter reads more."""
        size = store.cache.page_size
        self._store, self._cut, self._size, self._variant = store, cut, size, variant
        self._exact = PrefixTree(store.allocator, size, max_snapshots=max_snapshots)
        self._approximate = PrefixTree(store.allocator, size, max_snapshots=0)
        self._tail = tail
        self._has_snapshots = max_snapshots > 0
        self.disk = disk
        self.hit_tokens = 0

    def __len__(self) -> int:
        """Pages that the cache holds; one that both trees hold is one."""
        return self._store.allocator.num_cached

    def adopt(self, job: Job, *, reuse: bool) -> None:
        """Let an open, empty request continue from the longest known prefix of its tokens."""
        known, rows, is_approximate = 0, self._rows(job, 0), False
        if reuse:
            known, rows, is_approximate = self._take_over(job)
        job.is_approximate, job.rows, job.done = is_approximate, rows, rows.start
        if job.cached_tokens is None:  # what a preempted request finds again was its own
            job.cached_tokens = known
            self.hit_tokens += known

    def keep(self, job: Job, *, ends: bool) -> None:
        """Remember the whole pages of a job, and the last one too where it ``ends``."""
        length = job.done if ends else job.done - job.done % self._size
        if length <= job.kept_pages * self._size:
            return
        tree = self._approximate if job.is_approximate else self._exact
        old, new = job.kept_pages, length // self._size
        after = job.kept_node if job.kept_node is not None and job.kept_node in tree else None
        begin = 0 if after is None else old
        pages = self._store.pages_of(job.number, length)[begin:]
        keys = job.keys(begin * self._size, length)
        job.kept_pages, job.kept_node = new, tree.insert(keys, pages, after=after)
        if not job.is_approximate:
            self._take_snapshot(job)
            self._save_to_disk(job, old, new)

    def make_room(self, count: int) -> int:
        """Free pages that only the cache holds."""
        freed = self._approximate.evict(count)
        return freed + self._exact.evict(count - freed)

    def can_make_room(self, count: int) -> bool:
        """Whether ``make_room`` would free that many."""
        pages = chain(self._approximate.evictable(), self._exact.evictable())
        dropped: Counter[int] = Counter()
        while count > 0 and (page := next(pages, None)) is not None:
            dropped[page] += 1
            count -= dropped[page] == self._store.allocator.references(page)
        return count <= 0

    def make_room_for(self, job: Job, count: int) -> None:
        """Free pages, those of the job's own prefix last, so that ``count`` of its tokens fit."""
        keys = job.keys(0, len(job.tokens) - 1)
        known = max(tree.match(keys).length for tree in (self._approximate, self._exact))
        needed = -(-min(count, job.pending - known) // self._size) + 1
        self.make_room(max(0, needed - self._store.allocator.free))

    def close(self) -> None:
        """Forget everything, and put what is on the disk in order."""
        self.clear()
        if self.disk is not None:
            self.disk.close()

    def clear(self) -> None:
        """Forget everything that is in memory."""
        self._exact.clear()
        self._approximate.clear()

    def _take_over(self, job: Job) -> tuple[int, PromptRows, bool]:
        """Find what is cached of a job and let it have that.

        Returns how many positions it knows now, the rows to compute, and whether what they become
        is not that of the model.
        """
        match, is_approximate = self._match(job)
        known, bounded = match.length, job.mode is PrefillMode.BOUNDED
        if not known:
            return 0, self._rows(job, 0), False
        rows = self._rows(job, known)
        snapshot = None if bounded else self._snapshot(job, known, rows.start)
        if snapshot is not None:
            rows = self._rows(job, known, restored=snapshot.position)
        if not self._share(job, match, rows.start):
            return 0, self._rows(job, 0), False
        if snapshot is not None:
            self._store.restore(job.number, snapshot)
        return known, rows, is_approximate or (bounded and rows.start > 0)

    def _match(self, job: Job) -> tuple[Match, bool]:
        """The longest known prefix, and whether it is one of those after a bounded replay."""
        keys = job.keys(0, len(job.tokens) - 1)
        match = self._exact.match(keys)
        if self.disk is not None:
            match = self._load_from_disk(job, keys, match)
        if job.mode is PrefillMode.BOUNDED:
            other = self._approximate.match(keys)
            if other.length > match.length:
                return other, True
        return match, False

    def _share(self, job: Job, match: Match, start: int) -> bool:
        """Give a job the pages of a match; False if there is none for its partly known page."""
        allocator = self._store.allocator
        allocator.share(match.pages)  # so that none makes room
        try:
            if match.length % self._size and not allocator.free:
                self.make_room(1)
            recent = job.images.masked(job.tokens[:start], ops.DEAD)
            self._store.adopt(job.number, match.pages, match.length, recent, start)
        except OutOfPages:
            return False
        finally:
            allocator.release(match.pages)
        return True

    def _rows(self, job: Job, known: int, restored: int | None = None) -> PromptRows:
        return prompt_rows(
            self._store.config,
            job.mode,
            len(job.tokens),
            cut=self._cut,
            known=known,
            restored=restored,
            variant=self._variant,
            tail=self._tail,
        )

    def _snapshot(self, job: Job, known: int, start: int) -> Snapshot | None:
        """The deepest snapshot that saves rows of a replay and has the windows that are needed."""
        config, keys = self._store.config, job.keys(0, known)
        for position, kept in self._exact.snapshots(keys, known):
            assert isinstance(kept, Snapshot), f"{kept!r} is no snapshot"
            if position <= start:
                return None
            if kept.rows.keys() >= self._store.windows:
                return kept
            cut = self._cut if job.mode is PrefillMode.EXACT else None
            if cut and all(Slot("window", layer) in kept.rows for layer in range(cut)):
                needed = first_needed(config, len(job.tokens), cut, known, self._tail)
                if needed[cut] - (config.attention.window_size - 1) >= position:
                    return kept
        return None

    def takes_snapshot(self, job: Job) -> bool:
        """Whether ``keep`` will copy windows of the job."""
        position = job.done - job.done % self._size
        is_new = position not in (0, job.snapshot_at) and not job.is_approximate
        is_near = job.done - position <= self._store.cache.draft_tokens
        return self._has_snapshots and is_new and is_near and job.mode is not PrefillMode.BOUNDED

    def _take_snapshot(self, job: Job) -> None:
        if self.takes_snapshot(job):
            job.snapshot_at = job.done - job.done % self._size
            assert job.kept_node is not None, "no page of the job was kept"
            node = next(node for node in job.kept_node.path() if node.end == job.snapshot_at)
            self._exact.attach(node, self._store.snapshot(job.number, job.snapshot_at))

    def _names(self, job: Job, first: int, stop: int) -> list[bytes]:
        """What the disk knows some whole pages of a job by."""
        names, size = job.page_keys, self._size
        for page in range(len(names), stop):
            keys = job.keys(page * size, (page + 1) * size)
            names.append(key_of(names[-1] if names else b"", tuple(keys)))
        return names[first:stop]

    def _save_to_disk(self, job: Job, first: int, stop: int) -> None:
        """Save some whole pages of a job, those that are new with one copy from the device."""
        if self.disk is None:
            return
        pages = self._store.pages_of(job.number, stop * self._size)[first:]
        named = zip(self._names(job, first, stop), pages, strict=True)
        new = {name: page for name, page in named if name not in self.disk}
        if new:
            records = self._store.read_pages(list(new.values())).cpu().numpy()
            for name, record in zip(new, records, strict=True):
                self.disk.put(name, record.tobytes())

    def _load_from_disk(self, job: Job, keys: Keys, match: Match) -> Match:
        """Bring the pages that follow a match back from the disk."""
        assert self.disk is not None, "no disk tier"
        store, first = self._store, match.length // self._size
        store.allocator.share(match.pages)
        loaded: list[int] = []
        try:
            for name in self._names(job, first, len(keys) // self._size):
                if (record := self.disk.get(name)) is None:
                    break
                if not store.allocator.free and not self.make_room(1):
                    break
                loaded += store.allocator.take(1)
                data = torch.frombuffer(bytearray(record), dtype=torch.uint8)
                store.write_page(loaded[-1], data.to(store.device))
            if loaded:
                length = (first + len(loaded)) * self._size
                self._exact.insert(keys[:length], [*match.pages[:first], *loaded])
        finally:
            store.allocator.release(match.pages)
            store.allocator.release(loaded)
        return self._exact.match(keys)


def open_disk(
    store: PagedStore, folder: Path | None, fingerprint: str, max_bytes: int
) -> DiskTier | None:
    """Open the persistent tier for the pages of a store; None without a folder.

    Raises ConfigError where no fingerprint says whose pages they are.
    """
    if folder is None:
        return None
    if not fingerprint:
        problem = (
            "disk_folder is set but fingerprint is empty, so that pages of other weights would "
            "be taken for this model's; name the weights, or use Engine.load, which does"
        )
        raise ConfigError("engine", [problem])
    return DiskTier(
        folder, record_bytes=store.page_bytes(), fingerprint=fingerprint, max_bytes=max_bytes
    )
