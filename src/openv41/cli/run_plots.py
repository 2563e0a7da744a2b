"""Pictures of a training run, from its log."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openv41.cli.ui import GIVEN
from openv41.errors import InputError
from openv41.io.atomic import atomic_path
from openv41.train.stages import DRAFT_STAGE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SMOOTHED_SHARE = 50  # a smoothed curve is the mean over this part of the run
COLOURS = {"all": "#1f5fbf", "text": "#30363d", "image": "#e07b00"}
Record = Mapping[str, Any]


def draw_run(records: Sequence[Record], folder: Path) -> list[Path]:
    """Write loss, balance, update size, gradients and speed as PNG files; returns those written.

    A picture whose figures the log does not hold is left out.
    """
    drawn = []
    for name, draw in PICTURES.items():
        figure = _figure()
        if draw(figure, records):
            path = folder / f"{name}.png"
            with atomic_path(path) as temporary:
                figure.savefig(temporary, format="png")
            drawn.append(path)
    return drawn


def _figure() -> "Figure":
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 -- an optional extra
    except ImportError:
        raise InputError("pictures need matplotlib; pip install 'openv41[plot]'") from None
    return Figure(figsize=(9, 4.5), dpi=140, layout="constrained")


def _draw_loss(figure: "Figure", records: Sequence[Record]) -> bool:
    """Loss of next tokens, by modality where there are both, and the held-out scores."""
    records = [r for r in records if "retrieval" not in r and r.get("stage") != DRAFT_STAGE]
    if not records:
        return False
    left, right = figure.subplots(1, 2)
    series = {"all": [(r["tokens"], r["loss"]) for r in records]}
    for kind in ("text", "image"):
        found = [(r["tokens"], r["losses"][kind]) for r in records if kind in r.get("losses", {})]
        if found:
            series[kind] = found
    if len(series) == 2:  # one modality is all there is
        del series["all"]
    for kind, points in series.items():
        _curve(left, points, COLOURS[kind], kind)
    images = [(r["tokens"], r["heldout_image_nats"]) for r in records if "heldout_image_nats" in r]
    if images:
        _line(left, images, COLOURS["image"], "held-out images", marker="o")
    _finish(left, "Loss", "nats per token")
    scores = [(r["tokens"], r["heldout_bits_per_byte"]) for r in records
              if "heldout_bits_per_byte" in r]  # fmt: skip
    if scores:
        _line(right, scores, COLOURS["image"], "held-out text", marker="o")
        _finish(right, "Held-out text", "bits per byte")
    else:
        right.set_axis_off()
    return True


def _draw_contrast(figure: "Figure", records: Sequence[Record]) -> bool:
    """Contrastive loss of stage "vision", and how many images find their text."""
    found = [r for r in records if "retrieval" in r]
    if not found:
        return False
    left, right = figure.subplots(1, 2)
    _curve(left, [(r["tokens"], r["loss"]) for r in found], COLOURS["image"], "contrastive loss")
    _finish(left, "Images against texts", "nats per image", legend=False)
    _curve(right, [(r["tokens"], r["retrieval"]) for r in found], COLOURS["image"], "retrieval")
    _finish(right, "Images that find their text", "share of the batch", legend=False)
    return True


def _draw_drafts(figure: "Figure", records: Sequence[Record]) -> bool:
    """Acceptance by position over the run and at its end; confidences against acceptance."""
    found = [r for r in records if "draft" in r]
    if not found:
        return False
    left, middle, right = figure.subplots(1, 3)
    for place in range(len(found[0]["draft"]["acceptance"])):
        points = [(r["tokens"], r["draft"]["acceptance"][place]) for r in found]
        _line(left, points, None, f"draft {place + 1}")
    left.set_ylim(0, 1)
    _finish(left, "Acceptance in training", GIVEN)
    held = [r["heldout_draft"] for r in found if "heldout_draft" in r]
    if not held:
        middle.set_axis_off()
        right.set_axis_off()
        return True
    shares = held[-1]["acceptance"]
    middle.bar(range(1, len(shares) + 1), shares, color=COLOURS["all"])
    middle.set_ylim(0, 1)
    _finish(middle, f"Held-out text: {held[-1]['tau']:.2f} per step", GIVEN, legend=False)
    middle.set_xlabel("draft")
    confidence, accepted, shares = zip(*held[-1]["reliability"], strict=True)
    right.plot((0, 1), (0, 1), color=COLOURS["text"], linewidth=0.8)
    right.scatter(confidence, accepted, s=[4 + 300 * s for s in shares], color=COLOURS["image"])
    _finish(right, "Reliability", GIVEN, legend=False)
    right.set_xlabel("confidence")
    return True


def _draw_balance(figure: "Figure", records: Sequence[Record]) -> bool:
    """Largest load over the mean, per layer and modality, over the run.

    Where the model learned: in stage "dspark" only the drafter's experts are counted.
    A small language model that was dropped has fewer layers and is left out.
    """
    own = [r for r in records if r.get("stage") != DRAFT_STAGE]
    records = own or records
    kinds = [k for k in ("text", "image") if any(k in r["balance"] for r in records)]
    if not kinds:
        return False
    for axes, kind in zip(figure.subplots(1, len(kinds), squeeze=False)[0], kinds, strict=True):
        seen = [r for r in records if kind in r["balance"]]
        last = len(seen[-1]["balance"][kind]["max_over_mean"])
        found = [r for r in seen if len(r["balance"][kind]["max_over_mean"]) == last]
        before = [r["tokens"] for r in records if r["tokens"] < found[0]["tokens"]]
        rows = list(zip(*(r["balance"][kind]["max_over_mean"] for r in found), strict=True))
        limits = (max(before, default=0) / 1e6, found[-1]["tokens"] / 1e6, len(rows) - 0.5, -0.5)
        image = axes.imshow(
            rows, aspect="auto", extent=limits, cmap="viridis", vmin=1, interpolation="nearest"
        )
        figure.colorbar(image, ax=axes, label="largest load / mean (1 is even)")
        _finish(axes, f"Expert load, {kind} tokens", "layer", legend=False)
    return True


def _draw_updates(figure: "Figure", records: Sequence[Record]) -> bool:
    """RMS of each parameter group's update."""
    found = [r for r in records if r.get("update_rms")]
    if not found:
        return False
    axes = figure.subplots()
    for group in sorted({group for r in found for group in r["update_rms"]}):
        points = [(r["tokens"], r["update_rms"][group]) for r in found if group in r["update_rms"]]
        _line(axes, points, None, group)
    axes.set_yscale("log")
    _finish(axes, "Size of updates", "RMS over the learning rate", legend=False)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return True


def _draw_gradients(figure: "Figure", records: Sequence[Record]) -> bool:
    """Gradient norm and learning rate."""
    left, right = figure.subplots(1, 2)
    _curve(left, [(r["tokens"], r["grad_norm"]) for r in records], COLOURS["all"], "all parameters")
    left.set_yscale("log")
    _finish(left, "Gradient norm before clipping", "")
    _line(right, [(r["tokens"], r["lr"]) for r in records], COLOURS["all"], "")
    _finish(right, "Learning rate", "", legend=False)
    return True


def _draw_speed(figure: "Figure", records: Sequence[Record]) -> bool:
    """Tokens per second; the share of the device's peak, or model FLOPs where that is unknown."""
    left, right = figure.subplots(1, 2)
    speeds = [(r["tokens"], r["tokens_per_second"]) for r in records]
    _curve(left, speeds, COLOURS["all"], "tokens")
    _finish(left, "Speed", "tokens per second", legend=False)
    name, scale = ("mfu", 1.0) if "mfu" in records[-1] else ("model_flops_per_second", 1e-12)
    points = [(r["tokens"], r[name] * scale) for r in records if name in r]
    if points:
        _curve(right, points, COLOURS["all"], name)
        title = "Model FLOPs utilisation" if name == "mfu" else "Model FLOPs"
        _finish(right, title, "" if name == "mfu" else "TFLOP/s", legend=False)
    else:
        right.set_axis_off()
    return True


PICTURES: dict[str, Callable[["Figure", Sequence[Record]], bool]] = {
    "loss": _draw_loss,
    "contrast": _draw_contrast,
    "drafts": _draw_drafts,
    "balance": _draw_balance,
    "updates": _draw_updates,
    "gradients": _draw_gradients,
    "speed": _draw_speed,
}


def _curve(axes: "Axes", points: Sequence[tuple[float, float]], colour: str, label: str) -> None:
    """Faint values and their centred running mean."""
    half = len(points) // SMOOTHED_SHARE // 2
    values = [value for _, value in points]
    smooth = []
    for place in range(len(values)):
        reach = min(half, place, len(values) - 1 - place)
        part = values[place - reach : place + reach + 1]
        smooth.append(sum(part) / len(part))
    axes.plot([t / 1e6 for t, _ in points], values, color=colour, alpha=0.2, linewidth=0.8)
    axes.plot([t / 1e6 for t, _ in points], smooth, color=colour, label=label)


def _line(
    axes: "Axes",
    points: Sequence[tuple[float, float]],
    colour: str | None,
    label: str,
    marker: str = "",
) -> None:
    axes.plot([t / 1e6 for t, _ in points], [v for _, v in points], color=colour, label=label,
              marker=marker, markersize=4)  # fmt: skip


def _finish(axes: "Axes", title: str, unit: str, *, legend: bool = True) -> None:
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel("training tokens (millions)")
    axes.set_ylabel(unit)
    axes.spines[["top", "right"]].set_visible(False)
    if legend:
        axes.legend(frameon=False)
