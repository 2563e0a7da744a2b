"""Confidence-scheduled verification: which drafts of a step are verified. Report §2.4.3.

A step that verifies m drafts of R requests brings R + (sum of the survivals of these drafts)
tokens in the time that a cost table says; a schedule maximises tokens per second.

Verification keeps the target's distribution only if the decision to verify draft k of a request
depends on nothing that is drawn at k or behind it in this step. Hence three rules: candidates come
by (-survival, position, request), a request never gains from having several equal candidates, and
how many are taken is either decided by an early stop along that order or before the step.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

LAG = 2  # steps; a budget needs no confidence that a device may still be computing


def survival(
    confidence: Float[np.ndarray, "B X"], counts: Sequence[int] | None = None
) -> Float[np.ndarray, "B X"]:
    """Chance that a draft and all before it are accepted: a_k = product of c_i over i <= k.

    ``counts`` limits the drafts of each request: those behind have survival 0, as have drafts from
    a confidence on that is not a number. Not increasing along a row, also after rounding.
    """
    wide = confidence.astype(np.float64)
    chances = np.cumprod(np.where(wide > 0, np.minimum(wide, 1.0), 0.0), axis=1)
    if counts is not None:
        chances[np.arange(confidence.shape[1]) >= np.asarray(counts)[:, None]] = 0.0
    return chances


def ordered(
    survivals: Float[np.ndarray, "B X"],
) -> tuple[Float[np.ndarray, " candidates"], Int[np.ndarray, " candidates"]]:
    """Survivals above 0 and whose they are, by (-survival, position, request)."""
    by_position = survivals.T.ravel()
    order = np.argsort(-by_position, kind="stable")
    order = order[: np.count_nonzero(by_position > 0)]
    return by_position[order], order % max(1, len(survivals))


def admit(survivals: Float[np.ndarray, "B X"], budget: int) -> Int[np.ndarray, " B"]:
    """Drafts of each request among the first ``budget`` candidates."""
    _, owners = ordered(survivals)
    return np.bincount(owners[: max(0, budget)], minlength=len(survivals))


def rates(
    survivals: Float[np.ndarray, "B X"], seconds: Float[np.ndarray, " sizes"]
) -> Float[np.ndarray, " sizes"]:
    """Tokens per second of a step that verifies the first 0, 1, 2, ... candidates.

    ``seconds`` has the time of a step by the number of drafts verified; at least one for each
    candidate, and one for none.
    """
    chances, _ = ordered(survivals)
    tokens = len(survivals) + np.concatenate([[0.0], np.cumsum(chances)])
    found: Float[np.ndarray, " sizes"] = tokens / seconds[: len(tokens)]
    return found


def early_stop(
    survivals: Float[np.ndarray, "B X"], seconds: Float[np.ndarray, " sizes"]
) -> Int[np.ndarray, " B"]:
    """Drafts of each request: candidates join while each raises the rate.

    Algorithm 1 of the DSpark paper (arXiv 2607.05147). The stop is what keeps the output's
    distribution: a search beyond the first candidate that does not pay would let what is drawn
    there decide about drafts before it.
    """
    found = rates(survivals, seconds)
    worse = np.flatnonzero(found[1:] <= found[:-1])
    return admit(survivals, int(worse[0]) if len(worse) else len(found) - 1)


def best_budget(survivals: Float[np.ndarray, "B X"], seconds: Float[np.ndarray, " sizes"]) -> int:
    """Number of drafts with the highest rate, the fewest of equals; for survivals of the past.

    It looks at all candidates. With survivals of the step that it is for, it would distort the
    output: see ``early_stop``.
    """
    return int(np.argmax(rates(survivals, seconds)))


class ConfidenceHistory:
    """Survivals as they were ``lag`` steps ago; those of a request without such a past are 1."""

    def __init__(self, num_drafts: int, lag: int = LAG) -> None:
        assert lag >= 1, f"lag is {lag}: a budget must not see the step that it is for"
        self._num_drafts, self._lag = num_drafts, lag
        self._settled: dict[int, Float[np.ndarray, " X"]] = {}
        self._recent: deque[dict[int, Float[np.ndarray, " X"]]] = deque()  # too young to be known

    def publish(self, requests: Sequence[int], survivals: Float[np.ndarray, "B X"]) -> bool:
        """End a step; requests that it did not draft for keep what they have.

        Say whether the next step may know more than this one.
        """
        self._recent.append(dict(zip(requests, survivals, strict=True)))
        settled = self._recent.popleft() if len(self._recent) == self._lag else {}
        self._settled.update(settled)
        return bool(settled)

    def rows(
        self, requests: Sequence[int], unknown: Float[np.ndarray, " X"] | None = None
    ) -> Float[np.ndarray, "B X"]:
        """What the next step may know of these requests; ``unknown`` stands in for ones."""
        unknown = np.ones(self._num_drafts) if unknown is None else unknown
        found = [self._settled.get(request, unknown) for request in requests]
        return np.concatenate([np.ones(0), *found]).reshape(-1, self._num_drafts)

    def forget(self, request: int) -> None:
        """Drop what is known of a request that has ended."""
        for known in (self._settled, *self._recent):
            known.pop(request, None)
