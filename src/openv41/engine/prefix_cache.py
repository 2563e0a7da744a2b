"""Prefix reuse: what a new prompt can take over from earlier ones. Report §2.2.

Shared pages hold main KV and index keys, never window KV. A hit in exact mode restores windows from
a snapshot or replays as many rows as its layers see; in bounded mode it replays the last window of
rows, and what is computed after such a replay goes into a tree of its own.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from openv41 import ops
from openv41.engine.disk_tier import DiskTier, key_of
from openv41.engine.job import Job
from openv41.engine.paged_store import PagedStore, Snapshot
from openv41.engine.pages import OutOfPages
from openv41.engine.prefix_tree import Match, PrefixTree
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
    ) -> None:
        size = store.cache.page_size
        self._store, self._cut, self._size, self._variant = store, cut, size, variant
        self._exact = PrefixTree(store.allocator, size, max_snapshots=max_snapshots)
        self._approximate = PrefixTree(store.allocator, size, max_snapshots=0)
        self._takes_snapshots = max_snapshots > 0
        self.disk = disk
        self.hit_tokens = 0

    def __len__(self) -> int:
        """Pages that the cache holds."""
        return len(self._exact) + len(self._approximate)

    def adopt(self, job: Job, *, reuse: bool) -> None:
        """Let an open, empty request continue from the longest known prefix of its tokens."""
        if not reuse:
            job.rows, job.done, job.cached_tokens = self._rows(job, 0), 0, 0
            return
        store, bounded = self._store, job.mode is PrefillMode.BOUNDED
        keys = job.keys(len(job.tokens) - 1)
        match = self._exact.match(keys)
        if self.disk is not None:
            match = self._load_from_disk(job, keys, match)
        if bounded:
            other = self._approximate.match(keys)
            if other.length > match.length:
                match, job.is_approximate = other, True
        known = match.length
        rows = self._rows(job, known)
        snapshot = None if bounded or not known else self._snapshot(job, keys, known, rows.start)
        if snapshot is not None:
            rows = self._rows(job, known, restored=snapshot.position)
        if known:
            try:
                recent = job.images.masked(job.tokens[: rows.start], ops.DEAD)
                store.adopt(job.number, match.pages, known, recent, rows.start)
            except OutOfPages:  # not even one for the partly known page
                known, rows, snapshot = 0, self._rows(job, 0), None
        if snapshot is not None:
            store.restore(job.number, snapshot)
        job.is_approximate |= bounded and rows.start > 0
        job.rows, job.done, job.cached_tokens = rows, rows.start, known
        self.hit_tokens += known

    def keep(self, job: Job, *, ends: bool) -> None:
        """Remember the whole pages of a job, and the last one too where it ``ends``."""
        length = job.done if ends else job.done - job.done % self._size
        if length <= job.kept_pages * self._size:
            return
        whole, known = length // self._size, job.kept_pages
        job.kept_pages = whole
        tree = self._approximate if job.is_approximate else self._exact
        pages = self._store.pages_of(job.number, length)
        keys = job.keys(length)
        tree.insert(keys, pages)
        if not job.is_approximate:
            self._take_snapshot(job, keys)
            self._save_to_disk(job, keys, pages[known:whole])

    def make_room(self, count: int) -> int:
        """Free pages that only the cache holds."""
        freed = self._approximate.evict(count)
        return freed + self._exact.evict(count - freed)

    def close(self) -> None:
        """Forget everything, and put what is on the disk in order."""
        self.clear()
        if self.disk is not None:
            self.disk.close()

    def clear(self) -> None:
        """Forget everything that is in memory."""
        self._exact.clear()
        self._approximate.clear()

    def _rows(self, job: Job, known: int, restored: int | None = None) -> PromptRows:
        return prompt_rows(
            self._store.config,
            job.mode,
            len(job.tokens),
            cut=self._cut,
            known=known,
            restored=restored,
            variant=self._variant,
        )

    def _snapshot(self, job: Job, keys: Keys, known: int, start: int) -> Snapshot | None:
        """The deepest snapshot that saves rows of a replay and has the windows that are needed."""
        config = self._store.config
        for position, kept in self._exact.snapshots(keys, known):
            assert isinstance(kept, Snapshot), f"{kept!r} is no snapshot"
            if position <= start:
                return None
            if all(Slot("window", layer) in kept.rows for layer in range(config.num_layers)):
                return kept
            cut = self._cut if job.mode is PrefillMode.EXACT else None
            if cut and all(Slot("window", layer) in kept.rows for layer in range(cut)):
                needed = first_needed(config, len(job.tokens), cut, known)
                if needed[cut] - (config.attention.window_size - 1) >= position:
                    return kept
        return None

    def _take_snapshot(self, job: Job, keys: Keys) -> None:
        position = job.done - job.done % self._size
        if position in (0, job.snapshot_at) or job.mode is PrefillMode.BOUNDED:
            return
        if self._takes_snapshots and job.done - position <= self._store.cache.draft_tokens:
            job.snapshot_at = position
            snapshot = self._store.snapshot(job.number, position)
            self._exact.attach(keys[:position], snapshot)

    def _extend_keys(self, names: list[bytes], keys: Keys) -> None:
        """Add the names of whole pages that ``names`` does not reach yet."""
        for page in range(len(names), len(keys) // self._size):
            of_page = tuple(keys[page * self._size : (page + 1) * self._size])
            names.append(key_of(names[-1] if names else b"", of_page))

    def _save_to_disk(self, job: Job, keys: Keys, new_pages: Sequence[int]) -> None:
        """Save the newest whole pages of a job."""
        if self.disk is None or not new_pages:
            return
        self._extend_keys(job.page_keys, keys)
        first = job.kept_pages - len(new_pages)
        for key, page in zip(job.page_keys[first : job.kept_pages], new_pages, strict=True):
            if key not in self.disk:
                self.disk.put(key, self._store.read_page(page).cpu().numpy().tobytes())

    def _load_from_disk(self, job: Job, keys: Keys, match: Match) -> Match:
        """Bring the pages that follow a match back from the disk."""
        assert self.disk is not None, "no disk tier"
        store, first = self._store, match.length // self._size
        self._extend_keys(job.page_keys, keys)
        store.allocator.share(match.pages)
        loaded: list[int] = []
        try:
            for key in job.page_keys[first : len(keys) // self._size]:
                if (record := self.disk.get(key)) is None:
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


def open_disk(store: PagedStore, folder: Path, fingerprint: str, max_bytes: int) -> DiskTier:
    """Open the persistent tier for the pages of a store."""
    return DiskTier(
        folder, record_bytes=store.page_bytes(), fingerprint=fingerprint, max_bytes=max_bytes
    )
