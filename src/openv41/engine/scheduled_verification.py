"""Lets an engine verify by what was measured: a cost table and temperatures. Report §2.4.3."""

import logging
from pathlib import Path

from openv41.engine.confidence_speculator import ConfidenceSpeculator
from openv41.engine.cost_table import CostTable
from openv41.engine.dspark_files import (
    CALIBRATION_FILE,
    PROFILE_FILE,
    Calibration,
    Surroundings,
    load_calibration,
    load_profile,
)
from openv41.engine.engine import Engine
from openv41.errors import InputError

logger = logging.getLogger(__name__)

ALL = "every draft is verified, which under load can be slower than none"


def schedule_verification(
    engine: Engine,
    checkpoint: Path,
    *,
    profile: Path | None = None,
    calibration: Path | None = None,
) -> None:
    """Give an engine the speculator that its files allow, and log which.

    Files that are named must be of this machine and these weights (InputError); those beside the
    checkpoint are used only if they are. Without a profile the engine verifies every draft.
    """
    if engine.drafting is None:
        if profile is not None or calibration is not None:
            raise InputError(
                "a profile or a calibration is named, but the engine does not speculate: the "
                "checkpoint has no drafter, or speculation is off"
            )
        return
    here = Surroundings.of(engine.model, graphs=engine.decode is not None)
    costs = _profile(profile, checkpoint / PROFILE_FILE, here)
    found = _calibration(calibration, checkpoint / CALIBRATION_FILE, here)
    if costs is None:
        return
    size = engine.drafting.drafter.block_size
    for name, drafts in (
        ("profile", costs.num_drafts),
        ("calibration", size if found is None else len(found.temperatures)),
    ):
        if drafts != size:
            raise InputError(f"the {name} is for {drafts} drafts, the drafter makes {size}")
    engine.drafting.speculator = ConfidenceSpeculator(
        costs, num_drafts=size, temperatures=None if found is None else found.temperatures
    )


def _profile(named: Path | None, beside: Path, here: Surroundings) -> CostTable | None:
    if named is not None:
        return load_profile(named, here)
    try:
        if beside.exists():
            return load_profile(beside, here)
        logger.info("%s; 'openv41 dspark profile' measures what it costs here", ALL)
    except InputError as error:
        logger.warning("%s: %s", ALL, error)
    return None


def _calibration(named: Path | None, beside: Path, here: Surroundings) -> Calibration | None:
    if named is not None:
        return load_calibration(named, here)
    try:
        if beside.exists():
            return load_calibration(beside, here)
        logger.info("confidences are taken as they are; 'openv41 dspark calibrate' fits them")
    except InputError as error:
        logger.warning("confidences are taken as they are: %s", error)
    return None
