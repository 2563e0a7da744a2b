"""Where a batch's tokens find their context: index arithmetic shared by all layers. Report §2.3.

A context is a packed tensor: for each request its stored rows, then its new ones. Rows of a
context are addressed by these tables; -1 is never a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from openv41.layers.batch import Batch
from openv41.layers.store import Spans


def lookback_rows(batch: Batch, reach: int, past: Sequence[int]) -> Int[Tensor, "T W"]:
    """Context rows of the last ``reach`` positions of each token, oldest first, itself last.

    The context holds ``past`` stored positions of each request before its new ones.
    """
    sizes = [p + n for p, n in zip(past, batch.counts, strict=True)]
    first = [0, *accumulate(sizes)][:-1]
    anchor = [f + p - s for f, p, s in zip(first, past, batch.starts, strict=True)]
    own = batch.positions + batch.per_token(anchor)
    rows = own[:, None] + torch.arange(1 - reach, 1, device=batch.device)
    return rows.masked_fill(rows < batch.per_token(first)[:, None], -1)


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
                    rows.to(batch.device),
                    torch.where(exists, first + columns, 0).to(batch.device),
                    exists.to(batch.device),
                )
                for rows in tokens.split(step, dim=1)
            ]
    return found
