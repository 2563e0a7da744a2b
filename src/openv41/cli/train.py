"""``openv41 train``: a model from text. Report §2.5."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from openv41.cli.device import resolve_device
from openv41.cli.ui import err, note, show_line
from openv41.cli.update_rules import show_update_rules
from openv41.errors import InputError
from openv41.presets import NAMES
from openv41.train.loop import Report, Run, StoppedError, Trainer
from openv41.train.malloc import keep_freed_memory
from openv41.train.metrics import StepRecord
from openv41.train.processes import join
from openv41.train.recipes import configure, without_data
from openv41.train.stages import RECIPES, Stage, num_image_tokens, num_steps, num_tokens

PLAIN_SECONDS = 10.0  # between the lines of a progress that no terminal shows


class Experts(StrEnum):
    """Where experts are, with several processes."""

    SHARDED = "sharded"  # as all else: gathered for each layer
    PARALLEL = "parallel"  # whole in one process each; tokens travel


def train(
    preset: Annotated[str, typer.Argument(metavar="PRESET", help=f"One of {NAMES}.")],
    *,
    data: Annotated[
        Path | None, typer.Option(help="Folder of token shards, see 'data prepare'.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run.")] = None,
    heldout: Annotated[
        Path | None, typer.Option(help="Token shards to score, never to train.")
    ] = None,
    images: Annotated[
        Path | None, typer.Option(help="Image-text shards to train on too, see 'data images'.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Such as optimizer.lr=3e-4."),
    ] = None,
    stages: Annotated[
        str, typer.Option(help=f"Stages of the run, of {', '.join(RECIPES)}.")
    ] = "pretrain",
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in OUT.")] = False,
    device: Annotated[str, typer.Option(help="Where to train, such as cpu or cuda.")] = "cpu",
    experts: Annotated[
        Experts, typer.Option(help="How the processes of torchrun share the experts.")
    ] = Experts.SHARDED,
    explain: Annotated[
        bool, typer.Option("--explain", help="Only show which parameter is updated how.")
    ] = False,
) -> None:
    """Train a model on text, and on images; OUT/checkpoint holds it in the end."""
    if explain:
        show_update_rules(*without_data(preset, settings or []))
        return
    if data is None or out is None:
        raise InputError("name the token shards with --data and the folder of the run with --out")
    model, made, token_map = configure(
        preset,
        data,
        settings or [],
        stages=[name.strip() for name in stages.split(",")],
        images=images is not None,
    )
    with join(_prepare(device, made[0].train.cpu_threads)) as processes:
        err.quiet = not processes.is_first
        run = Run(
            model=model,
            stages=made,
            token_map=token_map,
            data=data,
            heldout=heldout,
            images=images,
            out=out,
            device=processes.device,
            processes=processes,
            experts=experts.value,
        )
        _fit(Trainer(run, resume=resume))


def _prepare(device: str, cpu_threads: int) -> torch.device:
    """Settings of torch that hold for the process."""
    place = resolve_device(device)
    if place.type == "cpu":
        keep_freed_memory()
        torch.set_flush_denormal(True)  # denormal numbers are slow and mean nothing here
    if cpu_threads:
        torch.set_num_threads(cpu_threads)
    return place


def _fit(trainer: Trainer) -> None:
    """Run a run to its end, or to a signal; print the model's folder."""
    note(_describe(trainer))
    try:
        with _progress(trainer.run.stages, trainer.step) as report:
            folder = trainer.fit(report)
    except StoppedError as stop:
        note(f"{stop}; the same command with --resume goes on")
        raise typer.Exit(128 + stop.signal_number) from None
    if trainer.processes.is_first:
        show_line(str(folder))


def _describe(trainer: Trainer) -> str:
    model = trainer.model
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    kept = sum(p.numel() for p in model.parameters()) - trained
    tokens, images = num_tokens(trainer.run.stages), ""
    text = tokens
    if trainer.images is not None:
        image_tokens = num_image_tokens(trainer.run.stages)
        images = f", {image_tokens:,} of them for image-text samples"
        text -= image_tokens
    indexer = "" if trainer.train.indexer_loss else ", the indexer's without a gradient"
    from_step = f", from step {trainer.step:,}" if trainer.step else ""
    return (
        f"{trained:,} parameters to train ({kept:,} routing biases follow the load instead)"
        f"{indexer}; {trainer.num_steps:,} steps, {tokens:,} tokens{images}, "
        f"{text / trainer.shards.num_tokens:.2f} epochs of text, "
        f"{trainer.batches.padding:.0e} of a batch empty{from_step}"
    )


@contextmanager
def _progress(stages: tuple[Stage, ...], first_step: int) -> Iterator[Report]:
    """Show the steps on stderr: a bar in a terminal, a line now and then elsewhere."""
    timer = _Timer(num_steps(stages), first_step)
    if not err.is_terminal:
        yield lambda record: _plain(record, timer)
        return
    columns = (TextColumn("{task.description}"), BarColumn(20), TimeElapsedColumn())
    with Progress(*columns, console=err) as bar:
        task = bar.add_task("starting", total=timer.num_steps, completed=first_step)
        yield lambda record: _move(bar, task, record, timer)


class _Timer:
    """Speed and time left of a run, from the steps of this process."""

    def __init__(self, num_steps: int, first_step: int) -> None:
        self.num_steps, self.first_step = num_steps, first_step
        self.start = time.perf_counter()
        self.next_line = 0.0
        self.heldout: float | None = None

    def text(self, record: StepRecord) -> str:
        """One line about the run."""
        if record.heldout_bits_per_byte is not None:
            self.heldout = record.heldout_bits_per_byte
        done, steps = record.step - self.first_step, self.num_steps
        per_step = (time.perf_counter() - self.start) / done
        minutes, seconds = divmod(round(per_step * (steps - record.step)), 60)
        heldout = "" if self.heldout is None else f"  held-out {self.heldout:.3f} bits/byte"
        losses = "".join(f"  {kind} {loss:.3f}" for kind, loss in record.losses.items())
        both = losses if len(record.losses) > 1 else ""
        return (
            f"{record.stage} {record.step:,}/{steps:,}  loss {record.loss:.3f}{both}{heldout}  "
            f"{record.tokens_per_second:,.0f} tokens/s  {minutes}:{seconds:02} left"
        )


def _move(bar: Progress, task: TaskID, record: StepRecord, timer: _Timer) -> None:
    bar.update(task, completed=record.step, description=timer.text(record))


def _plain(record: StepRecord, timer: _Timer) -> None:
    text, now = timer.text(record), time.perf_counter()
    last = record.step == timer.num_steps
    if now >= timer.next_line or last or record.heldout_bits_per_byte is not None:
        note(text)
        timer.next_line = now + PLAIN_SECONDS
