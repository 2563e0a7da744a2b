"""The tokens of many requests drawn at once, where they are: what ``Sampler.verify`` would draw.

Rows of logits stay on the device; per request a few numbers come back. Requests that ask for more
than a temperature are left to their samplers. Report §2.4.3.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from openv41 import ops
from openv41.engine.random_streams import Stream, uniform
from openv41.engine.sampler import Draft, Sampler

ELEMENTS_AT_ONCE = 1 << 25  # probabilities in float64, 256 MiB


@dataclass(frozen=True, eq=False, slots=True)
class Drawing:
    """What one request draws from: rows of the logits, one more than it has drafts."""

    sampler: Sampler
    drafts: Sequence[Draft]
    first: int  # of its rows

    @property
    def num_rows(self) -> int:
        """Rows of its drafts, and one behind them."""
        return len(self.drafts) + 1

    @property
    def stop(self) -> int:
        """Behind the last row."""
        return self.first + self.num_rows


def draw_together(
    logits: Float[Tensor, "rows V"], drawings: Sequence[Drawing], *, banned: int
) -> list[list[int] | None]:
    """Draw the tokens of each request; None for one whose sampler must do it.

    A row that is no distribution is left to the sampler too, which says what is wrong with it.
    """
    found: list[list[int] | None] = [None] * len(drawings)
    simple = [i for i, one in enumerate(drawings) if one.sampler.is_simple]
    if not simple:
        return found
    if banned < logits.shape[1]:
        logits = logits.clone()
        logits[:, banned] = -torch.inf
    best, likeliest = logits.max(-1)
    is_usable, tokens = torch.stack([best.isfinite().long(), likeliest]).tolist()
    sampled = []
    for i in simple:
        one = drawings[i]
        if not all(is_usable[one.first : one.stop]):
            continue
        if one.sampler.config.temperature == 0:
            found[i] = while_drafted(tokens[one.first : one.stop], one.drafts)
        else:
            sampled.append(i)
    for group in _pieces(sampled, drawings, ELEMENTS_AT_ONCE // logits.shape[1]):
        drawn = _draw_sampled(logits, best, [drawings[i] for i in group])
        for i, own in zip(group, drawn, strict=True):
            found[i] = own
    return found


def while_drafted(tokens: Sequence[int], drafts: Sequence[Draft]) -> list[int]:
    """Tokens up to the first that is not its draft."""
    held = 0
    while held < len(drafts) and tokens[held] == drafts[held].token:
        held += 1
    return list(tokens[: held + 1])


def _pieces(chosen: Sequence[int], drawings: Sequence[Drawing], most: int) -> list[list[int]]:
    """Cut into groups of at most ``most`` rows, or one request."""
    groups: list[list[int]] = []
    room = 0
    for i in chosen:
        if drawings[i].num_rows > room:
            groups.append([])
            room = most
        groups[-1].append(i)
        room -= drawings[i].num_rows
    return groups


def _draw_sampled(
    logits: Float[Tensor, "rows V"], best: Float[Tensor, " rows"], drawings: Sequence[Drawing]
) -> list[list[int]]:
    """Accept drafts, then draw what comes behind them, for all requests in four steps."""
    rows = torch.tensor([r for one in drawings for r in range(one.first, one.stop)])
    rows = rows.to(logits.device)
    temperatures = [one.sampler.config.temperature for one in drawings for _ in range(one.num_rows)]
    wide = (logits[rows].double() - best[rows, None].double()) / _column(temperatures, logits)
    shares = torch.softmax(wide, -1)
    accepted = _accepted(shares, drawings)
    begin, ends, points, rests = 0, [], [], []
    for place, (one, held) in enumerate(zip(drawings, accepted, strict=True)):
        is_rejected = held < len(one.drafts) and one.drafts[held].is_sampled
        if is_rejected:
            rests.append((place, one.drafts[held].shares))
        ends.append(begin + held)
        points.append(point(one, held, Stream.RESIDUAL if is_rejected else Stream.TOKEN))
        begin += one.num_rows
    last = shares[torch.tensor(ends, device=logits.device)]
    if rests:
        places = torch.tensor([place for place, _ in rests], device=logits.device)
        drafted = torch.stack([row for _, row in rests if row is not None])
        last[places] = ops.residual(last[places], drafted)
    drawn = ops.choose_tokens(last, _column(points, logits)[:, 0]).tolist()
    return [
        [*(draft.token for draft in one.drafts[:held]), token]
        for one, held, token in zip(drawings, accepted, drawn, strict=True)
    ]


def _accepted(shares: Float[Tensor, "rows V"], drawings: Sequence[Drawing]) -> list[int]:
    """Drafts that hold before the first that does not, of each request.

    One without shares holds where the token that is drawn without it is the same.
    """
    where: list[int] = []
    drafts: list[Draft] = []
    coins: list[float] = []
    begin = 0
    for one in drawings:
        where += range(begin, begin + len(one.drafts))
        drafts += one.drafts
        coins += [
            point(one, k, Stream.COIN if draft.is_sampled else Stream.TOKEN)
            for k, draft in enumerate(one.drafts)
        ]
        begin += one.num_rows
    if not drafts:
        return [0] * len(drawings)
    tokens = torch.tensor([draft.token for draft in drafts], device=shares.device)
    chances = _column([draft.chance for draft in drafts], shares)[:, 0]
    points, rows = _column(coins, shares)[:, 0], shares[torch.tensor(where, device=shares.device)]
    holds = ops.accept_drafts(rows.gather(1, tokens[:, None])[:, 0], chances, points)
    is_sure = torch.tensor([not draft.is_sampled for draft in drafts], device=shares.device)
    if not all(draft.is_sampled for draft in drafts):
        holds = torch.where(is_sure, ops.choose_tokens(rows, points) == tokens, holds)
    listed, found = iter(holds.tolist()), []
    for one in drawings:
        own = [next(listed) for _ in one.drafts]
        found.append(own.index(False) if False in own else len(own))
    return found


def point(one: Drawing, ahead: int, stream: Stream) -> float:
    """The random number of a place ahead of a request's next one."""
    return uniform(one.sampler.config.seed, stream, one.sampler.place + ahead)


def _column(values: Sequence[float], like: Tensor) -> Float[Tensor, "rows 1"]:
    return torch.tensor(values, dtype=torch.float64, device=like.device)[:, None]
