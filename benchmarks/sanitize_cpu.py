"""CUDA sources under g++'s sanitizers, on a CPU: `python -m benchmarks.sanitize_cpu`.

The tests that run a source thread by thread compile it with AddressSanitizer, which finds accesses
beyond a tensor, and with ThreadSanitizer, which finds races. The emulation knows neither the copy
engine's nor the matrix units' own order of accesses; that is for compute-sanitizer on a GPU.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.record import REPOSITORY, RESULTS, record

NAME = "sanitizer_cpu"
TOOLS = {"address": "libasan.so", "thread": "libtsan.so"}
COMPILER = '#!/bin/sh\nexec {} -g -fsanitize={} "$@"\n'
PLUGIN = (
    'import os\nos.environ.pop("LD_PRELOAD", None)\n'  # is loaded; what tests start goes without
)
SETTINGS = {
    "ASAN_OPTIONS": "detect_leaks=0",
    "TSAN_OPTIONS": "report_signal_unsafe=0 exitcode=0",
    "OMP_NUM_THREADS": "1",  # torch's own threads are none of the sources'
}
Line = dict[str, object]


def main(words: Sequence[str] | None = None) -> int:
    """Run all, print and record the lines; 1 where something was reported or failed."""
    spec = argparse.ArgumentParser(prog="python -m benchmarks.sanitize_cpu")
    spec.add_argument("--only", default="", help="test files whose name holds this text")
    spec.add_argument("--compiler", default="/usr/bin/g++")
    spec.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON lines")
    options = spec.parse_args(words)
    lines = list(measured(options.only, options.compiler))
    record(NAME, lines, folder=options.out)
    return int(any(line["status"] != "clean" for line in lines))


def measured(only: str, compiler: str) -> Iterator[Line]:
    """Yield a line for each test file and sanitizer."""
    paths = sorted((REPOSITORY / "tests" / "kernels").glob("test_*_cuda.py"))
    for path in (path for path in paths if only in path.name):
        for tool, library in TOOLS.items():
            asked = [compiler, f"-print-file-name={library}"]
            preloaded = subprocess.run(asked, check=True, capture_output=True, text=True).stdout
            with tempfile.TemporaryDirectory() as folder:
                said = _tested(path, Path(folder), COMPILER.format(compiler, tool), preloaded)
            line = {"file": path.name, "tool": tool, **parsed(said)}
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()
            yield line


def _tested(path: Path, folder: Path, compiler: str, preloaded: str) -> str:
    """What pytest says of a file whose sources are compiled by another compiler."""
    (folder / "g++").write_text(compiler)
    (folder / "g++").chmod(0o755)
    (folder / "unloaded.py").write_text(PLUGIN)
    paths = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PYTHONPATH": ":".join([str(folder), str(REPOSITORY / "src"), str(REPOSITORY)]),
        "LD_PRELOAD": preloaded.strip(),
    }
    words = [sys.executable, "-m", "pytest", "-p", "unloaded", str(path), "-q", "-n0", "-s"]
    words += ["-m", "not gpu and not prove"]
    done = subprocess.run(
        words,
        cwd=REPOSITORY,
        env={**os.environ, **SETTINGS, **paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    return done.stdout.decode(errors="replace")


def parsed(said: str) -> Line:
    """Status and the first report; a sanitizer ends each with a summary."""
    found = [line for line in said.splitlines() if line.startswith("SUMMARY: ")]
    last = said.strip().splitlines()[-1:]
    passed = "passed" in "".join(last) and "failed" not in said and "error" not in "".join(last)
    if found:
        return {"status": f"{len(found)} reports", "first": found[0][:300]}
    return (
        {"status": "clean", "first": ""} if passed else {"status": "failed", "first": said[-300:]}
    )


def table() -> list[tuple[str, ...]]:
    """What each sanitizer said of each file."""
    path = RESULTS / f"{NAME}.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if not lines:
        return [("",), ("not run yet",)]
    rows: list[tuple[str, ...]] = [("tests", *TOOLS)]
    for file in dict.fromkeys(line["file"] for line in lines):
        said = {line["tool"]: line["status"] for line in lines if line["file"] == file}
        rows.append((file, *(said.get(tool, "") for tool in TOOLS)))
    return rows


if __name__ == "__main__":
    sys.exit(main())
