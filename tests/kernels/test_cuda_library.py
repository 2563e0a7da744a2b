"""Sources in CUDA C++ are compiled once, and one that does not compile says why."""

import ctypes
import subprocess
import sys

import pytest
import torch

from openv41.ops import cuda_library


def compiler(folder, script):
    path = folder / "nvcc"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(cuda_library, "CACHE", tmp_path / "cache")
    return tmp_path / "cache"


def test_a_failure_says_why_and_leaves_nothing(cache, tmp_path, monkeypatch, caplog):
    nvcc = compiler(tmp_path, "echo 'expected a semicolon' >&2; exit 2")
    monkeypatch.setattr(cuda_library, "nvcc", lambda: nvcc)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: cuda_library.HOPPER)
    assert cuda_library.load.__wrapped__("top_k.cu") is None
    assert "top_k.cu does not compile here, Triton runs instead: expected a semi" in caplog.text
    assert not list(cache.iterdir())


def test_the_same_text_is_compiled_once(cache, tmp_path):
    source = tmp_path / "a.cu"
    source.write_text("one")
    nvcc = compiler(tmp_path, f'echo run >> {tmp_path}/runs; while [ "$1" != -o ]; do shift; done; '
                    'echo made > "$2"')  # fmt: skip
    first = cuda_library.build(nvcc, source)
    assert cuda_library.build(nvcc, source) == first
    assert (tmp_path / "runs").read_text() == "run\n"
    source.write_text("two")
    assert cuda_library.build(nvcc, source) != first
    assert len(list(cache.iterdir())) == 2
    tmp_path.joinpath("of_it.cuh").write_text("a header")
    third = cuda_library.build(nvcc, source)
    assert third != first
    assert cuda_library.build(nvcc, source, source) != third
    assert len(list(cache.iterdir())) == 4


def test_build_raises_what_the_compiler_does(cache, tmp_path):
    with pytest.raises(subprocess.CalledProcessError):
        cuda_library.build(compiler(tmp_path, "exit 1"), tmp_path.joinpath("nvcc"))


def test_a_library_that_is_wrong_is_not_used_and_the_log_says_so(monkeypatch, caplog):
    library = ctypes.CDLL(None)
    monkeypatch.setattr(cuda_library, "load", lambda source: library)
    assert cuda_library.trusted("top_k.cu", lambda found: found is library) is library
    assert not caplog.records
    assert cuda_library.trusted("top_k.cu", lambda _: False) is None
    assert "top_k.cu is wrong on this GPU, Triton runs instead" in caplog.text
    monkeypatch.setattr(cuda_library, "load", lambda source: None)
    assert cuda_library.trusted("top_k.cu", lambda _: True) is None


WHERE_THERE_IS_A_GPU = """
import torch
torch.cuda.is_available = lambda: True
from openv41 import ops
print(sum(getattr(op, "kernel", None) is not None for op in vars(ops).values()))
"""


def test_kernels_are_found_where_there_is_a_gpu():
    """Their files are imported while the ops are made: none may ask for an op that is not yet."""
    pytest.importorskip("triton")
    command = [sys.executable, "-c", WHERE_THERE_IS_A_GPU]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert int(found.stdout) > 20
