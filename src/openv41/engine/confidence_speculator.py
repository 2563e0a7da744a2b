"""A speculator that spends rows where drafts are likely to be accepted. Report §2.4.3."""

from collections import deque
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
PROBES = (64, 512)  # steps without drafting until it is tried again: at first, and at most
PROBE_COST = 0.02  # share of the time since the last one that a trial may cost
PROBE_DRAFTS = 4  # that a trial verifies, which costs little where rows are dear
MEMORY = 0.98  # share of what is known of all requests that a drafting step leaves
TRIAL_MEMORY = 0.5  # likewise, of the first step of a trial: what was known is old
PRIOR = 16.0  # rounds of which every draft was accepted, known before the first
TRIAL_ROUNDS = 8  # of all requests together: one alone says little
NOISE = 24.0  # requests whose last survivals say as much of whether to draft as those of late do
BUDGET_NOISE = 0.5  # likewise, of how much
TRUST = 2.0  # drafts of a place, as many accepted as expected, beside those that were counted


class ConfidenceSpeculator:
    """Verifies what raises the tokens per second that a cost table lets expect.

    The budget of a step comes from survivals ``lag`` steps old and those of late; the drafts
    verified are those of the highest current survivals. ``lag`` 0 stops early along the current
    ones instead (``early_stop``). A step does not draft at all where the past does not promise
    ``MIN_GAIN``; there a request without a past counts as requests were of late.

    Survivals are scaled by the share of expected drafts that were accepted of late, place by place,
    so that confidences which promise too much do not cost speed for long. Whether drafting pays is
    asked of what requests were like of late; the fewer run, the less their last rounds say.
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
        self._times: dict[int, tuple[float, Float[np.ndarray, " sizes"]]] = {}  # by requests
        self._history = ConfidenceHistory(num_drafts, max(1, lag))
        # Survivals of late, of all requests; at first drafts are trusted for some rounds.
        self._sum, self._rows = PRIOR * np.ones(num_drafts), PRIOR
        # Survivals of steps that have not ended, and what each leaves of the past.
        self._open: deque[tuple[Float[np.ndarray, "B X"], float]] = deque()
        self._found: tuple[list[int], int | None] | None = None  # requests, their best budget
        self._undrafted = 0  # steps since the last one that drafted
        self._patience = PROBES[0]  # steps until the next trial
        self._memory = MEMORY  # of the step at hand
        self._trial_steps = 0  # left of a trial
        self._expected, self._accepted = np.zeros((2, num_drafts))  # drafts of late, by place
        self.reliability = np.ones(num_drafts)  # accepted over expected of late, at most 1
        self._places = np.arange(num_drafts)
        self.budget = 0  # drafts that the last step might verify

    def plan(self, requests: Sequence[int]) -> bool:
        """Choose the step's budget; say no where drafting does not pay."""
        self.budget = 0
        if not requests:
            return False
        plain, seconds = self._seconds(len(requests))
        if self._found is None or self._found[0] != requests:
            self._found = list(requests), self._best_budget(requests)
        budget = self._found[1]
        pays = budget is not None
        self._memory = MEMORY
        if not (pays or self._trial_steps) and self._is_due(len(requests), plain, seconds):
            self._trial_steps, self._memory = -(-TRIAL_ROUNDS // len(requests)), TRIAL_MEMORY
            self._patience = min(2 * self._patience, PROBES[1])
        is_trial = not pays and self._trial_steps > 0
        if budget is not None:
            self._undrafted, self._patience, self._trial_steps = 0, PROBES[0], 0
            self.budget = self._costs.fill(len(requests), budget)
        elif is_trial:
            self._undrafted = 0
            self._trial_steps -= 1
            self.budget = min(len(requests), PROBE_DRAFTS)
        else:
            self._undrafted += 1
        return pays or is_trial

    def lengths(
        self,
        requests: Sequence[int],
        logits: Float[np.ndarray, "B X"],
        limits: Sequence[int],
    ) -> list[int]:
        """Admit drafts by their survival, up to the budget."""
        current = survival(confidences(logits, self._temperatures))
        self._open.append((current, self._memory))
        candidates = current * (self._places < np.asarray(limits)[:, None])
        if self._lag and self.budget >= sum(limits):
            return [int(count) for count in np.count_nonzero(candidates, axis=1)]
        candidates = self._scaled(candidates)
        if self._lag:
            return [int(count) for count in admit(candidates, self.budget)]
        return [int(n) for n in early_stop(candidates, self._seconds(len(requests))[1])]

    def verified(
        self, requests: Sequence[int], lengths: Sequence[int], accepted: Sequence[int]
    ) -> None:
        """Remember survivals, and how many of the expected drafts were accepted.

        Steps end in their order, but the next one may have been planned already. What is best for
        the same requests is looked up when they ask for it, and computed here.
        """
        if not requests:
            if self._history.publish((), np.zeros((0, len(self._sum)))):
                self._found = None
            return
        current, memory = self._open.popleft()
        inside = self._places < np.asarray(lengths)[:, None]
        held = self._places < np.asarray(accepted)[:, None]
        self._expected = memory * self._expected + (current * inside).sum(axis=0)
        self._accepted = memory * self._accepted + held.sum(axis=0)
        self.reliability = np.minimum(1.0, (self._accepted + TRUST) / (self._expected + TRUST))
        self._sum = memory * self._sum + current.sum(axis=0)
        self._rows = memory * self._rows + len(current)
        self._history.publish(requests, current)
        self._found = list(requests), self._best_budget(requests)

    def forget(self, request: int) -> None:
        """Drop the past of a request that has ended."""
        self._history.forget(request)

    def _best_budget(self, requests: Sequence[int]) -> int | None:
        """Drafts with the highest rate; None where drafting does not pay."""
        plain, seconds = self._seconds(len(requests))
        usual = self._sum / self._rows
        last = self._history.rows(requests, usual)
        likely = self._likely(usual, last, NOISE)
        if float(rates(likely, seconds).max()) * plain < MIN_GAIN * len(requests):
            return None
        return best_budget(self._likely(usual, last, BUDGET_NOISE), seconds)

    def _likely(
        self, usual: Float[np.ndarray, " X"], last: Float[np.ndarray, "B X"], noise: float
    ) -> Float[np.ndarray, "B X"]:
        """Survivals between those of late and the last of each request.

        ``noise`` requests at once make them count alike.
        """
        return self._scaled(usual + len(last) / (len(last) + noise) * (last - usual))

    def _scaled(self, survivals: Float[np.ndarray, "B X"]) -> Float[np.ndarray, "B X"]:
        """Survivals as far as those of late held; still not increasing along a row."""
        scaled: Float[np.ndarray, "B X"] = np.minimum.accumulate(
            survivals * self.reliability, axis=1
        )
        return scaled

    def _is_due(self, requests: int, plain: float, seconds: Float[np.ndarray, " sizes"]) -> bool:
        """Whether to try again: not where it could not pay if every draft were accepted."""
        if self._undrafted < self._patience:
            return False
        best = ((requests + np.arange(len(seconds))) / seconds).max()
        steps = -(-TRIAL_ROUNDS // requests)
        extra = steps * (float(seconds[min(requests, PROBE_DRAFTS)]) - plain)
        could_pay = best * plain >= MIN_GAIN * requests
        return bool(could_pay) and extra <= PROBE_COST * self._undrafted * plain

    def _seconds(self, requests: int) -> tuple[float, Float[np.ndarray, " sizes"]]:
        """Of a step without drafting, and of one that verifies 0, 1, ... drafts."""
        if requests not in self._times:
            most = requests * len(self._temperatures)
            times = self._costs.plain_seconds(requests), self._costs.step_seconds(requests, most)
            self._times[requests] = times
        return self._times[requests]
