"""From logits to the next token: bias, penalties, temperature, cuts, draw."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from openv41 import ops
from openv41.engine.constraint import ConstraintError, Guide
from openv41.engine.random_streams import Stream, uniform
from openv41.errors import ConfigError, InputError, OpenV41Error


class LogitsError(OpenV41Error, ArithmeticError):
    """Logits that no token can be drawn from: the model or its cache went wrong."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingConfig:
    """How a token is drawn; temperature 0 takes the most likely one.

    Order: logit bias; repetition, frequency and presence penalty; tokens that a constraint forbids
    are out; temperature; min_p; top_k; top_p. Shares of the probability are those left by the steps
    before. Log-probabilities (``engine/logprobs.py``) are of the model's own logits, before all of
    these.
    """

    temperature: float = 1.0
    top_k: int | None = None  # of all tokens, only the k most likely ones
    top_p: float = 1.0  # only the fewest tokens that hold this share of the probability
    min_p: float = 0.0  # only tokens at least this share as likely as the most likely one
    repetition_penalty: float = 1.0  # on tokens of prompt and output: logits / r, or * r below 0
    presence_penalty: float = 0.0  # off the logits of tokens in the output, once
    frequency_penalty: float = 0.0  # off the logits of tokens in the output, for each time
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, what its logit gains)
    seed: int = 0

    def __post_init__(self) -> None:
        checks = {
            "temperature": (0 <= self.temperature < math.inf, "at least 0 and finite"),
            "top_k": (self.top_k is None or self.top_k >= 1, "at least 1; leave it out for all"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_p": (0 <= self.min_p <= 1, "from 0 to 1"),
            "repetition_penalty": (1e-3 <= self.repetition_penalty <= 1e3, "from 0.001 to 1000"),
            "presence_penalty": (-2 <= self.presence_penalty <= 2, "from -2 to 2"),
            "frequency_penalty": (-2 <= self.frequency_penalty <= 2, "from -2 to 2"),
            "seed": (0 <= self.seed < 1 << 63, "from 0 to 2^63 - 1"),
        }
        problems = [
            f"{name} is {getattr(self, name)}, must be {allowed}"
            for name, (is_good, allowed) in checks.items()
            if not is_good
        ]
        problems += [
            f"logit_bias of token {token} is {bias}, must be from -100 to 100"
            for token, bias in self.logit_bias
            if not -100 <= bias <= 100
        ]
        times = Counter(token for token, _ in self.logit_bias)
        problems += [
            f"logit_bias names token {token} {count} times; give each token one bias"
            for token, count in times.items()
            if count > 1
        ]
        if problems:
            raise ConfigError("sampling", problems)


@dataclass(eq=False, slots=True)
class Draft:
    """A drafted token, the chance that it had, and the chances of all tokens.

    One without such chances could have been no other: its chance is 1.
    """

    token: int
    chance: float = 1.0
    given: "Float[Tensor, ' V'] | SharesRow | None" = None

    @property
    def is_sampled(self) -> bool:
        """Whether it could have been another token."""
        return self.given is not None

    @property
    def shares(self) -> Float[Tensor, " V"] | None:
        """The chances of all tokens; None for one that could have been no other."""
        return self.given.row if isinstance(self.given, SharesRow) else self.given


@dataclass(eq=False, slots=True)
class SharesRow:
    """Chances among those of many drafts, cut out when somebody asks: few are rejected."""

    block: Float[Tensor, "requests X V"]
    request: int
    place: int

    @property
    def row(self) -> Float[Tensor, " V"]:
        """The chances of all tokens."""
        return self.block[self.request, self.place]


class Sampler:
    """Draws the tokens of one request; equal settings and logits give equal tokens.

    It remembers what it drew and lives as long as the request: one whose cache is dropped and
    computed anew goes on with the same sampler, as if nothing had happened. Random numbers belong
    to places of the answer, so that neighbours change nothing. Everything runs on the CPU in
    float64, so that devices draw alike.
    """

    def __init__(
        self,
        config: SamplingConfig,
        num_tokens: int,
        prompt: Sequence[int] = (),
        *,
        banned: Sequence[int] = (),
        guide: Guide | None = None,
    ) -> None:
        """Ids below ``num_tokens`` can be drawn, but for ``banned``; others do not matter.

        ``guide`` tells which of them fit next; it hears of every token drawn.
        """
        if outside := [t for t, _ in config.logit_bias if not 0 <= t < num_tokens]:
            raise InputError(
                f"logit_bias names tokens {outside}; ids that can be drawn are from 0 to "
                f"{num_tokens - 1}"
            )
        self.config = config
        self.num_tokens = num_tokens
        self._banned = torch.tensor([t for t in banned if t < num_tokens], dtype=torch.int64)
        self._guide = guide
        self.place = 0  # of the next token in the answer
        self._biased = torch.tensor([t for t, _ in config.logit_bias], dtype=torch.int64)
        self._bias = torch.tensor([bias for _, bias in config.logit_bias], dtype=torch.float64)
        self._seen: Tensor | None = None  # [V], tokens of prompt and output
        self._counts: Tensor | None = None  # [V], how often each token was drawn
        if config.repetition_penalty != 1:
            known = torch.tensor([t for t in set(prompt) if t < num_tokens], dtype=torch.int64)
            self._seen = torch.zeros(num_tokens, dtype=torch.bool)
            self._seen[known] = True
        if config.presence_penalty or config.frequency_penalty:
            self._counts = torch.zeros(num_tokens, dtype=torch.int32)

    @property
    def is_simple(self) -> bool:
        """Whether nothing but the temperature says how tokens are drawn."""
        config = self.config
        cuts = config.top_k is not None or config.top_p < 1 or config.min_p > 0
        history = self._guide is not None or self._seen is not None or self._counts is not None
        return not (history or len(self._bias) or (cuts and config.temperature > 0))

    def remember(self, tokens: Iterable[int]) -> Iterator[int]:
        """Pass on tokens that were drawn elsewhere, and remember each."""
        for token in tokens:
            self._remember(token)
            yield token

    def draw(self, logits: Float[Tensor, " V"], draft: Draft | None = None) -> int:
        """Pick the next token and remember it; the lowest id among equals comes first.

        With a draft this is one step of its verification: the token is the draft, which then
        holds, or another one, which ends the round. Either way it is distributed as without one;
        of a draft without shares, and at temperature 0, it is the very same.
        """
        scores = self._scores(logits)
        token = self._pick(scores, draft)
        self._remember(token)
        return token

    def verify(
        self, logits: Float[Tensor, "rows V"], drafts: Sequence[Draft], *, block: bool = False
    ) -> Iterator[int]:
        """Draw tokens from rows of logits as long as they are those that were drafted.

        ``logits`` has a row more than there are drafts. Whoever stops asking, at the end of an
        answer, leaves the rest undrawn. ``block`` verifies the drafts together, which a constraint
        does not allow: what it forbids is known one token after the other.
        """
        assert len(logits) == len(drafts) + 1, f"{len(logits)} rows for {len(drafts)} drafts"
        if block and self.config.temperature > 0 and self._guide is None and _all_shares(drafts):
            yield from self._verify_block(logits, drafts)
            return
        for row, draft in zip(logits, [*drafts, None], strict=True):
            token = self.draw(row, draft)
            yield token
            if draft is None or token != draft.token:
                return

    def _verify_block(
        self, logits: Float[Tensor, "rows V"], drafts: Sequence[Draft]
    ) -> Iterator[int]:
        """Accept a beginning of the drafts, then draw one token more."""
        targets, begin = [], self.place
        for number, row in enumerate(logits):
            ahead = [draft.token for draft in drafts[:number]]
            targets.append(self._shares(self._scores(row, ahead)))
        drafted = torch.stack([_wide(draft.shares) for draft in drafts])
        coins = [uniform(self.config.seed, Stream.COIN, begin + i) for i in range(len(drafts))]
        accepted, rest = ops.accept_block(
            torch.stack(targets[:-1]),
            targets[-1],
            drafted,
            torch.tensor([draft.token for draft in drafts]),
            torch.tensor(coins, dtype=torch.float64),
        )
        for draft in drafts[: int(accepted)]:
            self._remember(draft.token)
            yield draft.token
        is_whole = int(accepted) == len(drafts)
        token = self._choose(rest, Stream.TOKEN if is_whole else Stream.RESIDUAL)
        self._remember(token)
        yield token

    def _scores(self, logits: Float[Tensor, " V"], ahead: Sequence[int] = ()) -> Tensor:
        """What the next token is drawn from, [V], once the tokens ``ahead`` are drawn too."""
        assert len(logits) == self.num_tokens, f"{len(logits)} logits, not {self.num_tokens}"
        scores = logits.to("cpu", torch.float64, copy=True)
        check_logits(scores, "the next token")
        return self._fitting(self._penalised(scores, ahead))

    def _remember(self, token: int) -> None:
        self.place += 1
        if self._guide is not None:
            self._guide.accept(token)
        if self._seen is not None:
            self._seen[token] = True
        if self._counts is not None:
            self._counts[token] += 1

    def _penalised(self, scores: Float[Tensor, " V"], ahead: Sequence[int]) -> Float[Tensor, " V"]:
        """Add the bias, then apply the penalties; may write to ``scores``."""
        scores[self._biased] += self._bias
        scores[self._banned] = -torch.inf
        drawn = torch.tensor(ahead, dtype=torch.int64)
        if self._seen is not None:
            penalty = self.config.repetition_penalty
            weaker = torch.where(scores > 0, scores / penalty, scores * penalty)
            seen = self._seen.index_fill(0, drawn, True) if ahead else self._seen
            scores = torch.where(seen, weaker, scores)
        if self._counts is not None:
            counts = self._counts
            if ahead:
                counts = counts.index_add(0, drawn, torch.ones_like(drawn, dtype=counts.dtype))
            scores -= self.config.frequency_penalty * counts
            scores -= self.config.presence_penalty * (counts > 0)
        return scores

    def _fitting(self, scores: Float[Tensor, " V"]) -> Float[Tensor, " V"]:
        """Rule out what the constraint forbids."""
        allowed = None if self._guide is None else self._guide.allowed()
        if allowed is None:
            return scores
        fitting = allowed.index_fill(0, self._banned, False)
        if not fitting.any():
            raise ConstraintError(
                "the constraint allows none of the tokens that can be drawn next; loosen it"
            )
        scores = scores.masked_fill(~fitting, -torch.inf)
        if scores.max() == -torch.inf:
            raise LogitsError(
                f"none of the {int(fitting.sum())} tokens that the constraint allows next can be "
                "drawn: the model gives each of them -inf"
            )
        return scores

    def _pick(self, scores: Float[Tensor, " V"], draft: Draft | None) -> int:
        if self.config.temperature == 0:
            return int((scores == scores.max()).nonzero()[0])
        shares = self._shares(scores)
        if draft is None or not draft.is_sampled:
            return self._choose(shares, Stream.TOKEN)
        coin = uniform(self.config.seed, Stream.COIN, self.place)
        chances = shares[draft.token], _number(draft.chance)
        if ops.accept_drafts(*chances, _number(coin)):
            return draft.token
        return self._choose(ops.residual(shares, _wide(draft.shares)), Stream.RESIDUAL)

    def _shares(self, scores: Float[Tensor, " V"]) -> Float[Tensor, " V"]:
        """Probability of each token; 0 where the settings leave none."""
        shares = torch.softmax((scores - scores.max()) / self.config.temperature, 0)
        ids = kept_ids(shares, self.config)  # no overflow near temperature 0
        if len(ids) == len(shares):
            return shares
        kept = torch.zeros_like(shares).index_copy_(0, ids, shares[ids])
        return kept / kept.sum()

    def _choose(self, shares: Float[Tensor, " V"], stream: Stream) -> int:
        point = _number(uniform(self.config.seed, stream, self.place))
        return int(ops.choose_tokens(shares[None], point[None]))


def _number(value: float) -> Float[Tensor, ""]:
    return torch.tensor(value, dtype=torch.float64)


def _wide(shares: Float[Tensor, " V"] | None) -> Float[Tensor, " V"]:
    assert shares is not None, "the draft has no shares"
    return shares.to("cpu", torch.float64)


def _all_shares(drafts: Sequence[Draft]) -> bool:
    return bool(drafts) and all(draft.is_sampled for draft in drafts)


def check_logits(logits: Float[Tensor, " V"], owner: str) -> None:
    """Refuse a row of logits that is no distribution; ``owner`` is whose logits they are."""
    best = logits.max()  # NaN where any logit is
    if best.isfinite():
        return
    found = "-inf"
    if best.isnan():
        found = "NaN"
    elif best > 0:
        found = "+inf"
    bad = (logits.isnan() if best.isnan() else logits == best).nonzero()
    raise LogitsError(
        f"the logits of {owner} hold {found} at {len(bad)} of {len(logits)} ids, first at "
        f"{int(bad[0])}; they must be finite or, for some ids, -inf: this is a fault of the "
        "checkpoint or of the program, not of the request"
    )


def kept_ids(shares: Float[Tensor, " V"], config: SamplingConfig) -> Int64[Tensor, " kept"]:
    """Ids, ascending, that min_p, top_k and top_p leave; of equals, the lowest ids stay."""
    ids = ((shares > 0) & (shares >= config.min_p * shares.max())).nonzero().flatten()
    if config.top_k is not None and config.top_k < len(ids):
        ids = ids[_highest(shares[ids], config.top_k)]
    if config.top_p < 1:
        ids = ids[_fewest(shares[ids], config.top_p)]
    return ids


def _highest(shares: Float[Tensor, " kept"], count: int) -> Bool[Tensor, " kept"]:
    """Which are the ``count`` largest."""
    border = shares.topk(count, sorted=False).values.min()
    chosen = shares > border
    equal = (shares == border).nonzero().flatten()
    chosen[equal[: count - int(chosen.sum())]] = True
    return chosen


def _fewest(shares: Float[Tensor, " kept"], part: float) -> Int64[Tensor, " fewer"]:
    """Places, ascending, of the fewest largest ones that hold ``part`` of the sum.

    One below (1 - part) / n of the sum has at least ``part`` before it and is out. Half of that
    bound, safe from rounding, spares sorting a long tail.
    """
    total = shares.sum()
    likely = (shares > (1 - part) * total / len(shares) / 2).nonzero().flatten()
    held, order = shares[likely].sort(descending=True, stable=True)
    count = 1 + int(torch.searchsorted(held.cumsum(0), part * total))
    return likely[order[:count]].sort().values
