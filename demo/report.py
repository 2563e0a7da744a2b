"""What the demo leaves behind: a table, summary.json, the loss curve and an HTML page."""

import base64
import html
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from string import Template
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from openv41.errors import DataError
from openv41.io.atomic import atomic_path, write_atomic
from openv41.train.stages import DRAFT_STAGE

TEMPLATE = Path(__file__).with_name("report_template.html")
SMOOTHING_STEPS = 40  # of the training loss in the picture
BLUE, ORANGE, GREY, INK = "#1f5fbf", "#e07b00", "#9aa3ad", "#30363d"


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Every figure of the demo; the field names are the keys of summary.json."""

    heldout_bits_per_byte: float
    xz_bits_per_byte: float
    trigram_bits_per_byte: float
    beats_trigram: bool
    heldout_bits_per_byte_by_document: dict[str, float]
    trigram_bits_per_byte_by_vocabulary: dict[int, float]
    heldout_documents: list[str]
    heldout_bytes: int
    heldout_tokens: int
    heldout_shingles_in_training: dict[str, float]
    training_documents: int
    training_bytes: int
    training_tokens: int
    tokens_seen: int
    text_tokens_seen: int
    epochs_seen: float
    vocabulary: int
    parameters: int
    cache_bytes_per_token: float
    prefill_rows_skipped: float
    prefix_cold_seconds: float
    prefix_hit_seconds: float
    prefix_hit_tokens: int
    bounded_prefill_agreement: float
    pictures_trained: int
    pictures_heldout: int
    digits_right: float
    digits_chance: float
    words_right: float
    words_chance: float
    mean_accepted_length: float  # these at temperature 1, and greedy ones at 0
    mean_accepted_length_greedy: float
    draft_acceptance: list[float]
    draft_acceptance_greedy: list[float]
    mean_accepted_length_before_loops: float  # greedy
    repeated_4_grams: float
    repeated_4_grams_greedy: float
    draft_speed_up: float
    first_pictures: list[dict[str, str]]
    export_bytes: int
    seed: int
    train_seconds: float
    train_tokens_per_second: float
    steps_seconds: dict[str, float]  # of all steps of each training stage
    total_seconds: float
    seconds_by_stage: dict[str, float]
    prompt: str
    sample: str

    @property
    def best_vocabulary(self) -> int:
        """Vocabulary of the best trigram."""
        table = self.trigram_bits_per_byte_by_vocabulary
        return min(table, key=table.__getitem__)


@dataclass(frozen=True, slots=True)
class Curve:
    """Points over training tokens, in bits per byte."""

    tokens: list[int]
    training: list[float]
    heldout_tokens: list[int]
    heldout: list[float]


def rows(summary: Summary) -> list[tuple[str, str, str]]:
    """Label, value and remark of each line of the table."""
    s = summary
    margin = s.trigram_bits_per_byte - s.heldout_bits_per_byte
    verdict = f"{abs(margin):.3f} {'below' if margin > 0 else 'above'} the trigram"
    plays = ", ".join(Path(name).stem for name in s.heldout_documents)
    stages, parts = (
        ", ".join(f"{name} {value:.0f}" for name, value in seconds.items())
        for seconds in (s.seconds_by_stage, s.steps_seconds)
    )
    return [
        ("this model, bits per held-out byte", f"{s.heldout_bits_per_byte:.3f}", verdict),
        (
            "Witten-Bell trigram",
            f"{s.trigram_bits_per_byte:.3f}",
            f"best of {len(s.trigram_bits_per_byte_by_vocabulary)} vocabularies "
            f"({s.best_vocabulary:,} tokens)",
        ),
        ("xz -9", f"{s.xz_bits_per_byte:.3f}", "the held-out text compressed alone"),
        ("held-out bytes", f"{s.heldout_bytes:,}", plays),
        (
            "training bytes",
            f"{s.training_bytes:,}",
            f"{s.training_documents} texts, no other edition of the above",
        ),
        ("parameters", f"{s.parameters:,}", f"exported in {s.export_bytes / 1e6:.1f} MB"),
        (
            "handwritten digits named",
            f"{s.digits_right:.1%}",
            f"of those held out; chance is {s.digits_chance:.0%}",
        ),
        (
            "rendered words read",
            f"{s.words_right:.1%}",
            f"of those held out; chance is {s.words_chance:.0%}",
        ),
        (
            "tokens per step with drafts",
            f"{s.mean_accepted_length:.2f}",
            f"at temperature 1 ({s.repeated_4_grams:.0%} of 4-grams repeat); "
            f"{s.mean_accepted_length_greedy:.2f} at 0 ({s.repeated_4_grams_greedy:.0%}), "
            f"{s.mean_accepted_length_before_loops:.2f} before a 4-gram repeats",
        ),
        (
            "drafts accepted",
            f"{s.draft_acceptance[0]:.0%}" if s.draft_acceptance else "none",
            "by position, with all before: "
            + ", ".join(f"{share:.0%}" for share in s.draft_acceptance),
        ),
        ("speed-up by drafts", f"{s.draft_speed_up:.2f}", "of one greedy request"),
        (
            "training tokens seen",
            f"{s.tokens_seen:,}",
            f"{s.text_tokens_seen:,} of text ({s.epochs_seen:.2f} passes), the rest with images",
        ),
        (
            "training seconds",
            f"{s.train_seconds:.0f}",
            f"{parts}; {s.train_tokens_per_second:,.0f} tokens/s",
        ),
        ("cache bytes per token", f"{s.cache_bytes_per_token:g}", "measured, global part"),
        ("prefill rows skipped", f"{s.prefill_rows_skipped:.0%}", "of a long prompt, exactly"),
        (
            "bounded replay agrees",
            f"{s.bounded_prefill_agreement:.0%}",
            "greedy tokens as after an exact prefill",
        ),
        (
            "seconds to first token",
            f"{s.prefix_hit_seconds:.2f}",
            f"{s.prefix_hit_tokens:,} tokens known; {s.prefix_cold_seconds:.2f} without",
        ),
        ("total seconds", f"{s.total_seconds:.0f}", stages),
    ]


def as_table(summary: Summary) -> Table:
    """Build the terminal table."""
    table = Table(
        title="Demo: the reloaded export on plays it never saw",
        title_justify="left",
        show_header=False,
    )
    table.add_column("")
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("", style="dim")
    for number, (label, value, remark) in enumerate(rows(summary)):
        table.add_row(label, value, remark, style="bold" if number == 0 else None)
    return table


def read_log(file: Path, bytes_per_token: float) -> Curve:
    """Read the training log: JSON lines with ``tokens`` and ``loss`` (nats per token).

    Lines that carry ``heldout_bits_per_byte`` give the held-out points.
    """
    curve = Curve([], [], [], [])
    try:
        records = [json.loads(line) for line in file.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: cannot read the training log: {error}") from None
    for record in records:
        if "loss" in record and record.get("stage") != DRAFT_STAGE:
            curve.tokens.append(record["tokens"])
            curve.training.append(record["loss"] / math.log(2) / bytes_per_token)
        if "heldout_bits_per_byte" in record:
            curve.heldout_tokens.append(record["tokens"])
            curve.heldout.append(record["heldout_bits_per_byte"])
    if not curve.tokens:
        raise DataError(f"{file} holds no line with a loss; the training wrote no step")
    return curve


def seconds_of_steps(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds that the steps of each training stage took together, by the records of a log."""
    seconds: dict[str, float] = {}
    before = 0
    for record in records:
        if "tokens_per_second" in record:
            spent = (record["tokens"] - before) / record["tokens_per_second"]
            seconds[record["stage"]] = seconds.get(record["stage"], 0.0) + spent
            before = record["tokens"]
    return seconds


def smooth(values: Sequence[float], steps: int) -> list[float]:
    """Average over ``steps`` values around each one, so that a falling loss is not lagged behind.

    At the steep start fewer count, as many on both sides; at the end the later ones are absent.
    """
    sums = [0.0, *itertools.accumulate(values)]
    out = []
    for i in range(len(values)):
        reach = min(steps // 2, i)
        stop = min(i + reach + 1, len(values))
        out.append((sums[stop] - sums[i - reach]) / (stop - i + reach))
    return out


def draw_curve(curve: Curve, summary: Summary, file: Path) -> None:
    """Draw the loss beside the baselines."""
    figure = Figure(figsize=(8, 4.5), dpi=160, layout="constrained")
    axes = figure.subplots()
    millions = [t / 1e6 for t in curve.tokens]
    axes.plot(millions, curve.training, color=BLUE, alpha=0.18, linewidth=0.8)
    label = f"training, answers about pictures included (mean over {SMOOTHING_STEPS} steps)"
    axes.plot(millions, smooth(curve.training, SMOOTHING_STEPS), color=BLUE, label=label)
    points = [t / 1e6 for t in curve.heldout_tokens] + [summary.tokens_seen / 1e6]
    scores = [*curve.heldout, summary.heldout_bits_per_byte]
    axes.plot(points, scores, color=ORANGE, marker="o", markersize=4, label="held-out plays")
    axes.annotate(
        f"{scores[-1]:.3f}", (points[-1], scores[-1]), xytext=(6, 0), textcoords="offset points",
        color=ORANGE, fontweight="bold", va="center",
    )  # fmt: skip
    _draw_baselines(axes, summary)
    low = min(*scores, *smooth(curve.training, SMOOTHING_STEPS))
    axes.set_xlim(0, max(points) * 1.08)
    axes.set_ylim(low - 0.15, summary.xz_bits_per_byte + 0.9)
    axes.set_xlabel("training tokens (millions)")
    axes.set_ylabel("bits per byte")
    axes.set_title("Learning Shakespeare, beside two baselines", loc="left", color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper right")
    with atomic_path(file) as temporary:
        figure.savefig(temporary, format="png")


def _draw_baselines(axes: Axes, summary: Summary) -> None:
    named = {"xz -9": summary.xz_bits_per_byte, "trigram": summary.trigram_bits_per_byte}
    for name, value in named.items():
        axes.axhline(value, color=GREY, linestyle=(0, (5, 3)), linewidth=1)
        axes.annotate(
            f"{name}  {value:.3f}", (0.99, value), xycoords=("axes fraction", "data"),
            xytext=(0, 3), textcoords="offset points", color=INK, fontsize=9, ha="right",
        )  # fmt: skip


def write_report(summary: Summary, picture: Path, file: Path) -> None:
    """Write one HTML file with everything inside."""
    lines = "\n".join(
        f"<tr><td>{html.escape(label)}</td><td>{html.escape(value)}</td>"
        f"<td>{html.escape(remark)}</td></tr>"
        for label, value, remark in rows(summary)
    )
    page = Template(TEMPLATE.read_text()).substitute(
        table=lines,
        picture=base64.b64encode(picture.read_bytes()).decode(),
        prompt=html.escape(summary.prompt),
        sample=html.escape(summary.sample),
        pictures=_pictures(summary, picture.parent),
        score=f"{summary.heldout_bits_per_byte:.3f}",
        trigram=f"{summary.trigram_bits_per_byte:.3f}",
        xz=f"{summary.xz_bits_per_byte:.3f}",
    )
    write_atomic(file, page.encode())


def _pictures(summary: Summary, folder: Path) -> str:
    """The first held-out pictures with what the model said."""
    cells = []
    for shown in summary.first_pictures:
        data = base64.b64encode((folder / shown["file"]).read_bytes()).decode()
        told = f"said <b>{html.escape(shown['model'])}</b>, is {html.escape(shown['answer'])}"
        cells.append(
            f'<figure><img class="pixels" alt="{html.escape(shown["answer"])}" '
            f'src="data:image/png;base64,{data}"><figcaption>{told}</figcaption></figure>'
        )
    return "\n".join(cells)


def write_summary(summary: Summary, file: Path) -> None:
    """Write summary.json."""
    write_atomic(file, json.dumps(asdict(summary), indent=2, ensure_ascii=False).encode() + b"\n")
