"""The tables in the docs, made from the recorded lines: `python -m benchmarks.tables`."""

import json
import re
import statistics
from functools import partial

from benchmarks import decode_tables, sanitize, sanitize_cpu
from benchmarks.h200 import report
from benchmarks.record import REPOSITORY, RESULTS
from openv41.io.atomic import write_atomic

DOCS = REPOSITORY / "docs"
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
    """Tokens per second and peak memory of each, and the ratios of their times to ours."""
    rows = [("case", "implementation", "ms", "tokens/s", "peak MB", "time to ours")]
    lines = read("peers_speed")
    for line in lines:
        if line.get("status") != "run" or line["case"] not in CASES:
            continue
        keys = ("case", "tokens", "batch")
        same = [goal for goal in lines if all(goal.get(key) == line.get(key) for key in keys)]
        ratios = {goal["peer"]: f"{goal['ratio']:.2f}" for goal in same if "ratio" in goal}
        name, ms = str(line["implementation"]), float(str(line["median_ms"]))
        tokens = int(str(line.get("tokens") or line.get("batch") or 1))
        case = CASES[str(line["case"])].format(**line)
        rate, memory = f"{tokens * 1e3 / ms:,.1f}", f"{line['peak_mb']:,.0f}"
        rows.append((case, name, f"{ms:,.1f}", rate, memory, ratios.get(name, "")))
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


def modality_balance() -> list[tuple[str, ...]]:
    """Each kind of bias: means over the seeds, and from where to where they go."""
    rows = [("routing bias", "tokens", "max / mean load", "worst layer", "entropy", "loss")]
    lines = read("modality_balance")
    for bias in ("one per modality", "one for all"):
        runs = [line for line in lines if line["bias"] == bias]
        for kind in ("text", "image"):
            names = ("max_over_mean", "max_over_mean_worst_layer", "entropy")
            found = [_spread(runs, f"{kind}_{name}") for name in names]
            rows.append((bias, kind, *found, _spread(runs, "loss")))
    return rows


def update_rules() -> list[tuple[str, ...]]:
    """Each pair of rules: means and standard deviations over the seeds."""
    rows = [
        ("matrices", "embedding, head, n-gram tables", "held-out bits/byte", "training loss",
         "farthest / nearest head", "tokens/s"),
    ]  # fmt: skip
    lines = read("update_rules")
    for pair in dict.fromkeys((str(line["matrices"]), str(line["token rows"])) for line in lines):
        runs = [line for line in lines if (line["matrices"], line["token rows"]) == pair]
        names = "heldout_bits_per_byte", "loss", "head_spread", "tokens_per_second"
        found = (_deviation(runs, name, digits=0 if "tokens" in name else 3) for name in names)
        rows.append((*pair, *found))
    return rows


def gpu_training() -> list[tuple[str, ...]]:
    """A training step of each implementation on one GPU."""
    rows = [("step", "tokens", "seconds", "tokens/s", "to NeMo's", "MFU", "peak GB")]
    lines = [found for found in read("gpu_training") if "seconds_per_step" in found]
    (nemo,) = (float(str(f["tokens_per_second"])) for f in lines if f["part"] == "nemo-automodel")
    for line in lines:
        tokens, speed = line["tokens_per_gpu_and_step"], float(str(line["tokens_per_second"]))
        share = f"{float(str(line['mfu'])):.1%}" if "mfu" in line else ""
        figures = f"{line['seconds_per_step']:.2f}", f"{speed:,.0f}", f"{speed / nemo:.2f}", share
        rows.append((str(line["part"]), f"{tokens:,}", *figures, f"{line['peak_gb']:.1f}"))
    return rows


def cpu_training() -> list[tuple[str, ...]]:
    """A training step on a CPU, and by how much ours is shorter."""
    rows = [("step", "tokens", "CPU seconds, median", "fastest", "peer / ours")]
    for line in read("cpu_training"):
        figures = (f"{line[name]:.2f}" for name in ("median", "fastest"))
        ratio = f"{line['ratio']:.2f} ({line['ratio_of_fastest']:.2f})" if "ratio" in line else ""
        rows.append((str(line["part"]), f"{line['tokens']:,}", *figures, ratio))
    return rows


def dspark_speed(label: str) -> list[tuple[str, ...]]:
    """Speed of each engine by load, and what the scheduler made of its drafts."""
    rows = [
        ("requests", "none, tokens/s", "scheduled", "ratio", "all verified", "none again",
         "ratio with prompts", "none again with prompts", "drafts per round",
         "accepted length", "drafting steps", "repeated 4-grams")
    ]  # fmt: skip
    lines = read(f"dspark_speed_{label}")
    for load in sorted({int(str(line["load"])) for line in lines}):
        by = {str(line["engine"]): line for line in lines if line["load"] == load}
        ours = by["scheduled"]
        rows.append(
            (
                str(load),
                f"{by['none']['tokens_per_second']:,.0f}",
                f"{ours['tokens_per_second']:,.0f}",
                _range(ours, "ratio"),
                _range(by["verify all"], "ratio"),
                _range(by["again"], "ratio"),
                f"{ours['with_prompts_ratio']:.2f}",
                f"{by['again']['with_prompts_ratio']:.2f}",
                f"{ours['drafts_per_round']:.1f}",
                f"{ours['mean_accepted_length']:.2f}",
                f"{ours['drafting_steps']:,}",
                f"{ours['repeated_4_grams']:.1%}",
            )
        )
    return rows


def dspark_profile(label: str) -> list[tuple[str, ...]]:
    """Milliseconds of a step by requests and by drafts verified of each."""
    lines = read(f"dspark_profile_{label}")
    most = range(len(lines[0]["verify_ms"]))
    rows = [("requests", "plain", *(f"{count} drafts" for count in most))]
    for line in lines:
        times = line["plain_ms"], *line["verify_ms"]
        rows.append((str(line["load"]), *(f"{time:.1f}" for time in times)))
    return rows


def dspark_replay(label: str) -> list[tuple[str, ...]]:
    """The replayed trace under each policy."""
    lines = read(f"dspark_replay_{label}")
    known = [line for line in lines if str(line["policy"]).startswith(("none", "fixed"))]
    fixed = [line["tokens_per_second"] for line in known]
    rows = [("policy", "tokens/s", "to the best fixed one", "drafts per step", "of them accepted")]
    for line in lines:
        speed = line["tokens_per_second"]
        rows.append(
            (
                str(line["policy"]),
                f"{speed:,.1f}",
                f"{speed / max(fixed):.3f}",
                f"{line['verified_per_step']:.1f}",
                f"{line['accepted_share']:.1%}",
            )
        )
    return rows


def scheduling() -> list[tuple[str, ...]]:
    """Time to make a schedule."""
    lines = read("scheduling")
    return [("requests", "us"), *((f"{x['requests']:,}", f"{x['us']:,.0f}") for x in lines)]


def _range(line: dict[str, object], name: str) -> str:
    return f"{line[name]:.2f} ({line[f'{name}_least']:.2f} to {line[f'{name}_most']:.2f})"


def _deviation(runs: list[dict[str, object]], name: str, digits: int) -> str:
    values = [float(str(run[name])) for run in runs]
    mean, deviation = statistics.fmean(values), statistics.stdev(values)
    return f"{mean:,.{digits}f} \N{PLUS-MINUS SIGN} {deviation:,.{digits}f}"


def _spread(runs: list[dict[str, object]], name: str) -> str:
    values = [float(str(run[name])) for run in runs]
    return f"{sum(values) / len(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def speculation(label: str) -> list[tuple[str, ...]]:
    """Tokens per second by load and tokens per round, and how often those without speculation."""
    lines = read(f"speculation_{label}")
    lengths = sorted({int(str(line["forced_length"])) for line in lines})
    names = ["none", *(f"{length} a round" for length in lengths if length)]
    rows = [("requests", *names, "none again")]
    for load in sorted({int(str(line["load"])) for line in lines}):
        found = {line["forced_length"]: line for line in lines if line["load"] == load}
        cells = [
            f"{found[n]['tokens_per_second']:,.0f}" + (f" ({found[n]['ratio']:.2f})" if n else "")
            for n in lengths
        ]
        least, most = (float(str(one)) for one in found[0]["same_again"])
        rows.append((str(load), *cells, f"{least:.2f} to {most:.2f}"))
    return rows


PAGES = {
    "engine.md": {
        "peers_speed": peers,
        "ced_prefill": ced_prefill,
        "speculation_cpu": partial(speculation, "cpu"),
    },
    "dspark.md": {
        "dspark_profile_demo_cpu": partial(dspark_profile, "demo_cpu"),
        "dspark_profile_small_h200": partial(dspark_profile, "small_h200"),
        "dspark_speed_demo_cpu": partial(dspark_speed, "demo_cpu"),
        "dspark_replay_demo_cpu": partial(dspark_replay, "demo_cpu"),
        "dspark_speed_small_h200": partial(dspark_speed, "small_h200"),
        "dspark_speed_greedy_small_h200": partial(dspark_speed, "greedy_small_h200"),
        "dspark_replay_small_h200": partial(dspark_replay, "small_h200"),
        "speculation_small_h200": partial(speculation, "small_h200"),
        "scheduling": scheduling,
    },
    "images.md": {"modality_balance": modality_balance},
    "results.md": {"update_rules": update_rules, "modality_balance": modality_balance},
    "training.md": {"gpu_training": gpu_training, "cpu_training": cpu_training},
    "performance.md": {
        "h200": report.ceilings,
        "h200_modules": report.sections,
        "sanitizer": sanitize.table,
        "sanitizer_cpu": sanitize_cpu.table,
        **decode_tables.TABLES,
    },
}


def filled(page: str) -> str:
    """A page with every table as the lines have it."""
    text = (DOCS / page).read_text(encoding="utf-8")
    for name, make in PAGES[page].items():
        made = make()
        table = made if isinstance(made, str) else report.as_markdown(made)
        text, found = re.subn(
            MARKED.format(name=name), rf"\g<1>{table}\g<2>", text, flags=re.DOTALL
        )
        assert found == 1, f"{page}: {found} places for table {name}"
    return text


def main() -> None:
    """Write the pages."""
    for page in PAGES:
        write_atomic(DOCS / page, filled(page).encode())
    report.draw()


if __name__ == "__main__":
    main()
