"""``openv41 train``: a model from text. Report §2.5."""

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer

from openv41.cli.device import resolve_device
from openv41.cli.train_progress import show_progress
from openv41.cli.ui import err, note, show_line
from openv41.cli.update_rules import show_update_rules
from openv41.errors import InputError
from openv41.presets import NAMES
from openv41.train.distill import parse_teachers
from openv41.train.freezing import is_frozen
from openv41.train.loop import Run, StoppedError, Trainer
from openv41.train.malloc import keep_freed_memory
from openv41.train.processes import join
from openv41.train.recipes import configure, without_data
from openv41.train.sample_batches import SampleBatches
from openv41.train.sample_shards import SampleShards
from openv41.train.stages import RECIPES, SFT_STAGES, num_image_tokens, num_tokens

SFT = " and ".join(SFT_STAGES)
SFT_HELP = f"Sample shards that {SFT} learn instead of text, see 'data samples'."


class Experts(StrEnum):
    """Where experts are, with several processes."""

    SHARDED = "sharded"  # as all else: gathered for each layer
    PARALLEL = "parallel"  # whole in one process each; tokens travel


Preset = Annotated[str | None, typer.Argument(metavar="[PRESET]", help=f"One of {NAMES}.")]
Base = Annotated[
    Path | None, typer.Option("--from", help="Checkpoint to start from, instead of a preset.")
]
TeacherWords = Annotated[
    list[str] | None,
    typer.Option("--teacher", metavar="CHECKPOINT[=WEIGHT]", help="Checkpoint to distil."),
]
Data = Annotated[Path | None, typer.Option(help="Folder of token shards, see 'data prepare'.")]
HeldoutText = Annotated[Path | None, typer.Option(help="Token shards to score, never to train.")]
Images = Annotated[
    Path | None, typer.Option(help="Image-text shards to train on too, see 'data images'.")
]
HeldoutImages = Annotated[
    Path | None, typer.Option(help="Image-text shards to score, never to train.")
]
Sft = Annotated[Path | None, typer.Option(help=SFT_HELP)]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Such as optimizer.lr=3e-4."),
]
Wandb = Annotated[
    str | None, typer.Option(metavar="PROJECT", help="Log to this project of wandb, too.")
]


def train(
    preset: Preset = None,
    *,
    data: Data = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run.")] = None,
    heldout: HeldoutText = None,
    images: Images = None,
    heldout_images: HeldoutImages = None,
    sft: Sft = None,
    base: Base = None,
    teacher: TeacherWords = None,
    settings: Settings = None,
    stages: Annotated[
        str, typer.Option(help=f"Stages of the run, of {', '.join(RECIPES)}.")
    ] = "pretrain",
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in OUT.")] = False,
    device: Annotated[str, typer.Option(help="Where to train, such as cpu or cuda.")] = "cpu",
    experts: Annotated[
        Experts, typer.Option(help="How the processes of torchrun share the experts.")
    ] = Experts.SHARDED,
    wandb: Wandb = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Only show which parameter is updated how.")
    ] = False,
) -> None:
    """Train a model on text, and on images; OUT/checkpoint holds it in the end."""
    names = [name for word in stages.split(",") if (name := word.strip())]
    source = base or preset
    if source is None or (base and preset):
        raise InputError("name either a preset or, with --from, a checkpoint to start from")
    if explain:
        if preset is None:
            raise InputError("--explain shows the rules of a preset; name one instead of --from")
        show_update_rules(*without_data(preset, settings or [], stages=names))
        return
    if data is None or out is None:
        raise InputError("name the token shards with --data and the folder of the run with --out")
    sees = images is not None or _needs_vision(sft, names)
    model, made, token_map = configure(source, data, settings or [], stages=names, images=sees)
    with join(_prepare(device, made[0].train.cpu_threads)) as processes:
        err.quiet = not processes.is_first
        run = Run(
            model=model,
            stages=made,
            token_map=token_map,
            data=data,
            heldout=heldout,
            images=images,
            heldout_images=heldout_images,
            base=base,
            teachers=parse_teachers(teacher or []),
            sft=sft,
            out=out,
            device=processes.device,
            processes=processes,
            experts=experts.value,
            wandb=wandb,
        )
        _fit(Trainer(run, resume=resume))


def _needs_vision(sft: Path | None, stages: Sequence[str]) -> bool:
    """Whether the answers to learn are for a model that sees; refuses those of no stage."""
    if sft is None:
        return False
    if not {*SFT_STAGES} & {*stages}:
        raise InputError(f"--sft is for {SFT}; add one to --stages, or leave it out")
    return SampleShards(sft, verify=False).needs_vision


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
    if trainer.run.experts == "parallel" and trainer.processes.size == 1:
        note("one process holds all experts: --experts parallel changes nothing")
    try:
        with show_progress(trainer.run.stages, trainer.step) as report:
            folder = trainer.fit(report)
    except StoppedError as stop:
        note(f"{stop}; the same command with --resume goes on")
        raise typer.Exit(128 + stop.signal_number) from None
    if trainer.processes.is_first:
        show_line(str(folder))


def _describe(trainer: Trainer) -> str:
    parameters = trainer.optimizer.placement.parameters
    trained = sum(p.shape.numel() for p in parameters if p.local.requires_grad)
    kept = sum(p.shape.numel() for p in parameters) - trained
    is_frozen_model = trainer.train.lora.rank or trainer.stage.trains_drafter
    why = "frozen" if is_frozen_model else "routing biases follow the load instead"
    rest = f" ({kept:,} {why})" if kept else ""
    tokens, images = num_tokens(trainer.run.stages), ""
    if trainer.images is not None:
        images = f", {num_image_tokens(trainer.run.stages):,} of them for image-text samples"
    others = trainer.stage.is_contrastive or trainer.stage.trains_drafter
    taught = trainer.train.indexer_loss or others
    indexer = "" if taught else ", the indexer's without a gradient"
    rests = ""
    if is_frozen(trainer.train, 0):
        rests = ", the vision encoder's once the learning rate decays"
    stage = f" in stage {trainer.stage.name}" if len(trainer.run.stages) > 1 else ""
    from_step = f", from step {trainer.step:,}" if trainer.step else ""
    return (
        f"{trained:,} parameters to train{stage}{rest}{indexer}{rests}; "
        f"{trainer.num_steps:,} steps, {tokens:,} tokens{images}, "
        f"{_epochs(trainer)}, "
        f"{trainer.batches.padding:.0e} of a batch empty{from_step}"
    )


def _epochs(trainer: Trainer) -> str:
    """How often the run sees its text and its samples, whichever it has stages for."""
    run, seen, has_images = trainer.run, [], trainer.images is not None
    answering = [s for s in run.stages if run.sft is not None and s.name in SFT_STAGES]
    reading = [stage for stage in run.stages if stage not in answering]
    if reading:
        text = num_tokens(reading) - (num_image_tokens(reading) if has_images else 0)
        seen.append(f"{text / trainer.shards.num_tokens:.2f} epochs of text")
    if run.sft is not None and answering:
        samples, passes = SampleShards(run.sft, verify=False), 0.0
        for stage in answering:
            room = stage.train.batch_tokens - (stage.image_tokens if has_images else 0)
            bins = SampleBatches(samples, bin_tokens=room, seed=stage.train.seed).bins
            passes += stage.train.num_steps / len(bins)
        seen.append(f"{passes:.2f} epochs of {len(samples):,} sample(s) from {run.sft}")
    return " and ".join(seen)
