"""``openv41 convert``: rewrite a checkpoint in another variant."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from openv41.cli.ui import progress, show_line
from openv41.io import checkpoint
from openv41.io.tensor_names import Variant
from openv41.train.lora import load_adapted, merge


class Target(StrEnum):
    """Spelling of the variants on the command line."""

    RELEASED = "released"
    BF16 = "bf16"
    FLOAT32 = "float32"


VARIANTS: dict[Target, Variant] = {
    Target.RELEASED: "released",
    Target.BF16: "bfloat16",
    Target.FLOAT32: "float32",
}


def convert(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="Checkpoint folder to read.")],
    folder: Annotated[Path, typer.Argument(metavar="DST", help="Folder to write.")],
    to: Annotated[Target, typer.Option(help="FP8 and FP4 codes as released, or plain numbers.")],
    adapter: Annotated[
        Path | None, typer.Option(help="LoRA adapter of SRC to merge into its weights.")
    ] = None,
) -> None:
    """Rewrite a checkpoint as released codes, bfloat16 or float32."""
    if adapter is not None:
        _convert_adapted(source, adapter, folder, VARIANTS[to])
    else:
        _convert(source, folder, to)
    files = sorted(folder.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    show_line(f"{folder}: {to}, {len(files)} files, {size / 1e9:.3f} GB")


def _convert(source: Path, folder: Path, to: Target) -> None:
    """Rewrite it a few rows at a time."""
    with progress() as bar:
        task = bar.add_task(f"weights to {to}", total=None)
        checkpoint.convert(
            source,
            folder,
            variant=VARIANTS[to],
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )


def _convert_adapted(source: Path, adapter: Path, folder: Path, variant: Variant) -> None:
    """Load all of it in float32 and merge the adapter."""
    checkpoint.check_apart(source, folder)
    adapted = load_adapted(source, adapter)
    merge(adapted.model)
    checkpoint.save_checkpoint(adapted, folder, variant=variant)
