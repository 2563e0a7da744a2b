"""CUDA sources compiled for the CPU, where a shim runs them thread by thread."""

import ctypes
import shutil
import subprocess

import pytest


def compiled(source, folder, optimised="-O2"):
    """The library of a source that no longer needs a GPU; skips where there is no compiler."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++")
    (folder / "source.cpp").write_text(source)
    words = [compiler, optimised, "-std=c++20", "-shared", "-fPIC", "-pthread", "-w"]
    subprocess.run([*words, "source.cpp", "-o", "library.so"], cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "library.so"))
