"""The layer plan: what each layer is, and whose state it reads. Report §2.2, §2.3.1.

A Full layer (kv source) compresses its input into main KV and index keys; a Reindex layer scores
the latest source's keys with queries of its own; a Reuse layer takes the latest selection.
"""

from dataclasses import dataclass
from enum import StrEnum

from openv41.config import ModelConfig


class Mode(StrEnum):
    """How a layer gets its global context."""

    WINDOW = "window"
    FULL = "full"
    REINDEX = "reindex"
    REUSE = "reuse"


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPlan:
    """One layer. Sources are layer ids, -1 where the layer has no global context."""

    layer: int
    mode: Mode
    ratio: int  # tokens per main-KV entry, 0 without main KV
    kv_source: int
    index_source: int
    publishes_candidates: bool
    uses_candidates: bool
    has_engram: bool
    is_tap: bool  # its entry is an input of the drafter

    @property
    def is_kv_source(self) -> bool:
        """Whether the layer computes main KV and index keys."""
        return self.mode is Mode.FULL

    @property
    def is_index_source(self) -> bool:
        """Whether the layer selects entries itself."""
        return self.mode in (Mode.FULL, Mode.REINDEX)


def plan_layers(config: ModelConfig) -> tuple[LayerPlan, ...]:
    """Plan every layer of the backbone."""
    return tuple(_plan_layer(config, layer) for layer in range(config.num_layers))


def _plan_layer(config: ModelConfig, layer: int) -> LayerPlan:
    ratio = config.compress_ratios[layer]
    has_global = ratio > 0
    candidate = config.indexer.candidate_source
    mode = _mode(config, layer)
    kv_source = max(s for s in config.kv_sources if s <= layer) if has_global else -1
    return LayerPlan(
        layer=layer,
        mode=mode,
        ratio=ratio,
        kv_source=kv_source,
        index_source=max(s for s in config.index_sources if s <= layer) if has_global else -1,
        publishes_candidates=has_global and layer == candidate,
        uses_candidates=mode is Mode.REINDEX and kv_source == candidate,
        has_engram=config.engram is not None and layer in config.engram.layer_ids,
        is_tap=config.dspark is not None and layer in config.dspark.target_layer_ids,
    )


def _mode(config: ModelConfig, layer: int) -> Mode:
    if config.compress_ratios[layer] == 0:
        return Mode.WINDOW
    if layer in config.kv_sources:
        return Mode.FULL
    return Mode.REINDEX if layer in config.index_sources else Mode.REUSE
