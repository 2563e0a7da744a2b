"""The tables in docs/engine.md, made from the recorded lines: `python -m benchmarks.tables`."""

import json
import re

from benchmarks.record import REPOSITORY, RESULTS
from openv41.io.atomic import write_atomic

PAGE = REPOSITORY / "docs" / "engine.md"
MARKED = r"(<!-- table {name} -->\n).*?(<!-- end -->)"
CASES = {
    "prefill": "prefill of {tokens} tokens, engine",
    "decode": "decode step, model alone",
    "decode_batch": "decode step, engine, requests: {batch}",
}


def read(name: str) -> list[dict[str, object]]:
    """Lines of a benchmark."""
    return [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text().splitlines()]


def peers() -> list[tuple[str, ...]]:
    """Own and mlx-vlm's medians, and what they make."""
    rows = [("case", "openv41, ms", "mlx-vlm, ms", "ratio")]
    lines = read("peers_speed")
    for goal in lines:
        if goal.get("peer") != "mlx-vlm" or goal["case"] not in CASES:
            continue
        same = [
            line
            for line in lines
            if all(line.get(key) == goal.get(key) for key in ("case", "tokens", "batch"))
        ]
        times = {
            line["implementation"]: line.get("median_ms") for line in same if "version" in line
        }
        name = CASES[str(goal["case"])].format(**goal)
        ratio = f"{goal['ratio']:.2f}"
        rows.append((name, f"{times['openv41']:,.1f}", f"{times['mlx-vlm']:,.1f}", ratio))
    return rows


def ced_prefill() -> list[tuple[str, ...]]:
    """Seconds of each mode, and how much faster than full they are and should be."""
    return [
        ("mode", "seconds", "faster than full", "theory"),
        *(
            (
                str(line["mode"]),
                f"{line['median_seconds']:.1f}",
                f"{line['ratio_to_full']:.2f}",
                f"{line['theory']:.2f}",
            )
            for line in read("ced_prefill")
        ),
    ]


TABLES = {"peers_speed": peers, "ced_prefill": ced_prefill}


def filled(text: str) -> str:
    """The page with every table as the lines have it."""
    for name, make in TABLES.items():
        head, *rows = make()
        lines = [head, ("---",) * len(head), *rows]
        table = "".join(f"| {' | '.join(row)} |\n" for row in lines)
        text, found = re.subn(
            MARKED.format(name=name), rf"\g<1>{table}\g<2>", text, flags=re.DOTALL
        )
        assert found == 1, f"{PAGE.name}: {found} places for table {name}"
    return text


def main() -> None:
    """Write the page."""
    write_atomic(PAGE, filled(PAGE.read_text(encoding="utf-8")).encode())


if __name__ == "__main__":
    main()
