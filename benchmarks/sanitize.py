"""Every kernel under compute-sanitizer: `python -m benchmarks.sanitize`, on a machine with a GPU.

Cases run first without a tool, so that all is compiled. Then each tool runs them in a few processes
side by side; what it reports between the beginning and the end of a case is that case's. Each
tensor is an allocation of its own, so that nothing past its end belongs to another.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch

from benchmarks.record import RESULTS, machine, record
from benchmarks.sanitize_cases import CASES
from openv41.ops import kernels

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
NAME = "sanitizer"
SHOWN = 300  # characters of a report that are recorded
FRAME = re.compile(r"=========\s?(\S.*)?$")  # a report's first line; those that follow are indented
SUMMARIES = ("COMPUTE-SANITIZER", "ERROR SUMMARY", "RACECHECK SUMMARY", "LEAK SUMMARY", "Target")
Line = dict[str, object]


def main(words: Sequence[str] | None = None) -> int:
    """Run all, print and record the lines; 1 where a case failed or something was reported."""
    options = _options(words)
    names = [name for name in CASES if options.only in name]
    if options.run is not None:
        return run([names[number] for number in options.run])
    if shutil.which("compute-sanitizer") is None or not torch.cuda.is_available():
        sys.stderr.write("compute-sanitizer or a CUDA device is not to be had\n")
        return 1
    lines = list(measured(names, options))
    about = machine() | {"device": torch.cuda.get_device_name()}
    if options.commit:
        about["commit"] = options.commit
    record(NAME, lines, about=about, folder=options.out)
    for line in lines:
        sys.stdout.write(f"{line['tool']}: {line['case']}: {line['status']} {line['first']}\n")
    return int(any(line["status"] != "clean" for line in lines))


def _options(words: Sequence[str] | None) -> argparse.Namespace:
    spec = argparse.ArgumentParser(prog="python -m benchmarks.sanitize")
    spec.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    spec.add_argument("--only", default="", help="cases whose name holds this text")
    spec.add_argument("--jobs", type=int, default=4, help="processes of each tool")
    spec.add_argument("--seconds", type=float, default=600, help="after which a process ends")
    spec.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON lines")
    spec.add_argument("--commit", default="", help="where the tree is no repository")
    spec.add_argument("--run", nargs="*", type=int, help=argparse.SUPPRESS)  # cases, in a process
    return spec.parse_args(words)


def run(names: Sequence[str], device: str = "cuda") -> int:
    """Run cases one after the other in this process, and say where each begins and ends."""
    for name in names:
        _say(f"begin {name}")
        with kernels("required" if device == "cuda" else "reference"):
            CASES[name](torch.Generator(device).manual_seed(7))
        if device == "cuda":
            torch.cuda.synchronize()
        _say(f"end {name}")
    return 0


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def measured(names: Sequence[str], options: argparse.Namespace) -> Iterator[Line]:
    """Yield a line for each case and tool; what fails without a tool runs under none."""
    most = options.jobs * len(options.tools)
    few, many = ([range(n, len(names), c) for n in range(c)] for c in (options.jobs, most))
    with ThreadPoolExecutor(most) as pool:

        def under(tool: str, numbers: Sequence[int]) -> list[Line]:
            return _process(tool, [names[n] for n in numbers], numbers, options)

        plain = [line for found in pool.map(lambda p: under("", p), many) for line in found]
        failed = {str(line["case"]) for line in plain if line["status"] != "clean"}
        yield from ({**line, "tool": "none"} for line in plain if line["case"] in failed)
        left = [[n for n in part if names[n] not in failed] for part in few]
        jobs = [pool.submit(under, tool, part) for tool in options.tools for part in left if part]
        for job in jobs:
            yield from job.result()


def _process(
    tool: str, names: Sequence[str], numbers: Sequence[int], options: argparse.Namespace
) -> list[Line]:
    """Cases in a process of their own, under a tool or none."""
    words = [sys.executable, "-m", "benchmarks.sanitize", "--only", options.only]
    words = [*_under(tool), *words, "--run", *map(str, numbers)]
    cached = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONUNBUFFERED": "1"}
    start = time.monotonic()
    process = subprocess.Popen(
        words,
        env={**os.environ, **cached},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # the tool and what it runs end together
    )
    try:
        said, _ = process.communicate(timeout=options.seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        said = process.communicate()[0] + b"\ntime limit\n"
    seconds = round(time.monotonic() - start, 1)
    text = said.decode(errors="replace")
    return [{"tool": tool, **line, "seconds": seconds} for line in parsed(names, text)]


@cache
def _help() -> str:
    asked = ["compute-sanitizer", "--help"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout


def _under(tool: str) -> list[str]:
    """The tool's command; but for initcheck, which sees all writes, torch's kernels are let be."""
    if not tool:
        return []
    words = ["compute-sanitizer", "--tool", tool, "--print-limit", "5"]
    if "--report-api-errors" in _help() and tool == "memcheck":
        words += ["--report-api-errors", "no"]
    if "--kernel-name-exclude" in _help() and tool != "initcheck":
        words += ["--kernel-name-exclude", "kns=_ZN2at"]
    return words


def parsed(names: Sequence[str], text: str) -> Iterator[Line]:
    """Yield what a process said of each of its cases."""
    for name in names:
        _, began, rest = text.partition(f"begin {name}\n")
        said, ended, _ = rest.partition(f"end {name}\n")
        found = [m[1] for m in map(FRAME.match, said.splitlines()) if m and m[1]]
        found = [line for line in found if not line.startswith(SUMMARIES)]
        if found:
            status, first = f"{len(found)} reports", found[0]
        elif ended:
            status, first = "clean", ""
        else:
            status = "failed" if began else "not run"
            first = (said if began else text).strip()
        yield {"case": name, "status": status, "first": first[-SHOWN:]}


def table() -> list[tuple[str, ...]]:
    """What each tool said of each case; one row where nothing was run."""
    path = RESULTS / f"{NAME}.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    tools = [tool for tool in ("none", *TOOLS) if any(line["tool"] == tool for line in lines)]
    rows = [("case", *tools)] if lines else [("",), ("not run yet",)]
    for case in dict.fromkeys(line["case"] for line in lines):
        said = {line["tool"]: line["status"] for line in lines if line["case"] == case}
        rows.append((case, *(said.get(tool, "") for tool in tools)))
    return rows


if __name__ == "__main__":
    sys.exit(main())
