"""A speculator that spends rows where drafts are likely to be accepted. Report §2.4.3."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from openv41.engine.calibration import confidences
from openv41.engine.cost_table import CostTable
from openv41.engine.verification_scheduler import (
    LAG,
    ConfidenceHistory,
    admit,
    best_budget,
    early_stop,
    rates,
    survival,
)

MIN_GAIN = 1.02  # expected speed-up that drafting must have: less is lost in what no table knows
PROBE_STEPS = 64  # without drafting, until it is tried again: acceptance may have changed
MEMORY = 0.98  # share of what is known of all requests that a drafting step leaves as it was
TRUST = 32.0  # drafts, as many accepted as expected, that the record of a new engine starts with


class ConfidenceSpeculator:
    """Verifies what raises the tokens per second that a cost table lets expect.

    The budget of a step comes from survivals ``lag`` steps old, over all candidates; the drafts
    verified are those of the highest current survivals. ``lag`` 0 stops early along the current
    ones instead (Algorithm 1). A step does not draft at all where the past does not promise
    ``MIN_GAIN``; there a request without a past counts as requests were of late.

    Survivals are scaled by the share of expected drafts that were accepted of late, so that
    confidences which promise too much do not cost speed for long.
    """

    def __init__(
        self,
        costs: CostTable,
        *,
        num_drafts: int,
        temperatures: Sequence[float] | None = None,
        lag: int = LAG,
    ) -> None:
        self._temperatures = np.ones(num_drafts) if temperatures is None else np.array(temperatures)
        assert self._temperatures.shape == (num_drafts,), (
            f"{len(self._temperatures)} temperatures for {num_drafts} drafts"
        )
        self._costs, self._lag = costs, lag
        self._history = ConfidenceHistory(num_drafts, max(1, lag))
        self._usual = np.ones(num_drafts)  # survival of late, of all requests
        self._current: Float[np.ndarray, "B X"] | None = None  # of a step that drafts
        self._undrafted = 0  # steps since the last one that drafted
        self._expected = self._accepted = TRUST
        self.budget = 0  # drafts that the last step might verify

    def plan(self, requests: Sequence[int]) -> bool:
        """Choose the step's budget; say no where drafting does not pay."""
        self._current, self.budget = None, 0
        if not requests:
            return False
        past = self._history.rows(requests) * self.reliability
        seconds = self._costs.step_seconds(len(requests), past.size)
        self.budget = self._costs.fill(len(requests), best_budget(past, seconds))
        if self._pays(requests, seconds):
            self._undrafted = 0
            return True
        self._undrafted += 1
        if self._undrafted > PROBE_STEPS:
            self._undrafted = 0
            self.budget = max(self.budget, len(requests))
            return True
        self.budget = 0
        return False

    def lengths(
        self,
        requests: Sequence[int],
        logits: Float[np.ndarray, "B X"],
        limits: Sequence[int],
    ) -> list[int]:
        """Admit drafts by their survival, up to the budget."""
        found = confidences(logits, self._temperatures)
        self._current = survival(found)
        candidates = survival(found, limits) * self.reliability
        if self._lag:
            return [int(count) for count in admit(candidates, self.budget)]
        seconds = self._costs.step_seconds(len(requests), candidates.size)
        return [int(count) for count in early_stop(candidates, seconds)]

    def verified(
        self, requests: Sequence[int], lengths: Sequence[int], accepted: Sequence[int]
    ) -> None:
        """Remember survivals, and how many of the expected drafts were accepted."""
        if self._current is None:
            self._history.publish((), np.zeros((0, len(self._usual))))
            return
        inside = np.arange(len(self._usual)) < np.asarray(lengths)[:, None]
        self._expected = MEMORY * self._expected + float(self._current[inside].sum())
        self._accepted = MEMORY * self._accepted + float(sum(accepted))
        self._usual = MEMORY * self._usual + (1 - MEMORY) * self._current.mean(axis=0)
        self._history.publish(requests, self._current)

    def forget(self, request: int) -> None:
        """Drop the past of a request that has ended."""
        self._history.forget(request)

    @property
    def reliability(self) -> float:
        """Accepted drafts over expected ones of late, at most 1."""
        return min(1.0, self._accepted / max(self._expected, 1e-9))

    def _pays(self, requests: Sequence[int], seconds: Float[np.ndarray, " sizes"]) -> bool:
        """Whether the past promises that drafting is faster than not."""
        past = self._history.rows(requests, self._usual) * self.reliability
        drafted = float(rates(past, seconds).max())
        return drafted * self._costs.plain_seconds(len(requests)) >= MIN_GAIN * len(requests)
