"""What a model costs: parameters, floating-point operations and cache bytes. Report §2.1, §2.2.

Parameters are counted from a built model (the meta device will do). "Prefill" is what every prompt
token but the last few needs: the encoder, and the projections of the decoder's kv source.
"""

from dataclasses import dataclass
from math import prod

from torch import nn

from openv41.config import ModelConfig
from openv41.layers.quantized_linear import QuantizedWeight
from openv41.model.cache_formats import packed_bytes
from openv41.model.causal_encoder_decoder import CausalEncoderDecoder
from openv41.model.prefill import PromptRows, find_cut
from openv41.plan import LayerPlan, plan_layers

# The first fragment that a parameter's name contains decides where it counts.
COMPONENTS = {
    "vision.": "vision",
    "drafter.": "drafter",
    "embed.": "embedding",
    "head.": "head",
    ".engram.table": "engram tables",
    ".engram.": "engram projections",
    "_mhc.": "hyper-connections",
    ".attention.compressor.": "compressors",
    ".attention.indexer.": "indexers",
    ".attention.": "attention",
    ".moe.experts.": "routed experts",
    ".moe.shared.": "shared experts",
    ".moe.gate.": "routers",
    "norm.": "norms",
}
# What a layer computes for prompt tokens that end there, see find_cut.
KV_SOURCE_PARTS = (
    "attn_norm.",
    "attention.wkv.",
    "attention.kv_norm.",
    "attention.compressor.",
    "attention.indexer.wk.",
    "attention.indexer.k_norm.",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Floating-point operations for one token; a multiply and an add count as two."""

    matrices: int  # products with weights, the head included where it runs
    attention: int  # scores and values over the window and the selected entries
    indexer: int  # scores of index sources
    streams: int  # collapsing and updating the residual streams

    @property
    def total(self) -> int:
        """All of it."""
        return self.matrices + self.attention + self.indexer + self.streams


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheBytes:
    """Bytes of the caches in their stored FP4 and FP8 forms. Report §2.4.4."""

    global_per_token: float  # main KV and index keys of all kv sources
    window_per_request: int  # window KV of all layers, once the window is full


def parameter_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shape of every weight by the name of its float parameter, also where codes are stored."""
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    for name, module in model.named_modules():
        if isinstance(module, QuantizedWeight) and module.is_stored:
            *rows, columns = module.codes.shape
            packed = 2 if module.weight_format == "fp4" else 1
            shapes[f"{name}.weight"] = (*rows, columns * packed)
    return shapes


def count_parameters(model: CausalEncoderDecoder) -> dict[str, int]:
    """Parameters by component, in the order of COMPONENTS."""
    counts = dict.fromkeys(COMPONENTS.values(), 0)
    for name, shape in parameter_shapes(model).items():
        counts[component_of(name)] += prod(shape)
    return {component: count for component, count in counts.items() if count}


def component_of(name: str) -> str:
    """Component that a parameter of ours belongs to."""
    for fragment, component in COMPONENTS.items():
        if fragment in name:
            return component
    raise AssertionError(f"no component for parameter {name}")


def active_parameters(model: CausalEncoderDecoder, *, prefill: bool) -> int:
    """Parameters that work on one token: no embedding, no table, the chosen experts alone."""
    return sum(map(prod, active_shapes(model, prefill=prefill).values()))


def flops_per_token(model: CausalEncoderDecoder, context: int, *, prefill: bool) -> Work:
    """Operations for the last token of a context of this length."""
    config = model.config
    shapes = active_shapes(model, prefill=prefill).values()
    plans = plan_layers(config)[: find_cut(config)[0] if prefill else None]
    contexts = range(context, context + 1)
    return Work(
        matrices=2 * sum(prod(shape) for shape in shapes if len(shape) > 1),
        attention=sum(attention_flops(config, plan, contexts) for plan in plans),
        indexer=sum(indexer_flops(config, plan, contexts) for plan in plans),
        streams=len(plans) * stream_flops(config),
    )


def prompt_flops(model: CausalEncoderDecoder, rows: PromptRows, length: int) -> int:
    """Operations of a whole prefill in which each layer computes its ``rows``.

    A row that ends at a layer leaves its KV there; the head runs for the last row.
    """
    config, total, entering = model.config, 2 * prod(model.head.weight.shape), rows.start
    weights, kv_weights = ([0] * config.num_layers for _ in range(2))
    for name, shape in active_shapes(model).items():
        if name.startswith("layers.") and len(shape) > 1:
            _, layer, rest = name.split(".", 2)
            weights[int(layer)] += prod(shape)
            kv_weights[int(layer)] += prod(shape) if rest.startswith(KV_SOURCE_PARTS) else 0
    for plan, first in zip(plan_layers(config), rows.firsts, strict=True):
        computed = range(first + 1, length + 1)  # the contexts of these rows
        total += 2 * weights[plan.layer] * len(computed)
        total += 2 * kv_weights[plan.layer] * (first - entering)
        total += stream_flops(config) * len(computed)
        total += attention_flops(config, plan, computed) + indexer_flops(config, plan, computed)
        entering = first
    return total


def cache_bytes(config: ModelConfig) -> CacheBytes:
    """Cache bytes of the stored forms: FP4 main KV and index keys, FP8 window KV."""
    entry = packed_bytes(config, "main") + packed_bytes(config, "index")
    return CacheBytes(
        global_per_token=sum(entry / config.compress_ratios[s] for s in config.kv_sources),
        window_per_request=packed_bytes(config, "window")
        * config.attention.window_size
        * config.num_layers,
    )


def active_shapes(
    model: CausalEncoderDecoder, *, prefill: bool = False
) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights that one token meets, stacks of experts cut to the chosen ones."""
    cut, active = find_cut(model.config)[0], {}
    for name, shape in parameter_shapes(model).items():
        component = component_of(name)
        skipped = component in ("embedding", "engram tables", "vision", "drafter")
        if not skipped and (not prefill or _runs_in_prefill(name, cut)):
            is_stack = component == "routed experts"
            active[name] = (model.config.moe.top_k, *shape[1:]) if is_stack else shape
    return active


def _runs_in_prefill(name: str, cut: int | None) -> bool:
    if not name.startswith("layers."):
        return False  # final norm and head: last token only
    _, layer, rest = name.split(".", 2)
    is_below = cut is None or int(layer) < cut
    return is_below or (int(layer) == cut and rest.startswith(KV_SOURCE_PARTS))


def attention_flops(config: ModelConfig, plan: LayerPlan, contexts: range) -> int:
    """Scores and values of a layer for tokens of consecutive contexts."""
    attention = config.attention
    entries = _entries(contexts, 1, attention.window_size)
    if plan.ratio:
        entries += _entries(contexts, plan.ratio, config.indexer.top_k)
    return 4 * attention.num_heads * attention.head_dim * entries


def indexer_flops(config: ModelConfig, plan: LayerPlan, contexts: range) -> int:
    """Scores of a layer's indexer for tokens of consecutive contexts."""
    if not plan.is_index_source:
        return 0
    indexer = config.indexer
    most = indexer.pool_size if plan.uses_candidates else contexts.stop
    scored = _entries(contexts, plan.ratio, most)
    return 2 * indexer.num_heads * (indexer.head_dim + 1) * scored


def stream_flops(config: ModelConfig) -> int:
    """Two sites per layer, each N D to collapse and (N + 1) N D to update, times two."""
    num = config.mhc.num_streams
    return 2 * 2 * config.hidden_size * num * (num + 2)


def _entries(contexts: range, ratio: int, most: int) -> int:
    """Sum over the contexts of their entries of ``ratio`` tokens, at most ``most`` of each."""
    return _below(contexts.stop, ratio, most) - _below(contexts.start, ratio, most)


def _below(stop: int, ratio: int, most: int) -> int:
    """Sum of min(most, context // ratio) over all contexts below ``stop``."""
    growing = min(stop, most * ratio)  # below it every context holds fewer than most
    whole, rest = divmod(growing, ratio)
    return ratio * whole * (whole - 1) // 2 + rest * whole + (stop - growing) * most
