"""CUDA C++ sources of this package, compiled by nvcc on first use and kept in the user's cache."""

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch.utils.cpp_extension import CUDA_HOME

logger = logging.getLogger(__name__)

CACHE = Path.home() / ".cache" / "openv41" / "cuda"
FOLDER = Path(__file__).parent
FLAGS = ("-O3", "-std=c++17", "--expt-relaxed-constexpr", "-shared", "-Xcompiler", "-fPIC")
ARCHITECTURE = "-gencode=arch=compute_90a,code=sm_90a"
HOPPER = (9, 0)


@cache
def nvcc() -> str | None:
    """The compiler; None where there is none."""
    beside = Path(CUDA_HOME or "/usr/local/cuda") / "bin" / "nvcc"
    return str(beside) if beside.is_file() else shutil.which("nvcc")


@cache
def load(*sources: str) -> ctypes.CDLL | None:
    """One library made from files beside this or paths; None off Hopper, or if it fails."""
    compiler = nvcc()
    if compiler is None or not torch.cuda.is_available():
        return None
    if torch.cuda.get_device_capability() != HOPPER:
        return None
    try:
        return ctypes.CDLL(str(build(compiler, *(FOLDER / source for source in sources))))
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or b""
        about = said.decode(errors="replace")[-2000:] or error
        names = ", ".join(sources)
        logger.warning("%s does not compile here, Triton runs instead: %s", names, about)
        return None


def trusted(source: str, is_right: Callable[[ctypes.CDLL], bool]) -> ctypes.CDLL | None:
    """A source's library if it answers rightly here; None, and the log says so, if not."""
    found = load(source)
    if found is None or is_right(found):
        return found
    logger.warning("%s is wrong on this GPU, Triton runs instead", source)
    return None


def build(compiler: str, *sources: Path) -> Path:
    """Compile sources unless the same texts have been compiled; writers do not meet.

    What a source includes lies beside it or here: a header that changes makes a new library.
    """
    folders = {FOLDER, *(source.parent for source in sources)}
    headers = sorted({header for folder in folders for header in folder.glob("*.cuh")})
    text = b"".join(path.read_bytes() for path in (*sources, *headers))
    text += repr((compiler, FLAGS, ARCHITECTURE)).encode()
    target = CACHE / f"{sources[0].stem}-{hashlib.sha256(text).hexdigest()[:16]}.so"
    if not target.is_file():
        CACHE.mkdir(parents=True, exist_ok=True)
        handle, made = tempfile.mkstemp(suffix=".so", dir=CACHE)
        os.close(handle)
        command = [compiler, *FLAGS, ARCHITECTURE, f"-I{FOLDER}", "-o", made, *map(str, sources)]
        try:
            subprocess.run(command, check=True, capture_output=True)
            Path(made).replace(target)
        finally:
            Path(made).unlink(missing_ok=True)
    return target
