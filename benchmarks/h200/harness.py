"""Measures the rows of one module: correctness first, then ours, the reference and the peers.

Candidates take turns as ABC CBA CBA ABC, so that drift of the clock falls on all of them. A
candidate that fails or is wrong is a line of its row with the reason, and is not timed.
"""

import argparse
import gc
import importlib
import json
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch

from benchmarks.h200 import ceilings as card
from benchmarks.h200.candidates import INPUT_SETS, Candidate, NotRunError, prepare
from benchmarks.h200.ceilings import Ceilings
from benchmarks.h200.clock import Clock
from benchmarks.h200.peers.pack import unpacked
from benchmarks.h200.peers.process import PeerProcess, Peers
from benchmarks.h200.rows import AT_LEAST, Goal, Row
from benchmarks.record import RESULTS, machine, record

FOLDER = Path(__file__).parent
NOT_OPS = {"__init__", "rows", "clock", "ceilings", "candidates", "harness", "report"}
Found = dict[str, dict[str, Any]]  # what was found of each candidate


def modules() -> list[str]:
    """Names of the modules that declare rows."""
    return sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in NOT_OPS)


def declared(name: str) -> ModuleType:
    """The module of that name, with ``rows`` and ``TRIED``."""
    return importlib.import_module(f"benchmarks.h200.{name}")


def main(file: str) -> None:
    """The short form: measure the module in ``file``, without peers."""
    name = Path(file).stem
    options = parser(f"python -m benchmarks.h200.{name}").parse_args()
    options.op, options.peers = name, None
    sys.exit(int(not run([name], options)))


def parse(words: Sequence[str], prog: str) -> argparse.Namespace:
    """Options of a measurement of modules, with peers."""
    spec = parser(prog)
    spec.add_argument("--op", default="all", choices=["all", *modules()], help="one module")
    spec.add_argument("--peers", type=Path, help="folder of the peers or of their archives")
    spec.add_argument("--peer-limit", type=float, default=180, help="seconds until one is ready")
    return spec.parse_args(words)


def parser(prog: str) -> argparse.ArgumentParser:
    """Options of every measurement."""
    spec = argparse.ArgumentParser(prog=prog)
    spec.add_argument("--only", default="", help="rows whose name holds this text")
    spec.add_argument("--seconds", type=float, default=0.4, help="of samples, per candidate")
    spec.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON lines")
    spec.add_argument("--commit", default="", help="where the tree is no repository")
    spec.add_argument("--no-variants", action="store_true")
    spec.add_argument("--after", default="", help=argparse.SUPPRESS)  # module/number of rows
    return spec


def run(names: Sequence[str], options: argparse.Namespace) -> bool:
    """Measure modules, print and record the lines; whether all were right and every goal met."""
    if options.peers is not None:
        options.peers = unpacked(options.peers)
    clock = Clock()
    found = card.measure(clock)
    about = machine() | card.about()
    if options.commit:
        about["commit"] = options.commit
    fine = True
    for name in names:
        if options.after and name != options.after.split("/")[0]:
            continue  # recorded before the fault
        lines = recorded(name, options.out) if options.after else []
        for line in measure(clock, found, name, options):
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()
            lines.append(line)
            record(f"h200_{name}", lines, about=about, folder=options.out)  # so far
            fine = fine and line.get("status", "run") == "run"
            if not clock.is_alive():
                go_on_after(f"{name}/{len(lines) - 1}")  # without the ceilings
        options.after = ""
    return fine


def recorded(name: str, folder: Path) -> list[dict[str, object]]:
    """Lines of a module so far."""
    path = folder / f"h200_{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def go_on_after(place: str) -> NoReturn:
    """Begin anew behind a row whose kernel has faulted: nothing runs on the GPU after a fault."""
    words = [word for word in sys.argv[1:] if not word.startswith("--after=")]
    module = sys.modules["__main__"].__spec__
    assert module is not None, "run as a module"
    os.execv(sys.executable, [sys.executable, "-m", module.name, *words, f"--after={place}"])


def measure(
    clock: Clock, ceilings: Ceilings, name: str, options: argparse.Namespace
) -> Iterator[dict[str, object]]:
    """Yield the ceilings, then a line for each row."""
    rows = [row for row in declared(name).rows() if options.only in row.name]
    if options.after:
        rows = rows[int(options.after.partition("/")[2]) :]
    else:
        yield ceilings.line()
    peers = Peers(options.peers, options.peer_limit if options.peers else 0)
    try:
        for row in rows:
            yield measure_row(clock, ceilings, row, options, peers)
            gc.collect()
            torch.cuda.empty_cache()
    finally:
        peers.close()


def measure_row(
    clock: Clock, ceilings: Ceilings, row: Row, options: argparse.Namespace, peers: Peers
) -> dict[str, object]:
    """Check and time all candidates of a row."""
    found: Found = {}
    ready: list[PeerProcess] = []
    try:
        candidates = list(_prepared(clock, row, options, found))
        ready = list(_ready(row, peers, found))
        _time(clock, [*candidates, *ready], options.seconds, found)
    except NotRunError as error:
        sys.stderr.write(f"{row.name}: {error}\n")
    finally:
        for peer in ready:
            peer.rest()
    return line_of(row, ceilings, found)


def _prepared(
    clock: Clock, row: Row, options: argparse.Namespace, found: Found
) -> Iterator[Candidate]:
    generators = [torch.Generator(clock.device).manual_seed(seed) for seed in range(INPUT_SETS)]
    functions = {"ours": row.ours}
    if row.reference is not None:
        functions["reference"] = row.reference
    if not options.no_variants:
        functions |= {f"variant {name}": f for name, f in row.variants.items()}
    try:
        sets = [row.make(generator) for generator in generators]
    except Exception as error:
        found["ours"] = {"not_run": f"inputs: {error}"[-500:]}
        return
    for name, function in functions.items():
        if not clock.is_alive():
            found[name] = {"not_run": "the GPU had faulted before"}
            continue
        try:
            candidate = prepare(clock, row, name, function, sets)
        except NotRunError as error:
            found[name] = {"not_run": str(error)}
        else:
            found[name] = {"error": candidate.error, "mode": candidate.mode}
            yield candidate


def _ready(row: Row, peers: Peers, found: Found) -> Iterator[PeerProcess]:
    for name in row.peers:
        try:
            peer = peers.begin(name, row.shape)
        except NotRunError as error:
            found[f"peer {name}"] = {"not_run": str(error)}
        else:
            found[peer.name] = {"error": peer.error, "mode": peer.mode, "what": peer.what}
            yield peer


def _time(clock: Clock, candidates: list[Any], seconds: float, found: Found) -> None:
    counts = {c.name: c.count(clock, seconds) for c in candidates}
    halves: dict[str, tuple[list[float], list[float]]] = {c.name: ([], []) for c in candidates}
    for turn, order in enumerate((candidates, candidates[::-1], candidates[::-1], candidates)):
        for candidate in order:
            try:
                samples = candidate.sample(clock, counts[candidate.name])
            except RuntimeError as error:
                found[candidate.name] |= {"not_run": f"while timed: {error}"[-500:]}
                raise NotRunError(candidate.name) from error
            halves[candidate.name][turn // 2].extend(samples)
    for name, (first, second) in halves.items():
        found[name] |= summary(first, second)


def summary(first: list[float], second: list[float]) -> dict[str, float]:
    """Median, p10, p90, number of samples, and how far apart the medians of the halves are."""
    samples = sorted(first + second)
    median = statistics.median(samples)
    return {
        "us": round(median, 3),
        "p10": round(samples[len(samples) // 10], 3),
        "p90": round(samples[min(len(samples) - 1, len(samples) * 9 // 10)], 3),
        "samples": len(samples),
        "spread": round(abs(statistics.median(first) - statistics.median(second)) / median, 4),
    }


def line_of(row: Row, ceilings: Ceilings, found: Found) -> dict[str, object]:
    """One row as a JSON line."""
    floor = ceilings.floor_us(row.floor_bytes, row.floor_flops, row.flop_rate)
    ours = found.get("ours", {})
    us = ours.get("us")
    line: dict[str, object] = {
        "op": row.op,
        "shape": dict(row.shape),
        "row": row.name,
        "status": "run" if us is not None else ours.get("not_run", "not run"),
        "ours_us": us,
        "reference_us": found.get("reference", {}).get("us"),
        "floor_us": round(floor, 3),
        "empty_us": round(ceilings.empty_us, 3),
        "error": ours.get("error"),
        "floor_bytes": row.floor_bytes,
        "floor_flops": row.floor_flops,
        "candidates": found,
        "goals": [judged(goal, row, ceilings, found) for goal in row.goals],
    }
    if us:
        line |= {
            "gb_per_s": round(row.floor_bytes / us / 1e3, 1),
            "tflops": round(row.floor_flops / us / 1e6, 1),
            "share_of_floor": round(floor / us, 3),
        }
    return line


def judged(goal: Goal, row: Row, ceilings: Ceilings, found: Found) -> dict[str, object]:
    """A goal with what was found; ``met`` is None where something that it needs did not run.

    It is met where the figure beats the bound by more than the spread of the same code's medians.
    """
    value, spread = _figure(goal, row, ceilings, found), found.get("ours", {}).get("spread", 0.0)
    met = None
    if value is not None and goal.measure in AT_LEAST:
        met = value * (1 - spread) >= goal.bound
    elif value is not None:
        met = value * (1 + spread) <= goal.bound
    return {
        "measure": goal.measure,
        "bound": goal.bound,
        "peer": goal.peer,
        "value": None if value is None else round(value, 3),
        "met": met,
    }


def _figure(goal: Goal, row: Row, ceilings: Ceilings, found: Found) -> float | None:
    us = found.get("ours", {}).get("us")
    if us is None:
        return None
    floor = ceilings.floor_us(row.floor_bytes, row.floor_flops, row.flop_rate)
    net = us - ceilings.empty_us
    simple = {
        "us": us,
        "over_floor": us / floor,
        "net_over_floor": net / floor,
        "over_empty_us": net,
    }
    if goal.measure in simple:
        return float(simple[goal.measure])
    if goal.measure == "reference_ratio":
        other = found.get("reference", {}).get("us")
    else:
        wanted = [
            entry["us"]
            for name, entry in found.items()
            if name.startswith("peer ") and goal.peer in name and "us" in entry
        ]
        other = min(wanted, default=None)
    return None if other is None else float(other / us)
