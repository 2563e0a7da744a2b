"""``openv41 plan``: what a model's layers are, and what it costs. Report §2.2, §2.3.1."""

from typing import Annotated, Any

import typer

from openv41.cli.ui import show_json, show_line, show_table
from openv41.errors import InputError
from openv41.plan import LayerPlan, plan_layers
from openv41.presets import NAMES

DEFAULT_CONTEXT = 65536  # the released training length
LAYER_COLUMNS = ("layer", "mode", "ratio", "kv source", "index source", "candidates", "extras")


def plan(
    model: Annotated[
        str, typer.Argument(metavar="PRESET|CHECKPOINT", help=f"One of {NAMES}, or a folder.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    context: Annotated[
        int | None,
        typer.Option(help=f"Tokens of context [{DEFAULT_CONTEXT}, or less where the model ends]."),
    ] = None,
) -> None:
    """Print the layer plan, parameters, work per token, cache and checkpoint size."""
    from openv41.cli.plan_figures import describe, find  # noqa: PLC0415 -- help needs no torch

    config, variant = find(model)
    length = min(DEFAULT_CONTEXT, config.max_position) if context is None else context
    if not 1 <= length <= config.max_position:
        raise InputError(
            f"--context is {length}, must be 1 to {config.max_position}, the model's max_position"
        )
    figures = describe(config, variant, length)
    if as_json:
        show_json({"model": model, **figures})
        return
    show_table(LAYER_COLUMNS, [_layer_row(p) for p in plan_layers(config)], title=model)
    for title, rows in _tables(figures):
        show_line("")
        show_table((title, ""), rows)


def _layer_row(layer: LayerPlan) -> tuple[object, ...]:
    if layer.publishes_candidates:
        candidates = "publishes"
    else:
        candidates = f"from {layer.kv_source}" if layer.uses_candidates else "-"
    extras = [name for name, has in (("Engram", layer.has_engram), ("tap", layer.is_tap)) if has]
    return (
        layer.layer,
        layer.mode,
        layer.ratio or "-",
        layer.kv_source if layer.ratio else "-",
        layer.index_source if layer.ratio else "-",
        candidates,
        ", ".join(extras) or "-",
    )


def _tables(figures: dict[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Title and rows of each table below the layers."""
    parameters, active = figures["parameters"], figures["active_parameters_per_token"]
    cache, checkpoint = figures["cache_bytes"], figures["checkpoint"]
    per_token, window = cache["global_per_token"], cache["window_per_request"]
    components = figures["parameters_by_component"].items()
    totals = [
        ("backbone with vision", _amount(parameters["backbone_with_vision"])),
        ("backbone without vision", _amount(parameters["backbone"])),
        ("Engram table entries", _amount(parameters["engram_table_entries"])),
        ("all tensors", _amount(parameters["all"])),
        ("active per token, prefill", _amount(active["prefill"])),
        ("active per token, decode", _amount(active["decode"])),
    ]
    work = [
        (f"{phase}, {part}", _amount(count))
        for phase, parts in figures["flops_per_token"].items()
        for part, count in parts.items()
    ]
    return [
        ("parameters", [(name, _amount(count)) for name, count in components]),
        ("in total", totals),
        (f"FLOPs per token at a context of {figures['context']:,}", work),
        (
            "cache bytes",
            [
                ("global, per token", f"{per_token:,.1f}".removesuffix(".0")),
                ("window, per request", f"{window:,}"),
                (f"at a context of {figures['context']:,}", f"{cache['at_context']:,}"),
            ],
        ),
        (
            f"checkpoint, {checkpoint['variant']}",
            [
                ("tensors", f"{checkpoint['tensors']:,}"),
                ("payload bytes", f"{checkpoint['payload_bytes']:,}"),
                ("files by the naming rule", f"{checkpoint['shards']:,}"),
            ],
        ),
    ]


def _amount(count: int) -> str:
    """A count to two decimals of its unit: 552.05 B."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:,.2f} {unit}"
    return str(count)
