"""Every module imports on a CPU, and importing has no side effects."""

import json
import subprocess
import sys

PROBE = """
import importlib, json, logging, os, pathlib, pkgutil, random, sys, warnings
import numpy, torch

warnings.simplefilter("error")
state = lambda: {
    "environment": dict(os.environ),
    "files": sorted(map(str, pathlib.Path().rglob("*"))),
    "default dtype": str(torch.get_default_dtype()),
    "threads": torch.get_num_threads(),
    "gradients": torch.is_grad_enabled(),
    "deterministic": torch.are_deterministic_algorithms_enabled(),
    "torch generator": hash(torch.get_rng_state().numpy().tobytes()),
    "numpy generator": hash(numpy.random.get_state()[1].tobytes()),
    "python generator": hash(random.getstate()),
    "log handlers": str(logging.getLogger().handlers + logging.getLogger("openv41").handlers),
    "CUDA": torch.cuda.is_initialized(),
}
changed = []
def compare(before, after):
    changed.extend(key for key in before if before[key] != after[key])

before = state()
import openv41
compare(before, state())
terminal = sorted({"rich", "typer"} & set(sys.modules))

import rich.style  # draws random numbers
before = state()
skip = not importlib.util.find_spec("triton")
for module in pkgutil.walk_packages(openv41.__path__, "openv41."):
    if not (skip and module.name.endswith("_triton")):
        importlib.import_module(module.name)
compare(before, state())
count = sum(name.startswith("openv41") for name in sys.modules)
sys.stderr.write(json.dumps({"changed": changed, "terminal": terminal, "modules": count}))
"""


def test_importing_every_module_changes_nothing(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "", "importing prints"
    report = json.loads(done.stderr)
    assert report["changed"] == []
    assert report["terminal"] == [], "the library imports what belongs to the command line"
    assert report["modules"] > 20
