"""Progress of ``openv41 train``: one line per interval, of at most 120 columns."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import Progress, TextColumn

from openv41.cli.ui import GIVEN, err, note
from openv41.train.loop import Report
from openv41.train.metrics import StepRecord
from openv41.train.stages import Stage, num_steps

WIDTH = 120
PLAIN_SECONDS = 10.0  # between the lines of a progress that no terminal shows
SUFFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


@contextmanager
def show_progress(stages: tuple[Stage, ...], first_step: int) -> Iterator[Report]:
    """Show the steps on stderr: a line that changes in a terminal, a new one elsewhere.

    Scores of held-out text and loss spikes have lines of their own.
    """
    steps, start = num_steps(stages), time.perf_counter()

    def line(record: StepRecord) -> str:
        note_events(record)
        per_step = (time.perf_counter() - start) / (record.step - first_step)
        return progress_line(record, steps, per_step * (steps - record.step))

    if err.is_terminal:
        with Progress(TextColumn("{task.description}", markup=False), console=err) as bar:
            task = bar.add_task("starting", total=None)
            yield lambda record: bar.update(task, description=line(record))
        return
    next_line = 0.0

    def plain(record: StepRecord) -> None:
        nonlocal next_line
        text, now = line(record), time.perf_counter()
        if now >= next_line or record.step == steps:
            note(text)
            next_line = now + PLAIN_SECONDS

    yield plain


def note_events(record: StepRecord) -> None:
    """Say what does not happen in every step."""
    where = f"{record.stage} {record.step}"
    if record.heldout_bits_per_byte is not None:
        note(f"{where}  held-out text {record.heldout_bits_per_byte:.3f} bits/byte")
    if record.heldout_image_nats is not None:
        note(f"{where}  held-out images {record.heldout_image_nats:.3f} nats/target")
    if record.heldout_draft is not None:
        shares = " ".join(f"{share:.0%}" for share in record.heldout_draft["acceptance"])
        length = record.heldout_draft["tau"]
        note(f"{where}  held-out drafts: mean accepted length {length:.2f}, {GIVEN} {shares}")
    if record.spike:
        note(f"{where}  loss spike: {record.loss:#.4g}, far above the steps before it")


def progress_line(record: StepRecord, num_steps: int, seconds_left: float) -> str:
    """Loss by modality, speed, learning rate, gradient norm, expert load, time left.

    Beside teachers the reverse KL to them, which the losses by modality leave out. The load is the
    largest of an expert over the mean, in the worst layer, of each modality.
    """
    losses = record.losses if len(record.losses) > 1 else {"loss": record.loss}
    fields = [
        f"{record.stage} {record.step}/{num_steps}",
        " ".join(f"{kind} {loss:#.4g}" for kind, loss in losses.items()),
        "" if record.distill_loss is None else f"distill {record.distill_loss:#.4g}",
        f"{_short(record.tokens_per_second)} tok/s",
        _utilisation(record),
        f"lr {record.lr:.1e}".replace("e-0", "e-"),
        f"grad {record.grad_norm:.2g}",
    ]
    if record.balance:
        loads = (f"{max(balance.max_over_mean):.1f}" for balance in record.balance.values())
        fields.append(f"load {' '.join(loads)}")
    if record.retrieval is not None:
        fields.append(f"retrieval {record.retrieval:.0%}")
    fields = [*filter(None, fields), f"{_duration(seconds_left)} left"]
    line = "  ".join(fields)
    return line if len(line) <= WIDTH else " ".join(fields)


def _utilisation(record: StepRecord) -> str:
    """Share of the device's peak, or the model's operations where that is not known."""
    if record.mfu is not None:
        return f"mfu {record.mfu:.1%}"
    flops = record.model_flops_per_second
    return "" if flops is None else f"{_short(flops, space=' ')}FLOP/s"


def _short(number: float, space: str = "") -> str:
    """Three digits and a suffix; below 1 one digit."""
    for size, suffix in SUFFIXES:
        if number >= 0.9995 * size:  # 999.6 thousand are a million
            return f"{number / size:#.3g}".rstrip(".") + space + suffix
    return f"{number:.1g}{space}"


def _duration(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d{hours % 24:02}h"
    return f"{hours}h{minute:02}m" if hours else f"{minute}:{second:02}"
