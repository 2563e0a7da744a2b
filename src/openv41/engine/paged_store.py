"""The engine's cache: pages of main KV and index keys, rings of everything else. Report §2.4.4.

A page holds what ``page_size`` positions leave in every kv source: ``page_size / ratio`` entries of
main KV and as many index keys, each source in storage of its own. Pages are shared by reference;
what a request has found there (its frozen entries) it never writes again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int, Int64, Shaped, UInt8
from torch import Tensor

from openv41.config import ModelConfig, NumericsConfig
from openv41.engine.pages import PageAllocator
from openv41.engine.rings import Addresses, Ahead, Ring, RingBounds, ring_addresses, ring_slots
from openv41.errors import ConfigError, InputError
from openv41.layers.store import PackedRows, Place, Slot, Spans
from openv41.model.cache_formats import RowFormat, row_format

TOKENS = Slot("tokens", -1)
POISON_BYTE = 0xFF  # NaN as a scale of every packed format


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheConfig:
    """Sizes of the cache."""

    num_pages: int = 1024
    page_size: int = 64  # positions of a page
    max_requests: int = 16  # places in the rings
    draft_tokens: int = 8  # positions that a truncation may take back without a replay
    poison: bool = False  # fill what nobody owns with NaN

    def __post_init__(self) -> None:
        names = ("num_pages", "page_size", "max_requests")
        problems = [
            f"{name} is {getattr(self, name)}, must be at least 1"
            for name in names
            if getattr(self, name) < 1
        ]
        if self.draft_tokens < 0:
            problems.append(f"draft_tokens is {self.draft_tokens}, must be at least 0")
        if self.page_size % 2:
            problems.append(f"page_size is {self.page_size}, must be even: groups are of 2 tokens")
        if problems:
            raise ConfigError("cache", problems)


@dataclass
class _Held:
    """What one request holds."""

    place: int
    pages: list[int] = field(default_factory=list)
    frozen: int = 0  # positions whose entries were found in shared pages
    ahead: Ahead | None = None
    has_windows: bool = False  # as ``has_whole_windows`` found
    table: Int64[Tensor, " pages"] = field(
        default_factory=lambda: torch.empty(0, dtype=torch.int64)
    )


@dataclass(frozen=True, eq=False)
class Snapshot:
    """Rows of the rings before a position, as stored; of layers whose window is whole there."""

    position: int
    rows: dict[Slot, Shaped[Tensor, "rows ..."]]


class PagedStore:
    """A KVStore over pages and rings; requests must be opened and their pages reserved."""

    def __init__(
        self,
        config: ModelConfig,
        numerics: NumericsConfig,
        cache: CacheConfig,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        draft_stages: int = 0,
    ) -> None:
        """Layers behind the model's, ``draft_stages`` of them, have window KV too."""
        self.config, self.cache, self.dtype = config, cache, dtype
        self.device = torch.device(device)
        self.allocator = PageAllocator(cache.num_pages)
        self._held: dict[int, _Held] = {}
        self._free_places = list(reversed(range(cache.max_requests)))
        self._formats = {
            kind: row_format(config, kind, numerics, dtype)
            for kind in ("window", "pending", "main", "index")
        }
        self.pages = {
            Slot(kind, source): self._storage(kind, cache.num_pages * self._per_page(source))
            for source in config.kv_sources
            for kind in ("main", "index")
        }
        pending = tuple(s for s in config.kv_sources if config.compress_ratios[s] > 1)
        layers = config.num_layers + draft_stages
        self.rings = {slot: self._ring(slot) for slot in ring_slots(layers, pending)}
        self.windows = {slot for slot in self.rings if slot.kind == "window"}
        stages = [r for s, r in self.rings.items() if s != TOKENS and not self._is_behind(s)]
        for ring in stages[1:]:
            ring.bounds = stages[0].bounds  # they are written together
        self._noted = [self.rings[TOKENS], *stages[:1]]
        # Cleared when any request gets a page or closes: they hold page_size steps at most.
        self._addresses: dict[tuple[Spans, int], Addresses] = {}
        self._entry_rows: dict[tuple[Spans, int], Int64[Tensor, " rows"]] = {}
        self._tables: dict[tuple[int, ...], Int64[Tensor, "B pages"]] = {}

    # requests

    def open(self, request: int) -> None:
        """Give a request its place; it holds no page yet."""
        assert request not in self._held, f"request {request} is open already"
        if not self._free_places:
            raise InputError(
                f"{self.cache.max_requests} requests are open; close one, or allow more "
                "(max_requests)"
            )
        self._held[request] = _Held(self._free_places.pop())

    def close(self, request: int) -> None:
        """Forget a request; pages that nobody else holds are free again."""
        held = self._held.pop(request)
        self._release(held.pages)
        for ring in self.rings.values():
            ring.bounds.pop(held.place, None)
            if self.cache.poison:
                _poison(ring.rows[held.place * ring.size : (held.place + 1) * ring.size])
        self._free_places.append(held.place)
        self._forget_addresses()

    def reserve(self, request: int, stop: int) -> None:
        """Hold pages for every position below ``stop``. Raises OutOfPages and then takes none."""
        held = self._held[request]
        missing = -(-stop // self.cache.page_size) - len(held.pages)
        if missing > 0:
            held.pages += self.allocator.take(missing)
            self._renew_table(held)

    def pages_missing(self, request: int, stop: int) -> int:
        """Pages that ``reserve`` would take."""
        return max(0, -(-stop // self.cache.page_size) - len(self._held[request].pages))

    def pages_of(self, request: int, length: int) -> list[int]:
        """Pages that hold the first ``length`` positions."""
        return self._held[request].pages[: -(-length // self.cache.page_size)]

    def adopt(
        self, request: int, pages: Sequence[int], known: int, recent: Sequence[int], start: int
    ) -> None:
        """Let an empty request continue at ``start`` with pages that know ``known`` positions.

        The last page is copied where only a part of it is known. ``recent`` are the token ids
        right before ``start``.
        """
        held = self._held[request]
        assert not held.pages, f"request {request} holds pages already"
        whole, rest = divmod(known, self.cache.page_size)
        own = self.allocator.take(1) if rest else []
        self.allocator.share(pages[:whole])
        held.pages = [*pages[:whole], *own]
        held.frozen = known
        if rest:
            self._copy_page(pages[whole], own[0])
        self._renew_table(held)
        self._put_tokens(held, recent, start)

    def snapshot(self, request: int, position: int) -> Snapshot:
        """Copy what the rings hold right before a position, of layers with a whole window."""
        held, rows = self._settled(request), {}
        for slot, ring in self.rings.items():
            bounds = ring.bounds.get(held.place, RingBounds())
            own = slot.layer < self.config.num_layers  # a token sees itself; a draft does not
            reach = min(position, self.config.attention.window_size - own)
            count = min(reach if slot.kind == "window" else ring.size, bounds.rows_before(position))
            if slot.kind != "window" or count == reach:
                span = Spans((request,), (position - count,), (position,))
                rows[slot] = ring.rows[self._ring_rows(span, ring.size).rows].clone()
        return Snapshot(position, rows)

    def restore(self, request: int, snapshot: Snapshot) -> None:
        """Put a snapshot's rows back; the request continues at its position."""
        held = self._settled(request)
        for slot, rows in snapshot.rows.items():
            ring = self.rings[slot]
            span = Spans((request,), (snapshot.position - len(rows),), (snapshot.position,))
            ring.rows[self._ring_rows(span, ring.size).rows] = rows
            bounds = ring.bounds.setdefault(held.place, RingBounds())
            bounds.first, bounds.stop = span.firsts[0], span.stops[0]
            bounds.high = bounds.stop

    # the KVStore protocol

    def write(
        self,
        slot: Slot,
        spans: Spans,
        rows: Shaped[Tensor, "rows ..."],
        unrounded: Shaped[Tensor, "rows ..."],
    ) -> None:
        """Set rows; entries that a request found in shared pages stay as they are."""
        if slot in self.rings:
            ring, places = self.rings[slot], self._places(spans.requests, slot)
            source = rows if slot == TOKENS else unrounded.detach()
            ring.write(places, spans, self._ring_rows(spans, ring.size), source)
            return
        ratio = self.config.compress_ratios[slot.layer]
        firsts, fresh = self._fresh(spans, ratio), unrounded.detach()
        if firsts != spans.firsts:
            parts = zip(fresh.split(spans.counts), firsts, spans.firsts, strict=True)
            fresh = torch.cat([part[new - old :] for part, new, old in parts])
            spans = Spans(spans.requests, firsts, spans.stops)
        self.pages[slot][self._page_rows(spans, ratio)] = self._formats[slot.kind].pack(fresh)

    def place(self, slot: Slot, spans: Spans) -> Place | None:
        """Say where packed rows go; those in shared pages go nowhere."""
        packing = self._formats[slot.kind].packing if slot != TOKENS else None
        if packing is None:
            return None
        if slot in self.rings:
            ring = self.rings[slot]
            self.note(slot, spans)
            return Place(ring.rows, self._ring_rows(spans, ring.size).of_all, packing.form)
        ratio = self.config.compress_ratios[slot.layer]
        rows, firsts = self._page_rows(spans, ratio), self._fresh(spans, ratio)
        if firsts != spans.firsts:
            parts = zip(rows.split(spans.counts), firsts, spans.firsts, strict=True)
            rows = torch.cat(
                [
                    torch.cat([part.new_full((new - old,), -1), part[new - old :]])
                    for part, new, old in parts
                ]
            )
        return Place(self.pages[slot], rows, packing.form)

    def packed_rows(self, slot: Slot, requests: tuple[int, ...]) -> PackedRows | None:
        """The entries of a slot and where they lie, if they are packed."""
        if slot in self.rings or self._formats[slot.kind].packing is None:
            return None
        if requests not in self._tables:
            tables = [self._held[request].table for request in requests]
            padded = torch.nn.utils.rnn.pad_sequence(tables, batch_first=True)
            self._tables[requests] = padded
        return PackedRows(self.pages[slot], self._tables[requests], self._per_page(slot.layer))

    def _fresh(self, spans: Spans, ratio: int) -> tuple[int, ...]:
        """First entry of each span that the request did not find in shared pages."""
        return tuple(
            min(max(first, self._held[r].frozen // ratio), stop)
            for r, first, stop in zip(spans.requests, spans.firsts, spans.stops, strict=True)
        )

    def read(self, slot: Slot, spans: Spans) -> Shaped[Tensor, "rows ..."]:
        """Get rows, packed request by request."""
        if slot in self.rings:
            ring = self.rings[slot]
            dtype = self._formats["pending"].dtype if slot.kind == "pending" else self.dtype
            return ring.read(self._ring_rows(spans, ring.size), dtype)
        if not any(spans.firsts):
            return self._whole_pages(slot, spans)
        return self._unpacked(slot, self._page_rows(spans, self.config.compress_ratios[slot.layer]))

    def pick(self, slot: Slot, spans: Spans, rows: Int[Tensor, " n"]) -> Float[Tensor, "n columns"]:
        """Get some rows of what ``read`` would give, without reading the others."""
        per_page = self._per_page(slot.layer)
        if len(spans.requests) == 1:
            entries, table = rows + spans.firsts[0], self._held[spans.requests[0]].table
            return self._unpacked(slot, table[entries // per_page] * per_page + entries % per_page)
        bounds = torch.tensor([0, *spans.counts], device=self.device).cumsum(0)
        of = torch.searchsorted(bounds, rows, right=True) - 1  # whose row it is
        entries = rows - bounds[of] + torch.tensor(spans.firsts, device=self.device)[of]
        tables = [self._held[request].table for request in spans.requests]
        begin = torch.tensor([0, *map(len, tables)][:-1], device=self.device).cumsum(0)
        page = torch.cat(tables)[begin[of] + entries // per_page]
        return self._unpacked(slot, page * per_page + entries % per_page)

    def rows_before(
        self, slot: Slot, requests: tuple[int, ...], starts: tuple[int, ...]
    ) -> tuple[int, ...]:
        """How many rows right before ``starts`` the ring of each request still has."""
        bounds = self.rings[slot].bounds
        return tuple(
            bounds[place].rows_before(start) if place in bounds else 0
            for place, start in zip(self._places(requests, slot), starts, strict=True)
        )

    def truncate(self, request: int, position: int) -> None:
        """Forget everything that positions >= ``position`` wrote, up to ``draft_tokens`` back."""
        length, held = self.length(request), self._held[request]
        is_ahead = held.ahead is not None and held.ahead.first <= position
        if not is_ahead:
            self._settled(request)
        noted = self._noted if is_ahead else list(self.rings.values())  # others: when settled
        rings = [ring for ring in noted if held.place in ring.bounds]
        high = max((ring.bounds[held.place].high for ring in rings), default=0)
        lowest = max(0, high - self.cache.draft_tokens)
        if not lowest <= position <= length and position != 0:
            raise InputError(
                f"request {request} has {length} positions and can be truncated to {lowest} or "
                f"later, not to {position}; close it and prefill again"
            )
        held.has_windows &= is_ahead
        if held.ahead is not None:
            held.ahead.stop = min(held.ahead.stop, position)
        for ring in rings:
            ring.bounds[held.place].cut(position)
        pages = list(held.pages)
        keep = -(-position // self.cache.page_size)
        self._release(held.pages[keep:])
        del held.pages[keep:]
        held.frozen = min(held.frozen, position)
        if position % self.cache.page_size and self.allocator.references(held.pages[-1]) > 1:
            shared, [held.pages[-1]] = held.pages[-1], self.allocator.take(1)
            self._copy_page(shared, held.pages[-1])
            self._release([shared])
        if held.pages != pages:
            self._renew_table(held)

    def length(self, request: int) -> int:
        """Positions written so far; 0 for a request that is not open."""
        if request not in self._held:
            return 0
        bounds = self.rings[TOKENS].bounds.get(self._held[request].place)
        return bounds.stop if bounds else 0

    # decode steps that address rows on the device

    def has_whole_windows(self, request: int, position: int) -> bool:
        """Whether the rings have all that a token at ``position`` sees; once so, it stays so."""
        held = self._held[request]
        if not held.has_windows:
            window, engram = self.config.attention.window_size, self.config.engram
            seen = {"window": window - 1, "pending": position % 2, "tokens": 0}
            seen["tokens"] = engram.max_ngram - 1 if engram else 0
            held.has_windows = all(
                self.rows_before(slot, (request,), (position,))[0] >= min(position, seen[slot.kind])
                for slot in self.rings
                if slot.layer < self.config.num_layers
            )
        return held.has_windows

    def address(self, request: int) -> tuple[int, Int64[Tensor, " pages"]]:
        """Place of a request in the rings, and its pages; these change as another tensor."""
        held = self._held[request]
        return held.place, held.table

    def note(self, slot: Slot, spans: Spans) -> None:
        """Note that rows of a ring were written."""
        self.rings[slot].note(self._places(spans.requests, slot), spans)

    def advance(self, request: int, start: int, stop: int, *, drafts: bool = False) -> None:
        """Note that a step has written these positions, in every layer and, or not, stage."""
        held = self._held[request]
        for ring in self._noted if drafts else self._noted[:1]:
            ring.bounds.setdefault(held.place, RingBounds()).write(start, stop, ring.size)
        if held.ahead is None:
            held.ahead = Ahead(start, start, start)
        held.ahead.write(start, stop)

    def _settled(self, request: int) -> _Held:
        """What a request holds, with every ring's bounds as they are."""
        held = self._held[request]
        if (ahead := held.ahead) is not None:
            for slot, ring in self.rings.items():
                if self._is_behind(slot):
                    ahead.settle(ring.bounds.setdefault(held.place, RingBounds()), ring.size)
            held.ahead = None
        return held

    def _is_behind(self, slot: Slot) -> bool:
        """Whether steps leave it to ``_settled`` to note what they write."""
        return slot != TOKENS and slot.layer < self.config.num_layers

    # storage

    def page_bytes(self) -> int:
        """Bytes of one page in all kv sources."""
        return sum(
            self._per_page(slot.layer) * self._formats[slot.kind].row_bytes for slot in self.pages
        )

    def row_bytes(self, kind: str) -> int:
        """Bytes of a stored row of a kind."""
        return self._formats[kind].row_bytes

    def read_pages(self, pages: Sequence[int]) -> UInt8[Tensor, "pages bytes"]:
        """Bytes of some pages, all kv sources of a page one after the other."""
        chosen = torch.tensor(pages, dtype=torch.int64, device=self.device)
        parts = [
            rows.unflatten(0, (-1, self._per_page(slot.layer)))[chosen].flatten(1)
            for slot, rows in self.pages.items()
        ]
        return torch.cat([part.view(torch.uint8) for part in parts], dim=1)

    def write_page(self, page: int, data: UInt8[Tensor, " bytes"]) -> None:
        """Set a page from its bytes, as ``read_pages`` gives them."""
        rows = self._rows_of(page)
        sizes = [part.numel() * part.element_size() for part in rows]
        for part, raw in zip(rows, data.split(sizes), strict=True):
            part.copy_(raw.view(part.dtype).view_as(part))

    def _rows_of(self, page: int) -> list[Shaped[Tensor, "entries columns"]]:
        counts = {slot: self._per_page(slot.layer) for slot in self.pages}
        return [rows[page * counts[s] : (page + 1) * counts[s]] for s, rows in self.pages.items()]

    def _copy_page(self, source: int, target: int) -> None:
        for old, new in zip(self._rows_of(source), self._rows_of(target), strict=True):
            new.copy_(old)

    def _release(self, pages: Sequence[int]) -> None:
        self.allocator.release(pages)
        if self.cache.poison:
            for page in pages:
                if self.allocator.references(page) == 0:
                    for rows in self._rows_of(page):
                        _poison(rows)

    def _per_page(self, source: int) -> int:
        return self.cache.page_size // self.config.compress_ratios[source]

    def _storage(self, kind: str, rows: int) -> Shaped[Tensor, "rows columns"]:
        stored: RowFormat = self._formats[kind]
        made = torch.zeros(rows, stored.columns, dtype=stored.dtype, device=self.device)
        if self.cache.poison:
            _poison(made)
        return made

    def _ring(self, slot: Slot) -> Ring:
        places, drafts = self.cache.max_requests, self.cache.draft_tokens
        if slot == TOKENS:
            engram = self.config.engram
            size = (engram.max_ngram if engram else 1) + drafts
            return Ring(
                torch.zeros(places * size, dtype=torch.int64, device=self.device), size, None
            )
        size = (self.config.attention.window_size if slot.kind == "window" else 2) + drafts
        return Ring(self._storage(slot.kind, places * size), size, self._formats[slot.kind])

    def _put_tokens(self, held: _Held, recent: Sequence[int], start: int) -> None:
        ring = self.rings[TOKENS]
        recent = recent[-ring.size :]
        at = torch.arange(start - len(recent), start) % ring.size + held.place * ring.size
        ring.rows[at.to(self.device)] = torch.tensor(recent, dtype=torch.int64, device=self.device)
        ring.bounds[held.place] = RingBounds(start - len(recent), start, start)

    # addresses

    def _places(self, requests: tuple[int, ...], slot: Slot) -> tuple[int, ...]:
        """Places of requests, with the bounds of this slot's ring as they are."""
        is_behind = self._is_behind(slot)
        return tuple((self._settled(r) if is_behind else self._held[r]).place for r in requests)

    def _ring_rows(self, spans: Spans, size: int) -> Addresses:
        key = (spans, size)
        if key not in self._addresses:
            places = tuple(self._held[request].place for request in spans.requests)
            self._addresses[key] = ring_addresses(places, spans, size, self.device)
        return self._addresses[key]

    def _page_rows(self, spans: Spans, ratio: int) -> Int64[Tensor, " rows"]:
        key = (spans, ratio)
        if key not in self._entry_rows:
            per_page, parts = self.cache.page_size // ratio, []
            for request, first, stop in zip(spans.requests, spans.firsts, spans.stops, strict=True):
                entries = torch.arange(first, stop, device=self.device)
                table = self._held[request].table
                parts.append(table[entries // per_page] * per_page + entries % per_page)
            self._entry_rows[key] = torch.cat(parts)
        return self._entry_rows[key]

    def _whole_pages(self, slot: Slot, spans: Spans) -> Float[Tensor, "rows columns"]:
        """Rows of each request from its first one on, page by page."""
        per_page, parts = self._per_page(slot.layer), []
        pages = self.pages[slot].unflatten(0, (-1, per_page))
        for request, stop in zip(spans.requests, spans.stops, strict=True):
            held = pages[self._held[request].table[: -(-stop // per_page)]]
            parts.append(held.flatten(0, 1)[:stop])
        rows = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self._formats[slot.kind].unpack(rows, self.dtype)

    def _unpacked(self, slot: Slot, rows: Int[Tensor, " n"]) -> Float[Tensor, "n columns"]:
        return self._formats[slot.kind].unpack(self.pages[slot][rows], self.dtype)

    def _renew_table(self, held: _Held) -> None:
        held.table = torch.tensor(held.pages, dtype=torch.int64, device=self.device)
        self._forget_addresses()

    def _forget_addresses(self) -> None:
        self._addresses.clear()
        self._entry_rows.clear()
        self._tables.clear()


def _poison(rows: Shaped[Tensor, "rows ..."]) -> None:
    rows.fill_(torch.nan if rows.is_floating_point() else POISON_BYTE)
