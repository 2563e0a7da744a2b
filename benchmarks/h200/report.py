"""The recorded lines as tables for docs/performance.md, and as a picture."""

import json
from pathlib import Path
from typing import Any

from benchmarks.h200.harness import declared, modules
from benchmarks.record import REPOSITORY, RESULTS

Line = dict[str, Any]
Table = list[tuple[str, ...]]
PICTURE = REPOSITORY / "docs" / "pictures" / "h200_kernels.png"
HEAD = ("row", "ours, us", "floor", "reference", "peers", "goal", "met", "tried")
BOUNDS = {
    "over_floor": "at most {bound:g} x floor",
    "net_over_floor": "at most {bound:g} x floor, less an empty graph",
    "over_empty_us": "at most {bound:g} us over an empty graph",
    "us": "at most {bound:g} us",
    "reference_ratio": "at least {bound:g} x as fast as the reference",
    "peer_ratio": "at least {bound:g} x as fast as {peer}",
}


def lines_of(name: str) -> list[Line]:
    """Recorded lines of a module; none where it was never measured."""
    path = RESULTS / f"h200_{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(name: str) -> Table:
    """A row for each shape; the floors are those of the copy and matrix rates of the same run."""
    tried = declared(name).TRIED
    rows = [line for line in lines_of(name) if line["op"] != "ceilings"]
    return [HEAD, *(_row(line, tried) for line in rows)]


def as_markdown(rows: Table) -> str:
    """A table whose first row is its head."""
    head, *rest = rows
    lines = [head, ("---",) * len(head), *rest]
    return "".join(f"| {' | '.join(row)} |\n" for row in lines)


def sections() -> str:
    """A heading, the module's own words and its table, for each module."""
    text = ""
    for name in modules():
        about = (declared(name).__doc__ or "").strip().split("\n\n")[0]
        rows = table(name)
        shown = as_markdown(rows) if len(rows) > 1 else "Not measured yet.\n"
        text += f"\n### {name}\n\n{about}\n\n{shown}"
    return text + "\n"


def ceilings() -> Table:
    """What the card reached in the run of each module."""
    rows: Table = [
        ("run", "copy, TB/s", "bf16, TFLOP/s", "fp8, TFLOP/s", "empty graph, us", "card")
    ]
    for name in modules():
        for line in lines_of(name)[:1]:
            rates = [line[f"{kind}_per_s"] for kind in ("copy_bytes", "bf16_flops", "fp8_flops")]
            shown = [
                f"{rate / 1e12:,.{digits}f}" for rate, digits in zip(rates, (2, 0, 0), strict=True)
            ]
            card = f"{line['device']}, torch {line['torch']}, Triton {line['triton']}"
            rows.append((name, *shown, f"{line['empty_us']:.1f}", card))
    return rows


def _row(line: Line, tried: dict[str, str]) -> tuple[str, ...]:
    found = line["candidates"]
    peers = [
        f"{name.removeprefix('peer ')} {_us(entry.get('us'))}"
        for name, entry in found.items()
        if name.startswith("peer ")
    ]
    goals = [_bound(goal) for goal in line["goals"]]
    met = [_met(goal) for goal in line["goals"]]
    unmet = any(goal["met"] is False for goal in line["goals"])
    ours = _us(line["ours_us"]) if line["ours_us"] else f"not run: {_short(line['status'])}"
    return (
        line["row"],
        ours,
        f"{line['floor_us']:,.1f}",
        _us(line["reference_us"]) if "reference" in found else "",
        "<br>".join(peers),
        "<br>".join(goals),
        "<br>".join(met),
        tried.get(line["row"], tried.get(line["op"], "")) if unmet else "",
    )


def _us(value: float | None) -> str:
    return "not run" if value is None else f"{value:,.1f}"


def _short(reason: str) -> str:
    return reason.splitlines()[0].replace("|", "/")[:80] if reason else "no reason"


def _bound(goal: Line) -> str:
    peer = goal["peer"] or "the fastest peer"
    return BOUNDS[goal["measure"]].format(bound=goal["bound"], peer=peer)


def _met(goal: Line) -> str:
    if goal["met"] is None:
        return "not run"
    return f"{'met' if goal['met'] else 'not met'}, {goal['value']:,.2f}"


def draw(path: Path = PICTURE) -> bool:
    """Draw the times of ours, the reference and peers; False where nothing was measured."""
    rows = [line for name in modules() for line in lines_of(name) if line.get("ours_us")]
    if not rows:
        return False
    import matplotlib as mpl  # noqa: PLC0415 -- slow, and not needed for the tables

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, axes = plt.subplots(figsize=(9, 0.24 * len(rows) + 1.2), layout="constrained")
    for kind, mark, colour in (
        ("peer ", "s", "tab:orange"),
        ("reference", "|", "tab:gray"),
        ("ours", "o", "tab:blue"),
    ):
        points = [
            (entry["us"], number)
            for number, line in enumerate(rows)
            for name, entry in line["candidates"].items()
            if name.startswith(kind) and "us" in entry
        ]
        if points:
            axes.scatter(*zip(*points, strict=True), marker=mark, color=colour, label=kind.strip())
    floors = [max(line["floor_us"] + line["empty_us"], line["empty_us"]) for line in rows]
    axes.scatter(floors, range(len(rows)), marker="<", color="black", label="floor + empty graph")
    axes.set(xscale="log", xlabel="us", yticks=range(len(rows)))
    axes.set_yticklabels([line["row"] for line in rows], fontsize=7)
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize=8, loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=70)
    plt.close(figure)
    return True
