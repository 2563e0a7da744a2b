"""``openv41 generate``: text from a checkpoint, as it comes."""

from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer

from openv41.cli.device import resolve_device
from openv41.cli.ui import note, out
from openv41.config import NUMERICS
from openv41.engine.generate import as_text
from openv41.engine.generate import generate as generate_tokens
from openv41.engine.sampler import SamplingConfig
from openv41.io.checkpoint import load_model
from openv41.io.tokenizer import load_tokenizer


class Numerics(StrEnum):
    """Names of the numerics on the command line."""

    F32 = "f32"
    F32QAT = "f32qat"
    RELEASED = "released"


def generate(
    checkpoint: Annotated[Path, typer.Argument(help="Folder of the checkpoint.")],
    *,
    prompt: Annotated[str, typer.Option(help="Text to go on from; may be empty.")],
    max_tokens: Annotated[int, typer.Option(help="Most tokens to add.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token.")] = 1.0,
    top_k: Annotated[int | None, typer.Option(help="Draw from the K most likely tokens.")] = None,
    top_p: Annotated[float, typer.Option(help="Draw from this share of the probability.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal text.")] = 0,
    numerics: Annotated[
        Numerics, typer.Option(help="Where the model rounds, see docs/numerics.md.")
    ] = Numerics.F32,
    device: Annotated[str, typer.Option(help="Where to run, such as cpu or cuda.")] = "cpu",
) -> None:
    """Continue a prompt; only the new text goes to stdout."""
    sampling = SamplingConfig(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    place = resolve_device(device)
    tokenizer = load_tokenizer(checkpoint)
    model = load_model(
        checkpoint, numerics=NUMERICS[numerics.value], dtype=torch.float32, device=place
    )
    config = model.config
    ids = [config.bos_token_id, *tokenizer.encode(prompt)]
    tokens = generate_tokens(
        model, ids, sampling, max_tokens=max_tokens, num_tokens=tokenizer.vocab_size
    )
    drawn: list[int] = []
    for piece in as_text(_recorded(tokens, drawn), tokenizer):
        out.out(piece, end="", highlight=False)
        out.file.flush()
    out.out("")
    if len(ids) + len(drawn) > config.max_position:
        note(f"stopped: the text has reached position {config.max_position}, the model's last")


def _recorded(tokens: Iterator[int], drawn: list[int]) -> Iterator[int]:
    """Pass tokens on and keep them."""
    for token in tokens:
        drawn.append(token)
        yield token
