"""``openv41 data prepare``: turn text files into token shards."""

from pathlib import Path
from typing import Annotated

import typer

from openv41.cli.ui import progress, show_line
from openv41.io.tokenizer import load_tokenizer
from openv41.train.token_shards import prepare_shards


def prepare(
    files: Annotated[list[Path], typer.Argument(help="UTF-8 text files, one document each.")],
    tokenizer: Annotated[Path, typer.Option(help="Folder of the tokenizer.")],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
) -> None:
    """Write text files as token shards."""
    loaded = load_tokenizer(tokenizer)
    total = sum(file.stat().st_size for file in files if file.is_file())
    with progress() as bar:
        task = bar.add_task("bytes of text", total=total)
        shards = prepare_shards(
            files, loaded, out, progress=lambda done: bar.update(task, advance=done)
        )
    show_line(
        f"{out}: {len(shards.documents)} documents, {shards.num_bytes} bytes, "
        f"{shards.num_tokens} tokens ({shards.index.dtype}, "
        f"{shards.num_bytes / shards.num_tokens:.2f} bytes per token)"
    )
