"""``openv41 generate``: text from a checkpoint, as it comes."""

from pathlib import Path
from typing import Annotated

import typer

from openv41.cli.device import resolve_device
from openv41.cli.numerics import Numerics
from openv41.cli.ui import note, out
from openv41.engine.engine import Engine, EngineConfig
from openv41.engine.paged_store import CacheConfig
from openv41.engine.request import FinishReason, Request
from openv41.engine.sampler import SamplingConfig
from openv41.engine.scheduled_verification import schedule_verification
from openv41.engine.speculation import SpeculationConfig
from openv41.errors import OpenV41Error
from openv41.io.hf_config import read_config
from openv41.io.tokenizer import load_tokenizer
from openv41.model.prefill import PrefillMode


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
        Numerics | None, typer.Option(help="Where to round; else as it is stored.")
    ] = None,
    prefill: Annotated[
        PrefillMode, typer.Option(help="How much of the decoder a prompt needs.")
    ] = PrefillMode.EXACT,
    speculation: Annotated[
        bool, typer.Option(help="Draft tokens, where the checkpoint can.")
    ] = True,
    device: Annotated[str, typer.Option(help="Where to run, such as cpu or cuda.")] = "cpu",
) -> None:
    """Continue a prompt; only the new text goes to stdout."""
    sampling = SamplingConfig(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    place = resolve_device(device)
    model = read_config(checkpoint)
    ids = (model.bos_token_id, *load_tokenizer(checkpoint).encode(prompt))
    room = max(1, model.max_position + 1 - len(ids))
    request = Request(prompt=ids, max_tokens=min(max_tokens, room), sampling=sampling)
    num_pages = -(-(len(ids) + request.max_tokens) // CacheConfig().page_size)
    cache = CacheConfig(num_pages=num_pages, max_requests=1)
    config = EngineConfig(
        cache=cache,
        prefill=prefill,
        prefix_cache=False,
        speculation=SpeculationConfig() if speculation else None,
    )
    rounding = None if numerics is None else numerics.value
    engine = Engine.load(checkpoint, config=config, numerics=rounding, device=place)
    schedule_verification(engine, checkpoint)
    drawn, reason = 0, None
    for event in engine.stream(request):
        out.out(event.text, end="", highlight=False)
        out.file.flush()
        drawn += event.token is not None
        reason = event.finish_reason
        if event.error is not None:
            raise OpenV41Error(f"the request failed: {event.error}")
    out.out("")
    if reason is FinishReason.LENGTH and drawn < max_tokens:
        note(f"stopped: the text has reached position {model.max_position}, the model's last")
