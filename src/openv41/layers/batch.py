"""The packed batch: tokens of many requests, or documents, in one row. Report §2.2.

A request is addressed by absolute position. Documents packed for training are requests that start
at position 0, so that windows, groups, entries and n-grams restart with each of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from jaxtyping import Float, Int
from torch import Tensor

from openv41.errors import InputError
from openv41.layers.store import Spans


@dataclass(frozen=True, eq=False)
class Batch:
    """New tokens of each request, one request after the other.

    ``image_embeds`` holds a row per token that is the model's image token, in their order.
    ``requests`` are the store's ids, ``starts`` the absolute position of each request's first new
    token, ``counts`` how many new tokens it brings (0 is allowed).
    """

    token_ids: Int[Tensor, " T"]
    requests: tuple[int, ...]
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    image_embeds: Float[Tensor, "image_tokens D"] | None = None

    def __post_init__(self) -> None:
        if not len(self.requests) == len(self.starts) == len(self.counts):
            raise InputError(
                f"batch: {len(self.requests)} requests, {len(self.starts)} starts and "
                f"{len(self.counts)} counts; give one of each per request"
            )
        if len(set(self.requests)) != len(self.requests):
            raise InputError(f"batch: requests {self.requests} hold one twice")
        if min(self.starts, default=0) < 0 or min(self.counts, default=0) < 0:
            raise InputError(f"batch: starts {self.starts} and counts {self.counts} must be >= 0")
        if sum(self.counts) != len(self.token_ids):
            raise InputError(
                f"batch: counts sum to {sum(self.counts)}, there are {len(self.token_ids)} tokens"
            )

    @classmethod
    def from_documents(
        cls,
        documents: Sequence[Sequence[int]],
        device: torch.device | str = "cpu",
        *,
        image_embeds: Float[Tensor, "image_tokens D"] | None = None,
    ) -> "Batch":
        """Pack whole documents; each starts at position 0."""
        ids = [token for document in documents for token in document]
        packed = torch.tensor(ids, dtype=torch.int64, device=device)
        return cls.packed(packed, [len(document) for document in documents], image_embeds)

    @classmethod
    def packed(
        cls,
        token_ids: Int[Tensor, " T"],
        lengths: Sequence[int],
        image_embeds: Float[Tensor, "image_tokens D"] | None = None,
    ) -> "Batch":
        """Describe an already packed row of documents by their lengths."""
        num = len(lengths)
        return cls(token_ids, tuple(range(num)), (0,) * num, tuple(lengths), image_embeds)

    @property
    def device(self) -> torch.device:
        """Where the tokens are."""
        return self.token_ids.device

    @property
    def stops(self) -> tuple[int, ...]:
        """Absolute position behind each request's last new token."""
        return tuple(s + n for s, n in zip(self.starts, self.counts, strict=True))

    @property
    def spans(self) -> Spans:
        """Positions of the new tokens."""
        return Spans(self.requests, self.starts, self.stops)

    def part(
        self, firsts: Sequence[int], stops: Sequence[int]
    ) -> tuple["Batch", Int[Tensor, " rows"]]:
        """The tokens whose positions lie in each request's range, and their rows here.

        Image embeddings stay behind: they are needed once, before the first layer.
        """
        starts = [
            min(max(f, s), e) for f, s, e in zip(firsts, self.starts, self.stops, strict=True)
        ]
        ends = [max(min(f, e), s) for f, s, e in zip(stops, starts, self.stops, strict=True)]
        begin = [r + s - t for r, s, t in zip(self.first_rows, starts, self.starts, strict=True)]
        counts = [e - s for s, e in zip(starts, ends, strict=True)]
        parts = [torch.arange(b, b + n) for b, n in zip(begin, counts, strict=True)]
        rows = torch.cat([torch.empty(0, dtype=torch.int64), *parts]).to(self.device)
        return Batch(self.token_ids[rows], self.requests, tuple(starts), tuple(counts)), rows

    @property
    def first_rows(self) -> list[int]:
        """Row of each request's first new token."""
        return [0, *accumulate(self.counts)][:-1]

    @cached_property
    def positions(self) -> Int[Tensor, " T"]:
        """Absolute position of each token in its request."""
        if len(self.starts) == 1:
            return torch.arange(self.starts[0], self.stops[0], device=self.device)
        shift = [s - r for s, r in zip(self.starts, self.first_rows, strict=True)]
        return torch.arange(len(self.token_ids), device=self.device) + self.per_token(shift)

    @cached_property
    def request_rows(self) -> Int[Tensor, " T"]:
        """Place in ``requests`` of each token's request."""
        return self.per_token(range(len(self.requests)))

    def per_token(self, per_request: Sequence[int]) -> Int[Tensor, " T"]:
        """Repeat one number per request for each of its tokens."""
        if len(per_request) == 1:
            return self.token_ids.new_full(self.token_ids.shape, per_request[0], dtype=torch.int64)
        values = torch.tensor(per_request, dtype=torch.int64)
        counts = torch.tensor(self.counts, dtype=torch.int64)
        return values.repeat_interleave(counts).to(self.device)
