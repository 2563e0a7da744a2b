"""Lossless verification of drafts: which hold, and what comes in place of one that does not.

With p what the model says of a position and q what the draft was drawn from, a draft x is accepted
with probability min(1, p(x) / q(x)), and a rejected one is replaced by a draw from the part of p
that q does not cover. The answer is then distributed as without drafts. Report §2.4.3.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from openv41.ops._dispatch import op

LEAST_REST = 1e-8  # of p beyond q; below it rounding is all that is left


@op
def choose_tokens(
    shares: Float[Tensor, "rows V"], points: Float[Tensor, " rows"]
) -> Int[Tensor, " rows"]:
    """Draw a token of each row: the one at ``points`` in [0, 1) of its cumulated shares.

    ``shares`` need not sum to 1. A token without a share is never drawn, but where no token has
    one the last is.
    """
    totals = shares.cumsum(-1)
    heights = points.to(totals.dtype) * totals[:, -1]
    places = torch.searchsorted(totals, heights[:, None], right=True)[:, 0]
    last = shares.shape[1] - 1 - (shares > 0).flip(-1).to(torch.uint8).argmax(-1)
    return torch.minimum(places, last)


@op
def accept_drafts(
    target: Float[Tensor, "..."], drafted: Float[Tensor, "..."], coins: Float[Tensor, "..."]
) -> Bool[Tensor, "..."]:
    """Whether each draft x holds: coin * q(x) < p(x), with ``target`` p(x) and ``drafted`` q(x).

    A q(x) that is no probability of something drawn (outside (0, 1], NaN) holds nothing.
    """
    return (drafted > 0) & (drafted <= 1) & (coins * drafted < target)


@op
def residual(
    target: Float[Tensor, "... V"], drafted: Float[Tensor, "... V"]
) -> Float[Tensor, "... V"]:
    """Return max(p - q, 0), to draw from after a rejection; p itself where next to nothing is left.

    Entries of q that are no probabilities count as 0.
    """
    is_known = (drafted >= 0) & (drafted <= 1)
    rest = (target - drafted.where(is_known, 0.0)).clamp(min=0)
    return torch.where(rest.sum(-1, keepdim=True) > LEAST_REST, rest, target)


@op
def accept_block(
    targets: Float[Tensor, "drafts V"],
    last: Float[Tensor, " V"],
    drafted: Float[Tensor, "drafts V"],
    tokens: Int[Tensor, " drafts"],
    coins: Float[Tensor, " drafts"],
) -> tuple[Int[Tensor, ""], Float[Tensor, " V"]]:
    """Verify the drafts of one request together; return how many hold and what to draw next from.

    Row i of ``targets`` and ``drafted`` is p and q of draft i, ``last`` is p behind all of them.
    With r_i = min(1, r_{i-1} p(x_i) / q(x_i)) and S_i = sum max(r_i p_{i+1} - q_{i+1}, 0), the
    first i drafts may stand with probability S_i / (S_i + 1 - r_i), all with r_n; the longest
    beginning that does is taken (Sun et al., 2024). Never fewer are accepted on average than one
    by one.
    """
    own = tokens[:, None]
    p, q = targets.gather(1, own)[:, 0], drafted.gather(1, own)[:, 0]
    is_known = (q > 0) & (q <= 1)
    ratios = torch.where(is_known, p / q.where(is_known, 1.0), 0.0)
    kept = [torch.ones_like(last[0])]  # r_0, r_1, ...
    for ratio in ratios:
        kept.append((kept[-1] * ratio).clamp(max=1))
    reach = torch.stack(kept)  # [drafts + 1]
    known = drafted.where((drafted >= 0) & (drafted <= 1), 0.0)
    rests = (reach[:-1, None] * targets - known).clamp(min=0)  # [drafts, V], after 0, 1, ... drafts
    mass = rests.sum(-1)
    chances = torch.where(reach[:-1] < 1, mass / (mass + 1 - reach[:-1]), 1.0)
    chances = torch.cat([chances[1:], reach[-1:]])  # of standing after 1, 2, ..., all drafts
    stands = (coins < chances).nonzero().flatten()
    count = stands.new_zeros(()) if not len(stands) else stands[-1] + 1
    if int(count) == len(tokens):
        return count, last
    rest = rests[count]
    return count, torch.where(rest.sum() > LEAST_REST, rest, targets[count])
