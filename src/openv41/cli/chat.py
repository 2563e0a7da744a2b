"""``openv41 chat``: a conversation in the terminal."""

import sys
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.rule import Rule

from openv41.cli.conversations import Settings, TerminalChat, begin
from openv41.cli.device import resolve_device
from openv41.cli.numerics import Numerics
from openv41.cli.ui import err, note
from openv41.engine.engine import Engine, EngineConfig
from openv41.engine.paged_store import CacheConfig
from openv41.engine.sampler import SamplingConfig
from openv41.engine.scheduled_verification import schedule_verification
from openv41.engine.speculation import SpeculationConfig
from openv41.errors import OpenV41Error
from openv41.prompt.messages import effort_number

COMMANDS = (
    "/new starts afresh, /image FILE shows an image with the next message, "
    "/stats tells what the engine did, /quit ends (as Ctrl-D does)"
)


def chat(
    checkpoint: Annotated[Path, typer.Argument(help="Folder of the checkpoint.")],
    *,
    system: Annotated[str, typer.Option(help="Text before the conversation.")] = "",
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 512,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token.")] = 0.8,
    top_p: Annotated[float, typer.Option(help="Draw from this share of the probability.")] = 0.95,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal answers.")] = 0,
    thinking: Annotated[bool, typer.Option(help="Reason before the answer.")] = True,
    effort: Annotated[str, typer.Option(help="How much: 1 to 100, low, high or max.")] = "high",
    numerics: Annotated[
        Numerics | None, typer.Option(help="Where to round; else as it is stored.")
    ] = None,
    speculation: Annotated[
        bool, typer.Option(help="Draft tokens, where the checkpoint can.")
    ] = True,
    device: Annotated[str, typer.Option(help="Where to run, such as cpu or cuda.")] = "cpu",
) -> None:
    """Talk with a checkpoint; earlier turns are found in the prefix cache."""
    sampling = SamplingConfig(temperature=temperature, top_p=top_p, seed=seed)
    amount = effort_number(int(effort) if effort.isdecimal() else effort)
    settings = Settings(
        sampling=sampling, max_tokens=max_tokens, system=system, thinking=thinking, effort=amount
    )
    rounding = None if numerics is None else numerics.value
    config = EngineConfig(
        cache=CacheConfig(max_requests=1), speculation=SpeculationConfig() if speculation else None
    )
    engine = Engine.load(
        checkpoint, config=config, numerics=rounding, device=resolve_device(device)
    )
    schedule_verification(engine, checkpoint)
    if isinstance(sys.stdin, TextIOWrapper):  # else a line that is not UTF-8 takes others with it
        sys.stdin.reconfigure(errors="surrogateescape")
    note(f"{checkpoint.resolve().name}: {COMMANDS}")
    conversation = begin(engine, settings)
    while (line := _ask()) is not None and line != "/quit":
        if line == "/new":
            conversation = begin(engine, settings)
            err.print(Rule(style="dim"))
        elif line == "/stats":
            note(conversation.figures())
        elif line.startswith("/image "):
            conversation.show(Path(line.removeprefix("/image ").strip()))
        elif line.startswith("/"):
            note(f"no command {line}: {COMMANDS}")
        elif line:
            _answer(conversation, line)


def _answer(conversation: TerminalChat, line: str) -> None:
    """Answer a message; one that fails is not kept, and the conversation goes on."""
    try:
        conversation.answer(line)
    except OpenV41Error as error:
        note(f"no answer: {error}")


def _ask() -> str | None:
    """The next line of the user, None at the end."""
    try:
        line = err.input(f"[bold cyan]{escape('> ')}[/]").strip()
    except EOFError:
        note("")
        return None
    if any("\ud800" <= character <= "\udfff" for character in line):
        note("the line is not UTF-8 text; write it again")
        return ""
    return line
