"""A load trace replayed under fixed policies and under the scheduler. Report §2.4.3.

dspark_speed.py runs it. Seconds of steps are those of the checkpoint's cost table, confidences and
accepted drafts those of real rounds that verified every draft. The trace is closed: each phase
keeps so many requests running, which are replaced as they end, until it has drawn its tokens. So
all policies do the same work, and the seconds they take compare.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np

from openv41.engine.calibration import fit_temperatures
from openv41.engine.confidence_speculator import ConfidenceSpeculator
from openv41.engine.cost_table import CostTable
from openv41.engine.profile import ForcedVerification
from openv41.engine.speculation import Speculator

mpl.use("Agg")
from matplotlib import pyplot as plt

LOADS = (1, 2, 4, 8, 16, 32, 64, 48, 64, 24, 8, 2, 1, 1, 6, 20, 64, 64, 12, 3)  # a day, then a peak
TOKENS_PER_REQUEST = 96  # that a phase draws for each request that runs


@dataclass(frozen=True)
class Rounds:
    """What happened when every draft was verified, request after request."""

    logits: np.ndarray  # [rounds, X], raw confidences
    accepted: np.ndarray  # [rounds]


@dataclass
class Running:
    """A request of the replay: where it reads its rounds, and tokens that it still draws."""

    number: int
    place: int
    left: int


class Replay:
    """Steps of a trace; each request reads recorded rounds in their order."""

    def __init__(self, costs: CostTable, rounds: Rounds, seed: int = 0) -> None:
        self.costs, self.rounds = costs, rounds
        self.numbers = itertools.count()
        self.generator = np.random.default_rng(seed)
        self.running: list[Running] = []
        self.seconds = 0.0
        self.verified = self.accepted = self.steps = self.drafted = self.tokens = 0

    def new(self) -> Running:
        """A request that starts anywhere in the record."""
        place = int(self.generator.integers(len(self.rounds.accepted)))
        return Running(next(self.numbers), place, int(self.generator.integers(16, 256)))

    def step(self, policy: Speculator) -> None:
        """One step of all that runs."""
        numbers = [request.number for request in self.running]
        load, width = len(numbers), self.rounds.logits.shape[1]
        self.steps += 1
        if not policy.plan(numbers):
            self.seconds += self.costs.plain_seconds(load)
            policy.verified([], [], [])
            self._draw([0] * load, policy)
            return
        places = [request.place % len(self.rounds.accepted) for request in self.running]
        limits = [min(width, request.left - 1) for request in self.running]
        lengths = list(policy.lengths(numbers, self.rounds.logits[places], limits))
        accepted = np.minimum(self.rounds.accepted[places], lengths).tolist()
        self.seconds += float(self.costs.step_seconds(load, sum(lengths))[-1])
        policy.verified(numbers, lengths, accepted)
        self.drafted += 1
        self.verified += sum(lengths)
        self.accepted += sum(accepted)
        self._draw(accepted, policy)

    def _draw(self, accepted: Sequence[int], policy: Speculator) -> None:
        for request, count in zip(self.running, accepted, strict=True):
            request.left -= 1 + count
            request.place += 1
            self.tokens += 1 + count
            if request.left <= 0:
                policy.forget(request.number)
        self.running = [request for request in self.running if request.left > 0]

    def phase(self, load: int, policy: Speculator) -> None:
        """Keep ``load`` requests running until they have drawn their tokens."""
        until = self.tokens + load * TOKENS_PER_REQUEST
        while self.tokens < until:
            while len(self.running) < load:
                self.running.append(self.new())
            for request in self.running[load:]:
                policy.forget(request.number)
            del self.running[load:]
            self.step(policy)


def fixed(most: int | None) -> ForcedVerification:
    """Verify up to so many drafts of every request; None does not draft."""
    policy = ForcedVerification()
    policy.drafts = most
    return policy


def replay(
    costs: CostTable, rounds: Rounds, policy: Speculator, loads: Sequence[int] = LOADS
) -> tuple[Replay, dict[int, list[float]]]:
    """The whole replay; tokens, seconds, drafts verified and steps of each load."""
    run, speeds = Replay(costs, rounds), {}
    for load in loads:
        tokens, seconds, verified = run.tokens, run.seconds, run.verified
        steps = run.steps
        run.phase(load, policy)
        old = speeds.setdefault(load, [0, 0.0, 0, 0])
        gained = (run.tokens - tokens, run.seconds - seconds, run.verified - verified)
        speeds[load] = [a + b for a, b in zip(old, (*gained, run.steps - steps), strict=True)]
    return run, speeds


def policies(costs: CostTable, rounds: Rounds) -> dict[str, Speculator]:
    """Every fixed policy, the scheduler, calibrated or not, and the stop along current chances."""
    width = rounds.logits.shape[1]
    fitted = fit_temperatures(rounds.logits, rounds.accepted)
    return {
        "none": fixed(None),
        **{f"fixed {most}": fixed(most) for most in range(1, width + 1)},
        "scheduled": ConfidenceSpeculator(costs, num_drafts=width, temperatures=fitted),
        "scheduled, uncalibrated": ConfidenceSpeculator(costs, num_drafts=width),
        "early stop": ConfidenceSpeculator(costs, num_drafts=width, temperatures=fitted, lag=0),
    }


def lines(costs: CostTable, rounds: Rounds) -> Iterator[dict[str, object]]:
    """A line for each policy."""
    for name, policy in policies(costs, rounds).items():
        run, speeds = replay(costs, rounds, policy)
        yield {
            "benchmark": "dspark_replay",
            "policy": name,
            "tokens_per_second": run.tokens / run.seconds,
            "seconds": run.seconds,
            "drafting_steps": run.drafted / run.steps,
            "verified_per_step": run.verified / run.steps,
            "accepted_share": run.accepted / max(1, run.verified),
            "rounds": len(rounds.accepted),
            "by_load": {
                str(load): {
                    "tokens_per_second": tokens / seconds,
                    "drafts_per_request": verified / max(1, steps) / load,
                }
                for load, (tokens, seconds, verified, steps) in sorted(speeds.items())
            },
        }


def draw(found: Sequence[dict[str, object]], out: Path) -> None:
    """Draw speeds over the load, relative to no speculation."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    base = next(line for line in found if line["policy"] == "none")["by_load"]
    for line in found:
        speeds = line["by_load"]
        loads = [int(load) for load in speeds]
        ratios = [
            speeds[load]["tokens_per_second"] / base[load]["tokens_per_second"] for load in speeds
        ]
        is_ours = str(line["policy"]) == "scheduled"
        axes.plot(
            loads,
            ratios,
            marker="o",
            linewidth=2.5 if is_ours else 1,
            color="black" if is_ours else None,
            label=str(line["policy"]),
        )
    axes.set(xscale="log", xlabel="requests at once", ylabel="tokens/s to no speculation")
    axes.set_xticks([1, 4, 16, 64], ["1", "4", "16", "64"])
    axes.legend(fontsize=8)
    figure.savefig(out, dpi=120)
