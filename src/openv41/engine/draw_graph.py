"""Tokens of few rows drawn as a CUDA graph: what ``draw_together`` draws. Report §2.4.3.

Every row gets all that could come of it: whether its draft holds, the token drawn from it, and the
one drawn where its draft is rejected; the host picks. For many rows this is more than it saves.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from openv41 import ops
from openv41.engine.captured import Captured, Staged, rounded, sizes_up_to
from openv41.engine.joint_sampling import Drawing, draw_together, point, while_drafted
from openv41.engine.random_streams import Stream
from openv41.engine.sampler import SharesRow

MOST_ROWS = 48
KINDS = 9  # temperature, token, chance, coin, two points, request, place, whether it has shares
Size = tuple[int, int]  # rows, and the block of chances that their drafts were drawn from


@dataclass(frozen=True, eq=False)
class Outcomes:
    """What could come of each row."""

    numbers: Int64[Tensor, "kinds rows"]  # usable, likeliest, whether it holds, drawn, instead


class Draws:
    """Draws the tokens of a step, as a graph where its rows are few and wanted for no more."""

    def __init__(
        self, num_tokens: int, banned: int, device: torch.device, *, has_graphs: bool
    ) -> None:
        self.graphs = DrawGraphs(num_tokens, banned, device) if has_graphs else None
        self._banned = banned

    def __call__(
        self,
        logits: Float[Tensor, "rows V"],
        drawings: Sequence[Drawing],
        block: Float[Tensor, "places X V"] | None,
    ) -> list[list[int] | None]:
        """Draw as ``draw_together`` does.

        ``block`` lies where it lay before, and sampled drafts are drawn from it; None if unknown.
        """
        found = None if self.graphs is None else self.graphs.draw(logits, drawings, block)
        return draw_together(logits, drawings, banned=self._banned) if found is None else found


class DrawGraphs:
    """Draws of few rows for requests that ask for nothing but a temperature."""

    def __init__(self, num_tokens: int, banned: int, device: torch.device) -> None:
        self._banned = banned
        self._logits = torch.zeros(MOST_ROWS, num_tokens, device=device)
        self._given = Staged(KINDS, MOST_ROWS, device, torch.float64)
        self._blocks: list[Tensor | None] = [None]  # of chances; None: no draft was sampled
        self.captured: Captured[Size, Outcomes] = Captured(self._compute, device, captures=True)

    def prepare(self, blocks: Sequence[Float[Tensor, "places X V"]]) -> None:
        """Capture draws of every number of rows, for drafts from each of these blocks."""
        self._given.tell([(1.0, *(0.0,) * (KINDS - 1))], MOST_ROWS)
        known = [0, *map(self._number, blocks)]
        self.captured.prepare(itertools.product(sizes_up_to(MOST_ROWS), known))

    def draw(
        self,
        logits: Float[Tensor, "rows V"],
        drawings: Sequence[Drawing],
        block: Float[Tensor, "places X V"] | None,
    ) -> list[list[int] | None] | None:
        """Draw the tokens of each request, None for one without usable logits; None if not here."""
        rows = len(logits)
        if rows > MOST_ROWS or not all(one.sampler.is_simple for one in drawings):
            return None
        drafts = [draft for one in drawings for draft in one.drafts if draft.is_sampled]
        if not all(_is_of(draft.given, block) for draft in drafts):
            return None
        size = rounded(rows, MOST_ROWS)
        self._logits[:rows] = logits
        self._given.tell([row for one in drawings for row in _told(one)], size)
        found = self.captured((size, self._number(block) if drafts else 0)).numbers.tolist()
        return [_tokens(one, [kind[one.first : one.stop] for kind in found]) for one in drawings]

    def _number(self, block: Tensor | None) -> int:
        for number, known in enumerate(self._blocks):
            if known is block:
                return number
        self._blocks.append(block)
        return len(self._blocks) - 1

    def _compute(self, size: Size) -> Outcomes:
        rows, number = size
        logits, block = self._logits[:rows], self._blocks[number]
        if self._banned < logits.shape[1]:
            logits[:, self._banned].fill_(-torch.inf)
        temperature, token, chance, coin, own, other, request, place, has_shares = (
            self._given.there[:, :rows]
        )
        tokens = token.long()
        best, likeliest = logits.max(-1)
        wide = (logits.double() - best[:, None].double()) / temperature[:, None]
        shares = torch.softmax(wide, -1)
        drawn = instead = ops.choose_tokens(shares, own)
        holds = drawn == tokens
        if block is not None:
            rest = ops.residual(shares, block[request.long(), place.long()])
            instead = torch.where(has_shares > 0, ops.choose_tokens(rest, other), drawn)
            accepted = ops.accept_drafts(shares.gather(1, tokens[:, None])[:, 0], chance, coin)
            holds = torch.where(has_shares > 0, accepted, holds)
        outcomes = [best.isfinite().long(), likeliest, holds.long(), drawn, instead]
        return Outcomes(torch.stack(outcomes))


def _is_of(given: object, block: Tensor | None) -> bool:
    return isinstance(given, SharesRow) and given.block is block


def _told(one: Drawing) -> list[tuple[float, ...]]:
    """What the rows of a request are drawn with; the last one has no draft."""
    temperature = one.sampler.config.temperature
    if temperature == 0:
        return [(1.0, *(0.0,) * (KINDS - 1))] * one.num_rows
    rows: list[tuple[float, ...]] = []
    for ahead in range(one.num_rows):
        draft = one.drafts[ahead] if ahead < len(one.drafts) else None
        own = point(one, ahead, Stream.TOKEN)
        if draft is None or not isinstance(draft.given, SharesRow):
            token = 0 if draft is None else draft.token
            rows.append((temperature, token, 1.0, 0.0, own, 0.0, 0.0, 0.0, 0.0))
            continue
        coin, other = (point(one, ahead, stream) for stream in (Stream.COIN, Stream.RESIDUAL))
        where = draft.given.request, draft.given.place
        rows.append((temperature, draft.token, draft.chance, coin, own, other, *where, 1.0))
    return rows


def _tokens(one: Drawing, outcomes: Sequence[list[int]]) -> list[int] | None:
    """Drafts that hold, and the token behind them."""
    usable, likeliest, holds, drawn, instead = outcomes
    if not all(usable):
        return None
    if one.sampler.config.temperature == 0:
        return while_drafted(likeliest, one.drafts)
    held = 0
    while held < len(one.drafts) and holds[held]:
        held += 1
    last = instead[held] if held < len(one.drafts) else drawn[held]
    return [*(draft.token for draft in one.drafts[:held]), last]
