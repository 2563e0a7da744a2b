"""``openv41 dspark``: calibrate a drafter's confidences, and measure what verification costs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from openv41.cli.device import resolve_device
from openv41.cli.dspark_plots import draw_reliability
from openv41.cli.numerics import Numerics
from openv41.cli.ui import note, show_line
from openv41.engine.calibration import confidences
from openv41.engine.confidence_record import calibrate, record_confidences
from openv41.engine.cost_table import CostTable
from openv41.engine.dspark_files import (
    CALIBRATION_FILE,
    PROFILE_FILE,
    Surroundings,
    save_calibration,
    save_profile,
)
from openv41.engine.engine import Engine, EngineConfig
from openv41.engine.paged_store import CacheConfig
from openv41.engine.profile import measure_costs, tokens_needed
from openv41.engine.request import Request
from openv41.engine.sampler import SamplingConfig
from openv41.engine.scheduler import ScheduleConfig
from openv41.engine.verification_scheduler import survival
from openv41.errors import InputError
from openv41.io.hf_config import read_config
from openv41.io.tokenizer import load_tokenizer, read_pieces
from openv41.reliability import FINE_BINS, area_under_roc, binned

Checkpoint = Annotated[Path, typer.Argument(help="Folder of the checkpoint.", show_default=False)]
Rounding = Annotated[Numerics | None, typer.Option(help="Where to round; else as it is stored.")]
Device = Annotated[str, typer.Option(help="Where to run, such as cpu or cuda.")]


def calibrate_command(
    checkpoint: Checkpoint,
    *,
    text: Annotated[Path, typer.Option(help="Held-out text, whose parts are prompts.")],
    prompts: Annotated[int, typer.Option(min=1, help="Prompts, spread over the text.")] = 64,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 64,
    max_tokens: Annotated[int, typer.Option(min=8, help="Tokens of each answer.")] = 64,
    out: Annotated[
        Path | None, typer.Option(help="File to write; else beside the checkpoint.")
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="Reliability diagram to draw, PNG.")] = None,
    numerics: Rounding = None,
    device: Device = "cpu",
) -> None:
    """Fit the temperatures of the confidences on answers to held-out prompts."""
    texts = held_out_prompts(checkpoint, text, prompts, prompt_tokens)
    tokens = 1 + prompt_tokens + max_tokens
    engine = drafting_engine(checkpoint, prompts, tokens, numerics, device)
    logits, accepted = record_confidences(engine, answers_of(texts, max_tokens))
    found = calibrate(logits, accepted)
    path = out or checkpoint / CALIBRATION_FILE
    save_calibration(path, found, Surroundings.of(engine.model))
    temperatures = np.array(found.temperatures)
    fitted = survival(confidences(logits, temperatures))
    for place, temperature in enumerate(temperatures.tolist()):
        bins = binned(fitted[:, place], accepted > place, bins=FINE_BINS)
        area = area_under_roc(bins)
        show_line(
            f"draft {place + 1}: temperature {temperature:.2f}, calibration error "
            f"{found.error_before[place]:.1%} before, {found.error_after[place]:.1%} after, "
            f"accepted with all before it {float((accepted > place).mean()):.1%}, "
            f"AUROC {'unknown' if area is None else f'{area:.2f}'}"
        )
    show_line(f"{len(accepted)} rounds, mean accepted length {1 + accepted.mean():.2f}; {path}")
    if picture is not None:
        draw_reliability(logits, accepted, temperatures, picture)
        show_line(str(picture))


def profile_command(
    checkpoint: Checkpoint,
    *,
    most: Annotated[int, typer.Option(min=1, help="Most requests at once, as served.")] = 64,
    context: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 128,
    out: Annotated[
        Path | None, typer.Option(help="File to write; else beside the checkpoint.")
    ] = None,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="As openv41 serve --deterministic runs.")
    ] = False,
    numerics: Rounding = None,
    device: Device = "cpu",
) -> None:
    """Time steps of this machine with and without drafts; the scheduler plans by them."""
    dspark = read_config(checkpoint).dspark
    tokens = context + (0 if dspark is None else tokens_needed(dspark.block_size))
    engine = drafting_engine(
        checkpoint, most, tokens, numerics, device, deterministic=deterministic
    )
    loads = sorted({most, *(1 << power for power in range(most.bit_length()))})
    costs = measure_costs(engine, loads, context=context, told=_tell)
    path = out or checkpoint / PROFILE_FILE
    where = Surroundings.of(engine.model, graphs=engine.decode is not None)
    save_profile(path, costs, where)
    show_line(_as_text(costs))
    show_line(str(path))


def _tell(load: int, plain: float, drafted: float) -> None:
    note(f"{load} requests: {plain * 1e3:.1f} ms without drafts, {drafted * 1e3:.1f} ms with all")


def _as_text(costs: CostTable) -> str:
    head = "requests  ms: plain  " + "  ".join(f"{n} drafts" for n in range(costs.num_drafts + 1))
    rows = [
        f"{requests:8d}  {plain * 1e3:9.2f}  " + "  ".join(f"{s * 1e3:8.2f}" for s in verify)
        for requests, plain, verify in zip(costs.requests, costs.plain, costs.verify, strict=True)
    ]
    return "\n".join([head, *rows])


def drafting_engine(
    checkpoint: Path,
    requests: int,
    tokens: int,
    numerics: Numerics | None,
    device: str,
    *,
    deterministic: bool = False,
) -> Engine:
    """An engine that drafts, with room for ``requests`` of ``tokens`` each, prompt and answer.

    Raises InputError for a checkpoint without a drafter, or tokens beyond its positions.
    """
    if read_config(checkpoint).dspark is None:
        raise InputError(f"{checkpoint}: the checkpoint has no drafter; train one first")
    return answering_engine(
        checkpoint, requests, tokens, numerics, device, deterministic=deterministic
    )


def answering_engine(
    checkpoint: Path,
    requests: int,
    tokens: int,
    numerics: Numerics | None,
    device: str,
    *,
    deterministic: bool = False,
) -> Engine:
    """An engine with that room, which drafts if the checkpoint has a drafter."""
    config = read_config(checkpoint)
    if tokens > config.max_position:
        raise InputError(
            f"prompts and answers would take {tokens} positions, the model has "
            f"{config.max_position}; use shorter ones"
        )
    pages = requests * (-(-(tokens + 8) // CacheConfig().page_size) + 1)
    rounding = None if numerics is None else numerics.value
    return Engine.load(
        checkpoint,
        config=EngineConfig(
            cache=CacheConfig(num_pages=pages, max_requests=requests),
            schedule=ScheduleConfig(tokens_per_step=max(512, 8 * requests)),
            prefix_cache=False,
            deterministic=deterministic,
        ),
        numerics=rounding,
        device=resolve_device(device),
    )


def held_out_prompts(
    checkpoint: Path, text: Path, count: int, length: int
) -> list[tuple[int, ...]]:
    """BOS and ``length`` tokens from evenly spread places of a text."""
    ids = load_tokenizer(checkpoint).encode("".join(read_pieces(text)))
    if len(ids) < length + count:
        raise InputError(
            f"{text}: {len(ids)} tokens are too few for {count} prompts of {length}; give more text"
        )
    bos = read_config(checkpoint).bos_token_id
    starts = np.linspace(0, len(ids) - length, count).astype(int).tolist()
    return [(bos, *ids[start : start + length]) for start in starts]


def answers_of(
    prompts: Sequence[tuple[int, ...]],
    max_tokens: int,
    *,
    temperature: float = 1.0,
    ignore_eos: bool = True,
) -> list[Request]:
    """Requests for answers, of full length unless EOS ends them."""
    return [
        Request(
            prompt=ids,
            max_tokens=max_tokens,
            sampling=SamplingConfig(temperature=temperature, seed=seed),
            ignore_eos=ignore_eos,
        )
        for seed, ids in enumerate(prompts)
    ]
