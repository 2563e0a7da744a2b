"""Records what confidences said and what became of the drafts, for calibration. Report §2.4.3."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from openv41.engine.calibration import errors_by_draft, fit_temperatures
from openv41.engine.dspark_files import Calibration
from openv41.engine.engine import Engine
from openv41.engine.request import Request, refuse_failed
from openv41.engine.speculation import VerifyAll
from openv41.errors import InputError


class ConfidenceRecord(VerifyAll):
    """Keeps the rounds in which no draft was left out.

    Anything else would be blind to drafts that a schedule does not verify.
    """

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts
        self._told: Float[np.ndarray, "B X"] | None = None
        self._logits: list[Float[np.ndarray, " X"]] = []
        self._accepted: list[int] = []

    def lengths(
        self,
        requests: Sequence[int],
        logits: Float[np.ndarray, "B X"],
        limits: Sequence[int],
    ) -> Sequence[int]:
        """As many as may be verified."""
        self._told = logits
        return limits

    def verified(
        self, requests: Sequence[int], lengths: Sequence[int], accepted: Sequence[int]
    ) -> None:
        """Keep the whole rounds."""
        if self._told is None:
            return
        for row, length, count in zip(self._told, lengths, accepted, strict=True):
            if length == self._num_drafts:
                self._logits.append(row)
                self._accepted.append(count)
        self._told = None

    def rounds(self) -> tuple[Float[np.ndarray, "rounds X"], Int[np.ndarray, " rounds"]]:
        """Raw confidence logits, and how many drafts were accepted."""
        logits = np.array(self._logits).reshape(-1, self._num_drafts)
        return logits, np.array(self._accepted, dtype=np.int64)


def record_confidences(
    engine: Engine, requests: Sequence[Request]
) -> tuple[Float[np.ndarray, "rounds X"], Int[np.ndarray, " rounds"]]:
    """Answer requests with every draft verified; raw logits and accepted drafts of each round."""
    if engine.drafting is None:
        raise InputError("the checkpoint has no drafter, so there is nothing to calibrate")
    record, used = ConfidenceRecord(engine.drafting.drafter.block_size), engine.drafting.speculator
    engine.drafting.speculator = record
    try:
        answers = engine.generate(requests)
    finally:
        engine.drafting.speculator = used
    refuse_failed(answers, "an answer to calibrate on")
    return record.rounds()


def calibrate(
    logits: Float[np.ndarray, "rounds X"], accepted: Int[np.ndarray, " rounds"]
) -> Calibration:
    """Fit temperatures; InputError where there is nothing to fit on."""
    if not len(logits):
        raise InputError(
            "no round verified a whole block of drafts; give more prompts or a higher --max-tokens"
        )
    fitted = fit_temperatures(logits, accepted)
    before = errors_by_draft(logits, accepted, np.ones_like(fitted))
    after = errors_by_draft(logits, accepted, fitted)
    return Calibration(
        temperatures=tuple(fitted.tolist()),
        rounds=len(logits),
        error_before=tuple(before.tolist()),
        error_after=tuple(after.tolist()),
    )
