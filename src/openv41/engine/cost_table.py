"""Seconds of decode steps, measured on the machine at hand. Report §2.4.3."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from openv41.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class CostTable:
    """Seconds of a decode step by requests and by drafts verified of each of them.

    ``plain`` is a step without drafting; ``verify[i][l]`` one that drafts for ``requests[i]``
    requests and verifies ``l`` drafts of each. Between measured loads times are interpolated,
    beyond the last they go on with its slope. Where a forward is padded to one of ``tiers`` rows,
    times are those of the padded size.
    """

    requests: tuple[int, ...]
    plain: tuple[float, ...]
    verify: tuple[tuple[float, ...], ...]
    tiers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        problems = []
        for name in ("requests", "tiers"):
            values = getattr(self, name)
            if any(b <= a for a, b in zip((0, *values), values, strict=False)):
                problems.append(f"{name} is {list(values)}, must be positive and ascending")
        if not self.requests:
            problems.append("requests is empty; measure at least one load")
        if not len(self.requests) == len(self.plain) == len(self.verify):
            problems.append("plain and verify must have one entry for each of requests")
        elif len({len(times) for times in self.verify}) != 1 or not self.verify[0]:
            problems.append("every load must be measured with the same numbers of drafts, 0 first")
        elif not self._is_monotone():
            problems.append("seconds must be above 0 and not fall with requests or drafts")
        if problems:
            raise ConfigError("cost table", problems)

    def _is_monotone(self) -> bool:
        plain, verify = np.asarray(self.plain), np.asarray(self.verify)
        falls = [np.diff(plain), np.diff(verify, axis=0), np.diff(verify, axis=1)]
        rising = all(bool((f >= 0).all()) for f in falls)
        return rising and bool(plain[0] > 0) and bool(verify[0, 0] > 0)

    @classmethod
    def measured(
        cls,
        plain: Mapping[int, Sequence[float]],
        verify: Mapping[tuple[int, int], Sequence[float]],
        *,
        tiers: Sequence[int] = (),
    ) -> "CostTable":
        """From samples by requests, and by (requests, drafts of each).

        Each time is the median of its samples, then at least that of every smaller load: a forward
        of more rows is not faster, whatever a busy machine says.
        """
        requests = sorted(plain)
        drafts = sorted({drafts for _, drafts in verify})
        medians = np.array([[np.median(verify[r, d]) for d in drafts] for r in requests])
        rising = np.maximum.accumulate(np.maximum.accumulate(medians, axis=0), axis=1)
        base = np.maximum.accumulate([np.median(plain[r]) for r in requests])
        return cls(
            requests=tuple(requests),
            plain=tuple(base.tolist()),
            verify=tuple(tuple(times) for times in rising.tolist()),
            tiers=tuple(tiers),
        )

    @property
    def num_drafts(self) -> int:
        """Most drafts of a request that were measured."""
        return len(self.verify[0]) - 1

    def plain_seconds(self, requests: int) -> float:
        """Seconds of a step that draws one token for each request, without drafting."""
        return self._at(np.array(self.plain), requests)

    def step_seconds(self, requests: int, most: int) -> Float[np.ndarray, " sizes"]:
        """Seconds of a step that drafts, and verifies 0, 1, ... ``most`` drafts altogether."""
        times = np.array([self._at(column, requests) for column in np.array(self.verify).T])
        rows = self._padded(requests + np.arange(most + 1))
        return _extended(np.arange(len(times)) * requests, times, rows - requests)

    def fill(self, requests: int, budget: int) -> int:
        """Drafts that fit the rows which a step with ``budget`` drafts is padded to.

        It depends on the budget alone, which is known before the step. ``admit`` ends where there
        are no more drafts.
        """
        rows = requests + budget
        place = bisect_left(self.tiers, rows)
        return (self.tiers[place] if place < len(self.tiers) else rows) - requests

    def _padded(self, rows: Int[np.ndarray, " asked"]) -> Int[np.ndarray, " asked"]:
        if not self.tiers:
            return rows
        places = np.searchsorted(self.tiers, rows)
        padded = np.array(self.tiers)[np.minimum(places, len(self.tiers) - 1)]
        return np.where(places < len(self.tiers), padded, rows)

    def _at(self, times: Float[np.ndarray, " loads"], requests: int) -> float:
        return float(_extended(np.array(self.requests), times, np.array([requests]))[0])


def _extended(
    places: Int[np.ndarray, " known"],
    values: Float[np.ndarray, " known"],
    wanted: Int[np.ndarray, " asked"],
) -> Float[np.ndarray, " asked"]:
    """Interpolate linearly; go on with the last slope behind the last place."""
    found: Float[np.ndarray, " asked"] = np.interp(wanted, places, values)
    if len(places) > 1:
        slope = (values[-1] - values[-2]) / (places[-1] - places[-2])
        found += np.maximum(wanted - places[-1], 0) * slope
    return found
