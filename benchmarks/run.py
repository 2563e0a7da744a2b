"""Measurements on a GPU: `python -m benchmarks.run h200 --op NAME` (or ``all``)."""

import argparse
import sys

from benchmarks.h200 import harness


def main() -> int:
    """Measure; 1 where a kernel did not run or was wrong. Goals that are missed are no failure."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run")
    parser.add_argument("card", choices=["h200"])
    chosen, words = parser.parse_known_args()
    options = harness.parse(words, prog=f"python -m benchmarks.run {chosen.card}")
    names = harness.modules() if options.op == "all" else [options.op]
    return int(not harness.run(names, options))


if __name__ == "__main__":
    sys.exit(main())
