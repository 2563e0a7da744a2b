"""Fixtures and habits of every test: shared data, seeds, determinism, recorded figures."""

import hashlib
import json
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from jaxtyping import config as jaxtyping_config

REPOSITORY = Path(__file__).parent.parent
WHOLE_PROGRAMS = {"cli", "demo", "engine", "golden_cases", "server"}
PROOFS = REPOSITORY / "benchmarks" / "results" / "prove.jsonl"

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic matrix products
settings.register_profile("tests", derandomize=True, deadline=None, database=None)
settings.load_profile("tests")


def pytest_addoption(parser):
    parser.addoption(
        "--golden-dir",
        type=Path,
        default=REPOSITORY.parent / "shared" / "golden",
        help="golden data of the released reference (default: shared/golden beside the repository)",
    )


def pytest_configure(config):
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Check shapes in every test but those of whole programs, which it makes three times as slow.

    There, and in files marked ``unchecked``, it is for tests marked ``shapes``. A hook, because it
    must come before all fixtures.
    """
    whole = item.path.relative_to(REPOSITORY / "tests").parts[0] in WHOLE_PROGRAMS
    unchecked = whole or item.get_closest_marker("unchecked")
    checked = not unchecked or item.get_closest_marker("shapes")
    jaxtyping_config.update("jaxtyping_disable", not checked)


def _must_have_golden(config):
    """In CI, golden tests may not be skipped where the shared folder is present."""
    return bool(os.environ.get("CI")) and config.getoption("golden_dir").parent.is_dir()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    skipped = report.skipped and not hasattr(report, "wasxfail")
    golden = item.get_closest_marker("golden") or "golden_dir" in item.fixturenames
    if skipped and golden and _must_have_golden(item.config):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome, report.longrepr = "failed", f"golden tests may not be skipped: {reason}"
    return report


@pytest.fixture(scope="session")
def golden_dir(pytestconfig):
    """Folder of the golden sets A and B and of ops."""
    path = pytestconfig.getoption("golden_dir")
    if not path.is_dir():
        pytest.skip(f"no golden data at {path}; name its folder with --golden-dir")
    return path


@pytest.fixture(scope="session")
def shared_dir(golden_dir):
    """Folder above the golden data: specification, vectors, exemplars."""
    return golden_dir.parent


@pytest.fixture(autouse=True)
def seeded(request):
    """Seed every generator from the test's own name, so that order and selection do not matter."""
    seed = int.from_bytes(hashlib.sha256(request.node.nodeid.encode()).digest()[:4], "little")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@pytest.fixture(autouse=True)
def deterministic():
    """Use deterministic algorithms; torch then also fills fresh memory with NaN (integers: max)."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_flush_denormal(False)  # a training command in this process sets it


@pytest.fixture
def record_proof(request):
    """Return a function that keeps a proof's figures as one JSON line, replaced on each run."""
    if not request.node.get_closest_marker("prove"):
        pytest.fail("record_proof is for tests marked prove")

    def record(**figures):
        line = {"proof": request.node.nodeid, "torch": torch.__version__, **figures}
        old = PROOFS.read_text().splitlines() if PROOFS.exists() else []
        kept = [text for text in old if json.loads(text)["proof"] != line["proof"]]
        PROOFS.parent.mkdir(parents=True, exist_ok=True)
        PROOFS.write_text("\n".join(sorted([*kept, json.dumps(line)])) + "\n")

    return record
