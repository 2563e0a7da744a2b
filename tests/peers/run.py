"""Agreement and speed beside other implementations: `make peers`.

Writes benchmarks/results/peers_agreement.jsonl and peers_speed.jsonl. Options: `--only agreement`
or `--only speed`, `--golden-dir`.
"""

import argparse
import sys
from pathlib import Path

from benchmarks.record import record
from tests.peers.agreement import agreement_lines
from tests.peers.load import PARTS, PEERS, implementation, part_lines
from tests.peers.speed import speed_lines

REPOSITORY = Path(__file__).resolve().parents[2]


def say(text):
    sys.stderr.write(text + "\n")


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.peers.run")
    parser.add_argument("--only", choices=("agreement", "speed"))
    parser.add_argument("--golden-dir", type=Path, default=REPOSITORY.parent / "shared" / "golden")
    options = parser.parse_args()
    failed = False
    if options.only != "speed":
        goldens = [p for p in map(options.golden_dir.joinpath, "AB") if p.is_dir()]
        failed |= write("peers_agreement", "agreement", agreement(goldens))
    if options.only != "agreement":
        failed |= write("peers_speed", "speed", speed_lines(say))
    return int(failed)


def agreement(goldens):
    """Yield "not run" for peers that do not load, then the comparisons."""
    peers = {}
    for name in PEERS:
        try:
            kind, version, _ = implementation(name)
            peers[name] = kind, version
        except Exception as error:  # whatever keeps a peer from loading is the result
            yield _not_run(name, error)
    yield from agreement_lines(implementation("openv41")[0], peers, goldens)
    for name in PARTS:
        try:
            lines = part_lines(name)
        except Exception as error:  # as above
            yield _not_run(name, error)
        else:
            yield from lines()


def _not_run(name, error):
    return {"peer": name, "status": "not run", "reason": f"{type(error).__name__}: {error}"}


def write(name, kind, lines):
    """Show and keep the lines; return whether one of them failed."""

    def shown():
        for line in lines:
            say(f"{kind}: " + ", ".join(f"{k} {_short(v)}" for k, v in line.items()))
            yield {"kind": kind} | line

    return any(line.get("agrees") is False for line in record(name, shown()))


def _short(value):
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{len(value)}" if isinstance(value, list) else str(value)


if __name__ == "__main__":
    sys.exit(main())
