"""Tells checkpoints apart, so that no cache of one serves another. Report §2.2."""

import hashlib
from pathlib import Path

from openv41.engine.dspark_files import CALIBRATION_FILE, PROFILE_FILE


def fingerprint(checkpoint: Path, numerics: str) -> str:
    """Tell models apart: their configuration, the names, sizes and times of their files."""
    files = sorted(
        path
        for path in checkpoint.iterdir()
        if path.suffix in (".json", ".safetensors")
        and path.name not in (PROFILE_FILE, CALIBRATION_FILE)  # they change no cache
    )
    about = [f"{p.name} {p.stat().st_size} {p.stat().st_mtime_ns}" for p in files]
    return hashlib.blake2b("\n".join([numerics, *about]).encode(), digest_size=16).hexdigest()
