"""Peak memory of loading a checkpoint."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.io import checkpoint_tools as tools

pytestmark = pytest.mark.unchecked

REPOSITORY = Path(__file__).parents[2]

LOADER = """
import sys
from pathlib import Path
import torch
from openv41.io.checkpoint import load_model

def memory(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

before = memory("VmRSS")
dtype = sys.argv[2] if sys.argv[2] == "stored" else getattr(torch, sys.argv[2])
model = load_model(Path(sys.argv[1]), dtype=dtype)
sizes = [t.numel() * t.itemsize for t in model.state_dict().values()]
print(memory("VmHWM") - before, sum(sizes), max(sizes))
"""


def measure_load(folder, dtype):
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY / "src")}
    command = [sys.executable, "-c", LOADER, folder, dtype]
    result = subprocess.run(
        command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, check=True
    )
    return tuple(map(int, result.stdout.split()))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_loading_a_gigabyte_stays_below_model_plus_largest_tensor(tmp_path):
    tools.write_random(tools.big_config(), tmp_path / "big")
    peak, model, largest = measure_load(tmp_path / "big", "stored")
    assert model >= 1 << 30
    assert peak < model + largest


@pytest.fixture(scope="module")
def big_checkpoint(tmp_path_factory):
    """More than 1 GB in the released format, written by the fixture command."""
    folder = tmp_path_factory.mktemp("fixture") / "big"
    options = ["--preset", "small", "--num-experts", "112", "--no-outputs"]
    subprocess.run([sys.executable, "-m", "openv41", "fixture", folder, *options], check=True)
    return folder / "checkpoint"


@pytest.mark.prove
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.parametrize("dtype", ["stored", "bfloat16", "float32"])
def test_peak_memory_in_every_dtype(big_checkpoint, dtype, record_proof):
    size = sum(file.stat().st_size for file in big_checkpoint.glob("*.safetensors"))
    assert size > 1e9
    peak, model, largest = measure_load(big_checkpoint, dtype)
    record_proof(
        dtype=dtype,
        checkpoint_bytes=size,
        peak_bytes=peak,
        model_bytes=model,
        largest_tensor_bytes=largest,
    )
    assert peak < model + largest
