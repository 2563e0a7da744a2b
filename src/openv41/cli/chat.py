"""``openv41 chat``: a conversation in the terminal."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.rule import Rule

from openv41.cli.device import resolve_device
from openv41.cli.numerics import Numerics
from openv41.cli.ui import err, note, out
from openv41.engine.engine import Engine, EngineConfig
from openv41.engine.paged_store import CacheConfig
from openv41.engine.request import FinishReason, Request
from openv41.engine.sampler import SamplingConfig
from openv41.errors import OpenV41Error

COMMANDS = "/new starts afresh, /stats tells what the engine did, /quit ends (as Ctrl-D does)"


def chat(
    checkpoint: Annotated[Path, typer.Argument(help="Folder of the checkpoint.")],
    *,
    system: Annotated[str, typer.Option(help="Text before the conversation.")] = "",
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 512,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token.")] = 0.8,
    top_p: Annotated[float, typer.Option(help="Draw from this share of the probability.")] = 0.95,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal answers.")] = 0,
    numerics: Annotated[
        Numerics | None, typer.Option(help="Where to round; else as it is stored.")
    ] = None,
    device: Annotated[str, typer.Option(help="Where to run, such as cpu or cuda.")] = "cpu",
) -> None:
    """Talk with a checkpoint; earlier turns are found in the prefix cache."""
    sampling = SamplingConfig(temperature=temperature, top_p=top_p, seed=seed)
    rounding = None if numerics is None else numerics.value
    config = EngineConfig(cache=CacheConfig(max_requests=1))
    engine = Engine.load(
        checkpoint, config=config, numerics=rounding, device=resolve_device(device)
    )
    note(f"{checkpoint.resolve().name}: {COMMANDS}")
    conversation = Conversation(engine, system)
    while (line := _ask()) is not None and line != "/quit":
        if line == "/new":
            conversation = Conversation(engine, system)
            err.print(Rule(style="dim"))
        elif line == "/stats":
            note(conversation.figures())
        elif line.startswith("/"):
            note(f"no command {line}: {COMMANDS}")
        elif line:
            conversation.answer(line, sampling, max_tokens)


class Conversation:
    """Turns as tokens in the format of the server's plain transcript, so that prefixes stay."""

    def __init__(self, engine: Engine, system: str) -> None:
        self._engine = engine
        self._tokens = [engine.model.config.bos_token_id, *engine.tokenizer.encode(system)]
        self._cached = 0

    def answer(self, text: str, sampling: SamplingConfig, max_tokens: int) -> None:
        """Write the answer to a message as it comes; Ctrl-C cuts it short."""
        turn = self._engine.tokenizer.encode(f"User: {text}\n\nAssistant:")
        prompt = [*self._tokens, *turn]
        request = Request(
            prompt=tuple(prompt), max_tokens=max_tokens, sampling=sampling, stop=("\n\nUser:",)
        )
        self._tokens = prompt
        events = self._engine.stream(request)
        try:
            for event in events:
                out.out(event.text, end="", highlight=False)
                out.file.flush()
                self._cached = event.cached_tokens or self._cached
                self._tokens += [] if event.token is None else [event.token]
                if event.finish_reason is FinishReason.ERROR:
                    raise OpenV41Error(f"the request failed: {event.error}")
        except KeyboardInterrupt:
            note("(cut short)")
        finally:
            events.close()
        out.out("")
        self._tokens += [self._engine.model.config.eos_token_id]

    def figures(self) -> str:
        """What the conversation takes, and what the prefix cache saved."""
        stats = self._engine.stats()
        return (
            f"{len(self._tokens)} tokens, {self._cached} of the last prompt's found in the cache; "
            f"{stats.pages_used} of {stats.pages_used + stats.pages_free} pages in use; "
            f"{stats.prefill_rows_skipped:,} of {stats.prefill_rows:,} prefill rows skipped"
        )


def _ask() -> str | None:
    """The next line of the user, None at the end."""
    try:
        return err.input(f"[bold cyan]{escape('> ')}[/]").strip()
    except EOFError:
        note("")
        return None
