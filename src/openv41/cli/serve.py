"""``openv41 serve``: a checkpoint behind an OpenAI-compatible HTTP API."""

import importlib.util
import logging
import socket
from pathlib import Path
from typing import Annotated

import typer

from openv41.cli.device import resolve_device
from openv41.cli.numerics import Numerics
from openv41.cli.ui import note
from openv41.engine.async_engine import AsyncEngine
from openv41.engine.engine import Engine, EngineConfig
from openv41.engine.heap import freeze_heap
from openv41.engine.paged_store import CacheConfig
from openv41.engine.scheduled_verification import schedule_verification
from openv41.engine.speculation import SpeculationConfig
from openv41.errors import InputError
from openv41.io.engram_store import EngramPlacement
from openv41.model.prefill import PrefillMode
from openv41.server.limits import Limits

CACHE, LIMITS = CacheConfig(), Limits()  # the defaults of their options
EXTRA = ("fastapi", "h11", "prometheus_client", "pydantic", "uvicorn")
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

Checkpoint = Annotated[Path, typer.Argument(help="Folder of the checkpoint.")]
Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")]
Key = Annotated[str | None, typer.Option(help="What clients must send; without it, nothing.")]
Name = Annotated[str | None, typer.Option(help="The model's name; else its folder's.")]
Rounding = Annotated[Numerics | None, typer.Option(help="Where to round; else as it is stored.")]
Device = Annotated[str, typer.Option(help="Where to run, such as cpu or cuda.")]
Prefill = Annotated[PrefillMode, typer.Option(help="How much of the decoder a prompt needs.")]
Engram = Annotated[EngramPlacement, typer.Option(help="Where the Engram tables are.")]
Deterministic = Annotated[
    bool, typer.Option("--deterministic", help="Answers that no neighbour changes; slower.")
]
Speculation = Annotated[bool, typer.Option(help="Draft tokens, where the checkpoint can.")]
Profile = Annotated[
    Path | None, typer.Option(help="Of 'dspark profile'; else the one beside the checkpoint.")
]
Calibration = Annotated[Path | None, typer.Option(help="Likewise, of 'dspark calibrate'.")]
Graphs = Annotated[bool, typer.Option(help="On a GPU, replay steps from CUDA graphs.")]
Pages = Annotated[int, typer.Option(help=f"Pages of the cache, for {CACHE.page_size} tokens each.")]
CacheFolder = Annotated[Path | None, typer.Option(help="Keep prefixes here across restarts.")]
Concurrency = Annotated[int, typer.Option(help="Sequences that are computed at once.")]
Queue = Annotated[int, typer.Option(help="Sequences that may wait for that.")]
PromptTokens = Annotated[int | None, typer.Option(help="Longest prompt; else what fits.")]
OutputTokens = Annotated[int | None, typer.Option(help="Longest answer; else what fits.")]
Choices = Annotated[int, typer.Option(help="Prompts times n of one request.")]
Messages = Annotated[int, typer.Option(help="Messages of one chat.")]
Images = Annotated[int, typer.Option(help="Images of one chat.")]
Remote = Annotated[
    bool, typer.Option("--allow-remote-images", help="Fetch images from https URLs.")
]
Body = Annotated[int, typer.Option(help="Largest body of a request, in MiB.")]
RequestSeconds = Annotated[float, typer.Option(help="Longest time of an answer.")]
DrainSeconds = Annotated[float, typer.Option(help="Time to finish answers after a signal.")]


def serve(
    checkpoint: Checkpoint,
    *,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    api_key: Key = None,
    name: Name = None,
    numerics: Rounding = None,
    device: Device = "cpu",
    prefill: Prefill = PrefillMode.EXACT,
    engram: Engram = "resident",
    deterministic: Deterministic = False,
    speculation: Speculation = True,
    cuda_graphs: Graphs = True,
    dspark_profile: Profile = None,
    dspark_calibration: Calibration = None,
    pages: Pages = CACHE.num_pages,
    cache_folder: CacheFolder = None,
    max_concurrency: Concurrency = CACHE.max_requests,
    max_queue: Queue = LIMITS.max_queue,
    max_prompt_tokens: PromptTokens = None,
    max_output_tokens: OutputTokens = None,
    max_choices: Choices = LIMITS.max_choices,
    max_messages: Messages = LIMITS.max_messages,
    max_images: Images = LIMITS.max_images,
    allow_remote_images: Remote = False,
    max_body_mib: Body = LIMITS.max_body_bytes >> 20,
    request_seconds: RequestSeconds = LIMITS.request_seconds,
    drain_seconds: DrainSeconds = LIMITS.drain_seconds,
) -> None:
    """Serve a checkpoint until SIGTERM or Ctrl-C; running answers are finished first."""
    _prepare()
    limits = Limits(
        max_prompt_tokens=max_prompt_tokens,
        max_output_tokens=max_output_tokens,
        max_choices=max_choices,
        max_messages=max_messages,
        max_images=max_images,
        max_concurrency=max_concurrency,
        max_queue=max_queue,
        max_body_bytes=max_body_mib << 20,
        request_seconds=request_seconds,
        drain_seconds=drain_seconds,
    )
    config = EngineConfig(
        cache=CacheConfig(num_pages=pages, max_requests=max_concurrency),
        prefill=prefill,
        engram=engram,
        deterministic=deterministic,
        disk_folder=cache_folder,
        speculation=SpeculationConfig() if speculation else None,
        cuda_graphs=cuda_graphs,
    )
    rounding, place = None if numerics is None else numerics.value, resolve_device(device)
    with _bind(host, port) as sock:  # before minutes of loading
        engine = Engine.load(checkpoint, config=config, numerics=rounding, device=place)
        files = {"profile": dspark_profile, "calibration": dspark_calibration}
        schedule_verification(engine, checkpoint, **files)
        name = name or checkpoint.resolve().name
        _serve(engine, name, limits, sock, api_key=api_key, allow_remote=allow_remote_images)


def _bind(host: str, port: int) -> socket.socket:
    from openv41.server.run import bind  # noqa: PLC0415 -- an optional extra

    return bind(host, port)


def _serve(
    engine: Engine,
    name: str,
    limits: Limits,
    sock: socket.socket,
    *,
    api_key: str | None,
    allow_remote: bool,
) -> None:
    from openv41.server.app import make_service  # noqa: PLC0415 -- an optional extra
    from openv41.server.backend import ServedModel  # noqa: PLC0415
    from openv41.server.image_loader import ImageLoader  # noqa: PLC0415
    from openv41.server.remote import RemoteImages  # noqa: PLC0415
    from openv41.server.run import serve as serve_http  # noqa: PLC0415

    if engine.decode is not None:
        note("steps are captured as CUDA graphs")
        engine.capture_steps()
    freeze_heap()
    service = make_service(
        AsyncEngine(engine),
        ServedModel.of(engine, name),
        limits=limits,
        stats=engine.stats,
        images=ImageLoader(remote=RemoteImages() if allow_remote else None),
    )
    serve_http(
        service,
        sock,
        api_key=api_key,
        ready=lambda found: note(f"{name} is served at {found}/v1"),
    )


def _prepare() -> None:
    """Show what the log says; InputError where the extra is not installed."""
    missing = [package for package in EXTRA if importlib.util.find_spec(package) is None]
    if missing:
        raise InputError(
            f"openv41 serve needs {', '.join(missing)}, not installed here; "
            "run pip install 'openv41[serve]'"
        )
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
