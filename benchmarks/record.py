"""Where a figure comes from, and the file that keeps it."""

import json
import os
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path

import torch

from openv41.io.atomic import write_atomic

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results"


def machine() -> dict[str, object]:
    """What a CPU figure depends on."""
    table = Path("/proc/cpuinfo")
    lines = table.read_text().splitlines() if table.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    return {
        "device": "cpu",
        "cpu": names[0] if names else platform.processor(),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "load_average_at_start": round(os.getloadavg()[0], 2),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit.stdout.strip(),
    }


def commit_of(named: str = "") -> dict[str, object]:
    """The version of torch and the commit, that named or this repository's."""
    return {"torch": torch.__version__, "commit": named or machine()["commit"]}


def record(
    name: str,
    lines: Iterable[dict[str, object]],
    *,
    about: dict[str, object] | None = None,
    folder: Path = RESULTS,
) -> list[dict[str, object]]:
    """Measure, write and return the lines of one benchmark; ``about`` is the machine otherwise."""
    about = machine() if about is None else about
    kept = [about | line for line in lines]
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in kept)
    write_atomic(folder / f"{name}.jsonl", text.encode())
    return kept
