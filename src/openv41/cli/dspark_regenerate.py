"""``openv41 dspark regenerate``: answers in the target's own words, for its drafter to learn."""

import hashlib
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
from openv41.cli.ui import note, progress, show_line
from openv41.engine.engine import Engine
from openv41.engine.request import FinishReason, Request, refuse_failed
from openv41.io.checkpoint_hash import checkpoint_hash
from openv41.io.resumable_lines import ResumableLines


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
    learns from texts of others. Go on with 'data samples' and 'train --stages dspark --sft'. The
    same command takes over what it had made when it was interrupted, OUT.partial.
    """
    found = held_out_prompts(checkpoint, text, prompts, prompt_tokens)
    requests = answers_of(found, max_tokens, temperature=temperature, ignore_eos=False)
    about = {
        "checkpoint": checkpoint_hash(checkpoint),
        "text and prompts": hashlib.sha256(json.dumps(found).encode()).hexdigest(),
        "max_tokens": max_tokens,
        "temperature": temperature,
        "at_once": at_once,
        "numerics": None if numerics is None else numerics.value,
    }
    rounds = [requests[first : first + at_once] for first in range(0, len(requests), at_once)]
    with ResumableLines(out, about) as lines:
        if lines.rounds:
            note(f"going on behind round {lines.rounds} of {len(rounds)} in {lines.partial}")
        rest = rounds[lines.rounds :]
        if rest:
            tokens = 1 + prompt_tokens + max_tokens
            engine = answering_engine(checkpoint, min(prompts, at_once), tokens, numerics, device)
            _answer(engine, rest, lines, len(requests))
        lines.finish()
    show_line(f"{out}: {len(requests)} answers of up to {max_tokens} tokens")


def _answer(
    engine: Engine, rounds: Sequence[Sequence[Request]], lines: ResumableLines, total: int
) -> None:
    """Add the answers of each round; those of rounds before are there."""
    try:
        with progress() as bar:
            done = total - sum(map(len, rounds))
            task = bar.add_task("answers", total=total, completed=done)
            for part in rounds:
                found = _records(engine, part)
                lines.add([json.dumps(record, ensure_ascii=False) for record in found])
                bar.update(task, advance=len(part))
    except KeyboardInterrupt:
        if lines.rounds:
            note(f"{lines.rounds} rounds are in {lines.partial}: the same command goes on there")
        raise


def _records(engine: Engine, requests: Sequence[Request]) -> Iterator[dict[str, object]]:
    """Samples for ``openv41 data samples``: prompts as context, answers to learn.

    Token ids stand beside the texts, which cannot hold a part of a character.
    """
    answers = engine.generate(requests)
    refuse_failed(answers, "an answer to a prompt")
    for request, answer in zip(requests, answers, strict=True):
        ids = request.prompt[1:]
        said = b"".join(engine.tokenizer.token_bytes(i) for i in ids)
        prompt = said.decode(errors="replace")
        parts: list[dict[str, object]] = [
            {"text": prompt, "ids": ids, "loss": False},
            {"text": answer.text, "ids": answer.tokens},
        ]
        if answer.finish_reason is FinishReason.LENGTH:  # cut: EOS is not the target's word
            parts.append({"text": "", "loss": False})
        yield {"parts": parts, "tokenizer": engine.tokenizer.sha256}
