"""Where a batch's tokens find their context: index arithmetic shared by all layers. Report §2.3.

A context is a packed tensor: for each request its stored rows, then its new ones. Rows of a
context are addressed by these tables; -1 is never a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from openv41.layers.batch import Batch
from openv41.layers.store import Spans


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayBounds:
    """Decoder SWA Bounded Replay inside a forward over whole texts. Report §2.2, §3.2.2.

    Serving computes, from some layer on, only the rows of a request from its ``floor`` on: rows
    there see no window KV from before. Here the rows before it are computed too; nobody sees them
    where windows are bounded, and they count for nothing.
    """

    floors: tuple[int, ...]  # of each request, a position
    first_layer: int  # from here on rows before the floor count for nothing
    first_bounded: int  # from here on no row at or behind the floor sees window KV before it

    def beside(self, other: "ReplayBounds") -> "ReplayBounds":
        """The bounds of both's requests."""
        mine, theirs = ((b.first_layer, b.first_bounded) for b in (self, other))
        assert mine == theirs, f"bounds of layers {mine} beside those of {theirs}"
        return replace(self, floors=self.floors + other.floors)

    def part(self, first: int, last: int) -> "ReplayBounds":
        """The bounds of requests ``first`` to ``last`` - 1."""
        return replace(self, floors=self.floors[first:last])

    def window_floors(self, layer: int) -> tuple[int, ...] | None:
        """Where the windows of a layer end; None where they are whole."""
        return self.floors if layer >= self.first_bounded and any(self.floors) else None

    def counted_rows(self, batch: Batch, layer: int) -> Int[Tensor, " rows"] | None:
        """Rows that serving computes in a layer; None for all."""
        if layer < self.first_layer or not any(self.floors):
            return None
        return (batch.positions >= batch.per_token(self.floors)).nonzero()[:, 0]


def lookback_rows(
    batch: Batch, reach: int, past: Sequence[int], floors: Sequence[int] | None = None
) -> Int[Tensor, "T W"]:
    """Context rows of the last ``reach`` positions of each token, oldest first, itself last.

    The context holds ``past`` stored positions of each request before its new ones. Tokens from
    the floor of their request on see nothing before it.
    """
    sizes = [p + n for p, n in zip(past, batch.counts, strict=True)]
    first = [0, *accumulate(sizes)][:-1]
    anchor = [f + p - s for f, p, s in zip(first, past, batch.starts, strict=True)]
    own = batch.positions + batch.per_token(anchor)
    rows = own[:, None] + torch.arange(1 - reach, 1, device=batch.device)
    lowest = batch.per_token(first)
    if floors is not None:
        floor = batch.per_token([a + f for a, f in zip(anchor, floors, strict=True)])
        lowest = torch.where(own < floor, lowest, lowest.maximum(floor))
    return rows.masked_fill(rows < lowest[:, None], -1)


@dataclass(frozen=True, eq=False)
class Entries:
    """Main-KV entries of one compression ratio: which are new, and where each request's stand."""

    ratio: int
    spans: Spans  # all entries of each request
    stored: tuple[int, ...]  # entries of each request before the batch
    totals: tuple[int, ...]  # entries of each request after the batch
    visible: Int[Tensor, " T"]  # entries whose group is complete at the token
    first_rows: Int[Tensor, " T"]  # context row of entry 0 of the token's request
    new_positions: Int[Tensor, " M"]  # position of the first token of each new entry
    member_rows: Int[Tensor, "M ratio"]  # tokens of each new entry in [pending rows, new rows]

    @classmethod
    def of(cls, batch: Batch, ratio: int) -> "Entries":
        """Count and place the entries; entry j is complete from position (j + 1) * ratio - 1 on."""
        stored = tuple(start // ratio for start in batch.starts)
        totals = tuple(stop // ratio for stop in batch.stops)
        first = [0, *accumulate(totals)][:-1]
        return cls(
            ratio=ratio,
            spans=Spans(batch.requests, (0,) * len(totals), totals),
            stored=stored,
            totals=totals,
            visible=(batch.positions + 1) // ratio,
            first_rows=batch.per_token(first),
            new_positions=_ranges(stored, totals, batch.device) * ratio,
            member_rows=_members(batch, ratio, stored, totals),
        )


def _ranges(starts: Sequence[int], stops: Sequence[int], device: torch.device) -> Tensor:
    parts = [torch.arange(a, b) for a, b in zip(starts, stops, strict=True)]
    if len(parts) == 1:
        return parts[0].to(device)
    return torch.cat([torch.empty(0, dtype=torch.int64), *parts]).to(device)


def _members(
    batch: Batch, ratio: int, stored: Sequence[int], totals: Sequence[int]
) -> Int[Tensor, "M ratio"]:
    """Rows of each new entry's tokens; one from before the batch is the request's pending row."""
    num = len(batch.requests)
    parts = [torch.empty(0, ratio, dtype=torch.int64)]
    first_row = num
    for request, (a, b) in enumerate(zip(stored, totals, strict=True)):
        positions = torch.arange(a * ratio, b * ratio).view(-1, ratio)
        offset = positions - batch.starts[request]
        parts.append(torch.where(offset < 0, request, offset + first_row))
        first_row += batch.counts[request]
    return torch.cat(parts).to(batch.device)


@dataclass(frozen=True, eq=False)
class Segment:
    """Requests with equally many new tokens, to be scored together."""

    requests: tuple[int, ...]  # their places in the batch
    token_rows: Int[Tensor, "B T"]
    entry_rows: Int[Tensor, "B M"]  # context rows, 0 where a request has fewer entries
    exists: Bool[Tensor, "B M"]


def segments(batch: Batch, entries: Entries, limit: int) -> list[Segment]:
    """Group the requests, and cut groups so that none scores more than ``limit`` pairs at once."""
    first_tokens = [0, *accumulate(batch.counts)]
    first_entries = [0, *accumulate(entries.totals)]
    groups: dict[int, list[int]] = {}
    for request, count in enumerate(batch.counts):
        if count and entries.totals[request]:
            groups.setdefault(count, []).append(request)
    found = []
    for count, members in groups.items():
        most = max(entries.totals[r] for r in members)
        width = max(1, limit // (most * count))
        for i in range(0, len(members), width):
            part = members[i : i + width]
            columns = torch.arange(max(entries.totals[r] for r in part))
            exists = columns < torch.tensor([entries.totals[r] for r in part])[:, None]
            first = torch.tensor([first_entries[r] for r in part])[:, None]
            tokens = torch.tensor([first_tokens[r] for r in part])[:, None] + torch.arange(count)
            step = max(1, limit // (len(columns) * len(part)))
            found += [
                Segment(
                    tuple(part),
                    rows.to(batch.device),
                    torch.where(exists, first + columns, 0).to(batch.device),
                    exists.to(batch.device),
                )
                for rows in tokens.split(step, dim=1)
            ]
    return found
