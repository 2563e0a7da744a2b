"""Archives of the peers for a machine without network: ``python -m benchmarks.h200.peers.pack``.

Downloads wheels for Python 3.12 with pip and keeps what the adapters need, one archive for each of
``attention``, ``indexer`` and ``mhc`` (with the Engram gate), below 64 MB each.
"""

import argparse
import fnmatch
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 24, 17)] + ["manylinux2014_x86_64"]


@dataclass(frozen=True)
class Wheel:
    """A distribution, the folder it goes into, and which of its files."""

    folder: str
    name: str
    keep: tuple[str, ...] = ("*",)
    drop: tuple[str, ...] = ()
    python: str = "3.12"
    platforms: tuple[str, ...] = tuple(PLATFORMS)


DEEPGEMM = (
    Wheel("dg", "sgl-deep-gemm==0.1.4.post1"),
    Wheel("pure", "filelock==4.3.1"),
    Wheel("pure", "msgspec==0.23.0"),
)
SGLANG = Wheel(
    "sc",
    "sglang==0.5.23",
    keep=("sglang/kernels/*", "sglang/srt/environ.py"),
    python="3.11",
    platforms=("manylinux_2_34_x86_64",),
)
TILELANG_UNUSED = (
    "tilelang/3rdparty/tvm/src/*",
    "tilelang/3rdparty/cutlass/*",  # its headers come from DeepGEMM's copy
    *(f"tilelang/src/{part}/*" for part in ("transform", "ascend", "rocm", "metal", "webgpu")),
    "tilelang/lib/tilelang_ascend_npu_exchange*",
)
SETS: dict[str, tuple[Wheel, ...]] = {
    "attention": (Wheel("", "sglang-kernel==0.4.5", keep=("sgl_kernel/flashmla_ops*.so",)),),
    "indexer": (*DEEPGEMM, Wheel("ffi11", "apache-tvm-ffi==0.1.11"), SGLANG),
    "mhc": (
        *DEEPGEMM,
        SGLANG,
        Wheel("tl", "tilelang==0.1.15", drop=TILELANG_UNUSED),
        Wheel("tl", "tile-kernels==2.1.0"),
        Wheel("tl", "apache-tvm-ffi==0.1.12"),
        Wheel("tl", "torch-c-dlpack-ext==0.1.5"),
        Wheel("tl", "z3-solver==4.15.4.0", drop=("z3_solver*.data/*", "z3/lib/libz3.so")),
    ),
}


def download(wheel: Wheel, folder: Path) -> Path:
    """Fetch one wheel; it is not fetched twice."""
    stem = wheel.name.split("==")[0].replace("-", "_") + "-" + wheel.name.split("==")[1]
    if not (found := sorted(folder.glob(f"{stem}-*.whl"))):
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
        command += ["--only-binary=:all:", "--python-version", wheel.python]
        for platform in wheel.platforms:
            command += ["--platform", platform]
        subprocess.run([*command, wheel.name], check=True)
        found = sorted(folder.glob(f"{stem}-*.whl"))
    return found[0]


def unpack(wheel: Wheel, source: Path, target: Path) -> None:
    """Put the files that are kept where the adapters look."""
    with zipfile.ZipFile(source) as archive:
        for name in archive.namelist():
            kept = any(fnmatch.fnmatch(name, pattern) for pattern in wheel.keep)
            if kept and not any(fnmatch.fnmatch(name, pattern) for pattern in wheel.drop):
                archive.extract(name, target / wheel.folder)


def pack(name: str, wheels: Path, out: Path) -> Path:
    """Write one archive."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for wheel in SETS[name]:
            unpack(wheel, download(wheel, wheels), Path(folder))
        solver = Path(folder) / "tl" / "z3" / "lib"
        if solver.is_dir():
            (solver / "libz3.so").symlink_to(next(solver.glob("libz3.so.*")).name)
        with tarfile.open(out / f"{name}.tar.xz", "w:xz", preset=6) as archive:
            archive.add(folder, arcname=".")
    return out / f"{name}.tar.xz"


def unpacked(folder: Path) -> Path:
    """The folder itself, or where its archives are unpacked."""
    archives = sorted(folder.glob("*.tar.xz"))
    if not archives:
        return folder
    target = Path(tempfile.gettempdir()) / "h200_peers"
    for archive in archives:
        done = target / f"{archive.name}.done"
        if not done.exists():
            with tarfile.open(archive) as packed:
                packed.extractall(target, filter="tar")
            done.touch()
    return target


def main() -> None:
    """Make the archives that are named, or all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.h200.peers.pack")
    parser.add_argument("names", nargs="*", default=sorted(SETS), help=", ".join(SETS))
    parser.add_argument("--wheels", type=Path, default=Path("data/h200_wheels"))
    parser.add_argument("--out", type=Path, default=Path(".h200_peers"))
    options = parser.parse_args()
    options.wheels.mkdir(parents=True, exist_ok=True)
    for name in options.names:
        made = pack(name, options.wheels, options.out)
        sys.stderr.write(f"{made}: {made.stat().st_size / 1e6:.1f} MB\n")


if __name__ == "__main__":
    main()
