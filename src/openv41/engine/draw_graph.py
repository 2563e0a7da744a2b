"""Tokens of few rows drawn as a CUDA graph: what ``draw_together`` draws. Report §2.4.3.

Every row gets all that could come of it: whether its draft holds, the token drawn from it, and the
one drawn where its draft is rejected; the host picks. For a great many that is not worth it.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from openv41 import ops
from openv41.engine.captured import Captured, Staged, rounded, sizes_up_to
from openv41.engine.joint_sampling import Drawing, draw_together, while_drafted
from openv41.engine.random_streams import at_place
from openv41.engine.sampler import SharesRow

MOST_ELEMENTS = 6 << 20  # rows x tokens of a graph, which keeps a few float64 numbers of each
Size = tuple[int, bool]  # rows, and whether any of their drafts was sampled


class Told(NamedTuple):
    """What a row is drawn with; for all rows at once, a tensor each."""

    temperature: Any = 1.0
    token: Any = 0  # its draft
    chance: Any = 1.0  # that the draft had
    coin: Any = 0.0  # whether it is accepted
    point: Any = 0.0  # which token is drawn
    other_point: Any = 0.0  # and which one in place of a rejected draft
    request: Any = 0  # where the chances of all drafts lie
    place: Any = 0
    is_sampled: Any = 0.0  # whether the draft could have been another


@dataclass(frozen=True, eq=False)
class Outcomes:
    """What could come of each row."""

    numbers: Int64[Tensor, "kinds rows"]  # usable, likeliest, whether it holds, drawn, instead


class Draws:
    """Draws the tokens of a step, as a graph where its rows are few and wanted for no more."""

    def __init__(
        self,
        num_tokens: int,
        banned: int,
        device: torch.device,
        most_rows: int = 0,
        block: Float64[Tensor, "places X V"] | None = None,
    ) -> None:
        """Graphs draw up to ``most_rows`` rows, 0 for none; their drafts come from ``block``."""
        most = min(most_rows, MOST_ELEMENTS // num_tokens)
        self.graphs = DrawGraphs(num_tokens, banned, device, most, block) if most else None
        self._banned = banned

    def __call__(
        self, logits: Float[Tensor, "rows V"], drawings: Sequence[Drawing]
    ) -> list[list[int] | None]:
        """Draw as ``draw_together`` does."""
        found = None if self.graphs is None else self.graphs.draw(logits, drawings)
        return draw_together(logits, drawings, banned=self._banned) if found is None else found


class DrawGraphs:
    """Draws of few rows for requests that ask for nothing but a temperature."""

    def __init__(
        self,
        num_tokens: int,
        banned: int,
        device: torch.device,
        most: int,
        block: Float64[Tensor, "places X V"] | None,
    ) -> None:
        self._banned, self._most, self._block = banned, most, block
        self._logits = torch.zeros(most, num_tokens, device=device)
        self._given = Staged(len(Told._fields), most, device, torch.float64)
        self.captured: Captured[Size, Outcomes] = Captured(self._compute, device, captures=True)

    def prepare(self) -> None:
        """Capture draws of every number of rows, with and without sampled drafts."""
        self._given.tell([Told()], self._most)
        kinds = (False,) if self._block is None else (False, True)
        self.captured.prepare(itertools.product(sizes_up_to(self._most), kinds))

    def draw(
        self, logits: Float[Tensor, "rows V"], drawings: Sequence[Drawing]
    ) -> list[list[int] | None] | None:
        """Draw the tokens of each request, None for one without usable logits; None if not here."""
        rows = len(logits)
        if rows > self._most or not all(one.sampler.is_simple for one in drawings):
            return None
        given = [draft.given for one in drawings for draft in one.drafts if draft.is_sampled]
        if not all(isinstance(one, SharesRow) and one.block is self._block for one in given):
            return None
        size = rounded(rows, self._most)
        self._logits[:rows] = logits
        self._given.tell([row for one in drawings for row in _told(one)], size)
        found = self.captured((size, bool(given))).numbers.tolist()
        return [_tokens(one, [kind[one.first : one.stop] for kind in found]) for one in drawings]

    def _compute(self, size: Size) -> Outcomes:
        rows, has_shares = size
        logits = self._logits[:rows]
        if self._banned < logits.shape[1]:
            logits[:, self._banned].fill_(-torch.inf)
        told = Told(*self._given.there[:, :rows])
        tokens = told.token.long()
        best, likeliest = logits.max(-1)
        wide = (logits.double() - best[:, None].double()) / told.temperature[:, None]
        shares = torch.softmax(wide, -1)
        drawn = instead = ops.choose_tokens(shares, told.point)
        holds = drawn == tokens
        if has_shares and self._block is not None:
            chances = shares.gather(1, tokens[:, None])[:, 0]
            accepted = ops.accept_drafts(chances, told.chance, told.coin)
            holds = torch.where(told.is_sampled > 0, accepted, holds)
            rest = ops.residual(shares, self._block[told.request.long(), told.place.long()])
            other = ops.choose_tokens(rest, told.other_point)
            instead = torch.where(told.is_sampled > 0, other, drawn)
        outcomes = [best.isfinite().long(), likeliest, holds.long(), drawn, instead]
        return Outcomes(torch.stack(outcomes))


def _told(one: Drawing) -> list[Told]:
    """What the rows of a request are drawn with; the last one has no draft."""
    config, begin = one.sampler.config, one.sampler.place
    if config.temperature == 0:
        return [Told()] * one.num_rows
    rows = []
    for ahead, draft in enumerate([*one.drafts, None]):
        point, coin, other = at_place(config.seed, begin + ahead)
        if draft is None:
            rows.append(Told(config.temperature, point=point))
        elif not isinstance(draft.given, SharesRow):
            rows.append(Told(config.temperature, draft.token, point=point))
        else:
            drafted = draft.token, draft.chance
            where = draft.given.request, draft.given.place
            rows.append(Told(config.temperature, *drafted, coin, point, other, *where, 1.0))
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
