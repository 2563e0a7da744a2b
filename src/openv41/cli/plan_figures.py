"""The figures of ``openv41 plan``. Report §2.2."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from openv41.config import ModelConfig
from openv41.errors import ConfigError
from openv41.io.hf_config import read_config, read_variant
from openv41.io.tensor_names import Variant, num_shards, tensor_table
from openv41.model.causal_encoder_decoder import CausalEncoderDecoder
from openv41.model.flops import active_parameters, cache_bytes, count_parameters, flops_per_token
from openv41.plan import plan_layers
from openv41.presets import NAMES, PRESETS


def find(model: str) -> tuple[ModelConfig, Variant]:
    """Configuration of a preset or of a checkpoint folder."""
    if model in PRESETS:
        return PRESETS[model](), "released"
    if not Path(model).exists():
        problem = f"{model!r} is neither a preset ({NAMES}) nor a checkpoint folder"
        raise ConfigError("plan", [problem])
    return read_config(Path(model)), read_variant(Path(model))


def describe(config: ModelConfig, variant: Variant, context: int) -> dict[str, Any]:
    """Every figure of a model, counted from its parameters and its checkpoint's table."""
    model = CausalEncoderDecoder(config, device="meta")
    components = count_parameters(model)
    vision, drafter = components.get("vision", 0), components.get("drafter", 0)
    tables = components.get("engram tables", 0)
    engram = tables + components.get("engram projections", 0)
    everything = sum(components.values())
    backbone = everything - engram - vision - drafter
    cache, window = cache_bytes(config), config.attention.window_size
    table = tensor_table(config, variant=variant)
    work = {
        phase: flops_per_token(model, context, prefill=phase == "prefill")
        for phase in ("prefill", "decode")
    }
    return {
        "layers": [asdict(p) for p in plan_layers(config)],
        "parameters_by_component": components,
        "parameters": {
            "backbone": backbone,
            "backbone_with_vision": backbone + vision,
            "engram_table_entries": tables,
            "all": everything,
        },
        "active_parameters_per_token": {
            "prefill": active_parameters(model, prefill=True),
            "decode": active_parameters(model, prefill=False),
        },
        "context": context,
        "flops_per_token": {
            phase: {**asdict(item), "total": item.total} for phase, item in work.items()
        },
        "cache_bytes": {
            "global_per_token": cache.global_per_token,
            "window_per_request": cache.window_per_request,
            "at_context": round(cache.global_per_token * context)
            + cache.window_per_request * min(window, context) // window,
        },
        "checkpoint": {
            "variant": variant,
            "tensors": len(table),
            "payload_bytes": sum(spec.num_bytes for spec in table),
            "shards": num_shards(config),
        },
    }
