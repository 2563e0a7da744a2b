"""``openv41 inspect``: pictures of what a model does."""

from pathlib import Path
from typing import Annotated

import torch
import typer

from openv41.cli.image_picture import draw_inspection
from openv41.cli.ui import show_line
from openv41.io.checkpoint import load_model
from openv41.io.inspect_image import inspect_image
from openv41.io.tokenizer import load_tokenizer


def image(
    file: Annotated[Path, typer.Argument(help="Image file.", show_default=False)],
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint folder.", show_default=False)],
    *,
    out: Annotated[Path, typer.Option(help="PNG file to write.")] = Path("inspect.png"),
    text: Annotated[
        str, typer.Option(help="Text behind the image, whose experts are compared.")
    ] = "What is to be seen here? Describe it in a few words.",
) -> None:
    """Draw an image's patch grid, its tokens, and the experts that they use beside the text's."""
    model = load_model(checkpoint, dtype=torch.float32)
    found = inspect_image(model, load_tokenizer(checkpoint), file, text)
    draw_inspection(found, file.name, out)
    grid = found.grid
    show_line(
        f"{file}: {found.size[0]} x {found.size[1]} pixels, {grid.cols} x {grid.rows} patches, "
        f"{grid.cell_cols} x {grid.cell_rows} cells, {grid.span_length} tokens"
    )
    shared = ", ".join(f"{value:.2f}" for value in found.overlap.tolist())
    show_line(f"experts shared with the text, per layer (1: used alike): {shared}")
    show_line(str(out))
