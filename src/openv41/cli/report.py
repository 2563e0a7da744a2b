"""``openv41 report``: a training run as pictures and one page."""

import base64
import html
from pathlib import Path
from typing import Annotated, Any

import typer

from openv41.cli.run_plots import draw_run
from openv41.cli.ui import GIVEN, show_line
from openv41.errors import DataError
from openv41.io.atomic import write_atomic
from openv41.train.metrics import LOG_FILE, read_records

PAGE_FILE = "report.html"
STYLE = (
    "body { font: 16px/1.5 system-ui, sans-serif; color: #30363d; max-width: 60rem;"
    " margin: 2.5rem auto; padding: 0 1.25rem; } img { max-width: 100%; }"
    " td { padding: .3rem .8rem .3rem 0; border-bottom: 1px solid #eaeef2; }"
    " td + td { font-variant-numeric: tabular-nums; }"
)


def report(
    run: Annotated[Path, typer.Argument(help="Folder of a training run.", show_default=False)],
    *,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write, RUN/report unless given.")
    ] = None,
) -> None:
    """Draw loss, expert balance, update sizes, gradients and speed, and one HTML page of them."""
    records = read_records(run / LOG_FILE)
    if not records:
        raise DataError(f"{run / LOG_FILE} holds no step yet; wait for the first one")
    folder = run / "report" if out is None else out
    folder.mkdir(parents=True, exist_ok=True)
    pictures = draw_run(records, folder)
    page = folder / PAGE_FILE
    write_atomic(page, _page(run.name, summarise(records), pictures).encode())
    for path in (*pictures, page):
        show_line(str(path))


def summarise(records: list[dict[str, Any]]) -> dict[str, str]:
    """Figures of a run in words."""
    last = records[-1]
    scores = [r["heldout_bits_per_byte"] for r in records if "heldout_bits_per_byte" in r]
    speed = sum(r["tokens_per_second"] for r in records) / len(records)
    rows = {
        "steps": f"{last['step']:,}",
        "tokens": f"{last['tokens']:,}",
        "loss of the last step": f"{last['loss']:.4f} nats per token",
        "tokens per second": f"{speed:,.0f}",
    }
    flops = [r["model_flops_per_second"] for r in records if "model_flops_per_second" in r]
    if flops:
        rows["model FLOPs per second"] = f"{sum(flops) / len(flops) / 1e12:.3g} TFLOP/s"
    shares = [r["mfu"] for r in records if "mfu" in r]
    if shares:
        rows["model FLOPs utilisation"] = f"{sum(shares) / len(shares):.1%}"
    found = [r["retrieval"] for r in records if "retrieval" in r]
    if found:
        rows["images that find their text, at last"] = f"{found[-1]:.1%} in their batch"
    held = [r["heldout_draft"] for r in records if "heldout_draft" in r]
    if held:
        rows |= _draft_rows(held[-1])
    spikes = sum(r.get("spike", False) for r in records)
    if spikes:
        rows["loss spikes"] = f"{spikes:,}"
    for kind, value in last.get("losses", {}).items():
        rows[f"loss of the last step, {kind}"] = f"{value:.4f} nats per token"
    if scores:
        rows["held-out text"] = f"{scores[-1]:.4f} bits per byte (best {min(scores):.4f})"
    seen = [r["heldout_image_nats"] for r in records if "heldout_image_nats" in r]
    if seen:
        rows["held-out images"] = f"{seen[-1]:.4f} nats per target (best {min(seen):.4f})"
    if "distill_loss" in last:
        rows["reverse KL to the teachers"] = f"{last['distill_loss']:.4f} nats per token"
    for kind, balance in last["balance"].items():
        worst = max(balance["max_over_mean"])
        rows[f"largest expert load over the mean, {kind}"] = f"{worst:.2f} in the worst layer"
    return rows


def _draft_rows(held: dict[str, Any]) -> dict[str, str]:
    """What the drafter was worth on held-out text."""

    def shares(name: str) -> str:
        return ", ".join(f"{value:.1%}" for value in held[name])

    return {
        "held-out drafts, mean accepted length": f"{held['tau']:.2f} with the bonus token",
        f"held-out drafts, {GIVEN}": shares("acceptance"),
        "held-out drafts, calibration error": shares("calibration_error"),
        "held-out drafts, AUROC": ", ".join(f"{value:.2f}" for value in held["auroc"]),
    }


def _page(title: str, rows: dict[str, str], pictures: list[Path]) -> str:
    """One HTML file with everything inside."""
    cells = "\n".join(
        f"<tr><td>{html.escape(key)}</td><td>{html.escape(value)}</td></tr>"
        for key, value in rows.items()
    )
    images = "\n".join(
        f'<p><img alt="{path.stem}" src="data:image/png;base64,'
        f'{base64.b64encode(path.read_bytes()).decode()}"></p>'
        for path in pictures
    )
    name = html.escape(title)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}</title>'
        f"<style>{STYLE}</style></head>\n<body><h1>{name}</h1>\n<table>{cells}</table>\n{images}\n"
        "</body></html>\n"
    )
