"""``openv41 data images`` and ``data samples``: turn samples into sample shards."""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from openv41.cli.ui import progress, show_line
from openv41.config import VisionConfig
from openv41.errors import InputError
from openv41.io.tokenizer import load_tokenizer
from openv41.presets import NAMES, preset
from openv41.train.sample_shards import prepare_sample_shards
from openv41.train.samples import read_samples

Tokenizer = Annotated[
    Path,
    typer.Option(help="Its folder; for chats and images one made with --prompt-format."),
]


def images(
    files: Annotated[
        list[Path], typer.Argument(help="JSONL or parquet files of image-text samples.")
    ],
    *,
    tokenizer: Tokenizer,
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    model: Annotated[
        str, typer.Option("--preset", help=f"The model that they are for, one of {NAMES}.")
    ] = "tiny",
    max_tokens: Annotated[
        int, typer.Option(help="Samples longer than this are left out.", min=1)
    ] = 512,
) -> None:
    """Write image-text samples as shards: pairs, interleaved documents or conversations."""
    vision = preset(model).vision
    if vision is None:
        raise InputError(f"preset {model} has no vision encoder; choose another --preset")
    _prepare_samples(files, tokenizer, vision, out, max_tokens)


def samples(
    files: Annotated[
        list[Path], typer.Argument(help="JSONL or parquet files of conversations or documents.")
    ],
    *,
    tokenizer: Tokenizer,
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    max_tokens: Annotated[
        int, typer.Option(help="Samples longer than this are left out.", min=1)
    ] = 4096,
) -> None:
    """Write samples without images as shards: conversations whose answers are learned."""
    _prepare_samples(files, tokenizer, None, out, max_tokens)


def _prepare_samples(
    files: Sequence[Path], tokenizer: Path, vision: VisionConfig | None, out: Path, max_tokens: int
) -> None:
    read = chain.from_iterable(read_samples(file) for file in files)
    with progress() as bar:
        task = bar.add_task("samples", total=None)
        shards = prepare_sample_shards(
            read,
            load_tokenizer(tokenizer),
            vision,
            out,
            max_tokens=max_tokens,
            progress=lambda done: bar.update(task, advance=done),
        )
    index = shards.index
    image_tokens = "" if vision is None else f"{index.image_tokens} image tokens, "
    show_line(
        f"{out}: {len(shards)} samples, {index.text_tokens} text tokens, {image_tokens}"
        f"{index.targets} of them to learn"
    )
