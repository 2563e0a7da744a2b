"""``openv41 dspark regenerate``: answers in the target's own words, for its drafter to learn."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from openv41.cli.dspark import (
    Checkpoint,
    Device,
    Rounding,
    answering_engine,
    answers_of,
    held_out_prompts,
)
from openv41.cli.ui import progress, show_line
from openv41.engine.engine import Engine
from openv41.engine.request import FinishReason, Request, refuse_failed
from openv41.io.atomic import atomic_path


def regenerate_command(
    checkpoint: Checkpoint,
    *,
    text: Annotated[Path, typer.Option(help="Text whose parts are prompts; never a held-out one.")],
    out: Annotated[Path, typer.Option(help="JSONL file to write, for 'data samples'.")],
    prompts: Annotated[int, typer.Option(min=1, help="Prompts, spread over the text.")] = 256,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 64,
    max_tokens: Annotated[int, typer.Option(min=8, help="Most tokens of an answer.")] = 192,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest.")] = 1.0,
    at_once: Annotated[int, typer.Option(min=1, help="Answers that run side by side.")] = 64,
    numerics: Rounding = None,
    device: Device = "cpu",
) -> None:
    """Let the target answer prompts, and write what it says as samples whose answers are learned.

    A drafter that learns from its target's own answers has more drafts accepted than one that
    learns from texts of others. Go on with 'data samples' and 'train --stages dspark --sft'.
    """
    found = held_out_prompts(checkpoint, text, prompts, prompt_tokens)
    tokens = 1 + prompt_tokens + max_tokens
    engine = answering_engine(checkpoint, min(prompts, at_once), tokens, numerics, device)
    requests = answers_of(found, max_tokens, temperature=temperature, ignore_eos=False)
    with (
        atomic_path(out) as temporary,
        progress() as bar,
        temporary.open("w", encoding="utf-8") as file,
    ):
        task = bar.add_task("answers", total=len(requests))
        for record in _records(engine, requests, at_once):
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
            bar.update(task, advance=1)
    show_line(f"{out}: {len(requests)} answers of up to {max_tokens} tokens")


def _records(
    engine: Engine, requests: Sequence[Request], at_once: int
) -> Iterator[dict[str, object]]:
    """Samples for ``openv41 data samples``: prompts as context, answers to learn."""
    for first in range(0, len(requests), at_once):
        part = requests[first : first + at_once]
        answers = engine.generate(part)
        refuse_failed(answers, "an answer to a prompt")
        for request, answer in zip(part, answers, strict=True):
            said = b"".join(engine.tokenizer.token_bytes(i) for i in request.prompt[1:])
            prompt = said.decode(errors="replace")
            parts = [{"text": prompt, "loss": False}, {"text": answer.text}]
            if answer.finish_reason is FinishReason.LENGTH:  # cut: EOS is not the target's word
                parts.append({"text": "", "loss": False})
            yield {"parts": parts}
