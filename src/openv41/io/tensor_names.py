"""The released checkpoint, tensor by tensor: name, dtype, shape, shard, and our name for it.

This table is the only place where released tensor names stand. Report §2.1.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import Literal, NamedTuple

from openv41.config import DsparkConfig, EngramConfig, ModelConfig, VisionConfig
from openv41.layers.quantized_linear import WeightFormat
from openv41.ops.quantize import BLOCK
from openv41.plan import LayerPlan, plan_layers

Variant = Literal["released", "bfloat16", "float32"]
Part = Literal["weight", "scale", "plain"]
Kind = Literal["fp8", "fp4", "fp8_rows", "bf16", "f32"]

FORMATS: dict[Kind, WeightFormat] = {"fp8": "fp8", "fp4": "fp4", "fp8_rows": "fp8_rows"}
ITEM_BYTES = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1}


class TensorSpec(NamedTuple):
    """One tensor of a checkpoint file (a tuple: the released table has 96,085 of them).

    ``ours`` is the float parameter that it belongs to (a weight and its scale share it). ``expert``
    is the row of that parameter where experts are stacked. ``weight_format`` is None for tensors
    that are plain numbers in every variant.
    """

    released: str
    dtype: str
    shape: tuple[int, ...]
    ours: str
    expert: int | None
    part: Part
    weight_format: WeightFormat | None
    shard: int
    num_bytes: int  # payload in the file

    @property
    def stored_as(self) -> str:
        """Key in the state dict of a model that holds stored codes instead of floats."""
        if self.part == "plain":
            return self.ours
        return self.ours.removesuffix("weight") + ("codes" if self.part == "weight" else "scales")


class _Weight(NamedTuple):
    """A parameter before it is laid out for a variant."""

    name: str  # released, without ".weight" where the kind is quantised
    ours: str
    kind: Kind
    shape: tuple[int, ...]
    expert: int | None = None


@lru_cache(maxsize=8)
def tensor_table(config: ModelConfig, *, variant: Variant = "released") -> tuple[TensorSpec, ...]:
    """Every tensor of a checkpoint of this model, in file order.

    "bfloat16" and "float32" hold the same weights as plain numbers, without scales; what the
    release keeps in float32 stays float32 in both.
    """
    return tuple(
        spec
        for shard, weights in enumerate(_shards(config), start=1)
        for spec in _lay_out(weights, variant, shard)
    )


def num_shards(config: ModelConfig) -> int:
    """Number of files. Vision, drafter and Engram files exist only where the model has them."""
    return len(_shards(config))


def shard_name(shard: int, total: int) -> str:
    """File name of a shard, counted from 1."""
    return f"model-{shard:05d}-of-{total:05d}.safetensors"


def _shards(config: ModelConfig) -> list[list[_Weight]]:
    """Vision, embedding, one per layer, head, one per drafter stage, one per Engram table."""
    d, v = config.hidden_size, config.vocab_size
    shards = [list(_vision(config.vision, d))] if config.vision else []
    shards.append([_Weight("embed.weight", "embed.weight", "bf16", (v, d))])
    shards += [list(_layer(config, plan)) for plan in plan_layers(config)]
    head = _Weight("head.weight", "head.weight", "bf16", (v, d))
    shards.append([head, _Weight("norm.weight", "norm.weight", "bf16", (d,))])
    if config.dspark:
        stages = range(config.dspark.num_stages)
        shards += [list(_drafter_stage(config, config.dspark, s)) for s in stages]
    if config.engram:
        tables = zip(config.engram.layer_ids, config.engram.num_embeddings, strict=True)
        shards += [list(_engram(config, config.engram, layer, rows)) for layer, rows in tables]
    return shards


def _layer(config: ModelConfig, plan: LayerPlan) -> Iterator[_Weight]:
    released = ours = f"layers.{plan.layer}"
    yield from _block(config, released, ours, config.moe.num_experts)
    if plan.is_kv_source:
        yield from _compressor(config, released, ours, plan.ratio)
    if plan.is_index_source:
        yield from _indexer(config, released, ours, with_keys=plan.is_kv_source)


def _block(config: ModelConfig, name: str, ours: str, experts: int) -> Iterator[_Weight]:
    """What backbone layers and drafter stages share."""
    d, n = config.hidden_size, config.mhc.num_streams
    for site in ("attn", "ffn"):
        mhc, base = f"{ours}.{site}_mhc", f"{name}.hc_{site}"
        yield _Weight(f"{base}_fn", f"{mhc}.fn", "f32", (n * (n + 2), n * d))
        yield _Weight(f"{base}_base", f"{mhc}.base", "f32", (n * (n + 2),))
        yield _Weight(f"{base}_scale", f"{mhc}.scale", "f32", (3,))
        norm = f"{site}_norm.weight"
        yield _Weight(f"{name}.{norm}", f"{ours}.{norm}", "bf16", (d,))
    yield from _attention(config, f"{name}.attn", f"{ours}.attention")
    yield from _moe(config, f"{name}.ffn", f"{ours}.moe", experts)


def _attention(config: ModelConfig, name: str, ours: str) -> Iterator[_Weight]:
    a, d = config.attention, config.hidden_size
    shapes = {
        "wq_a": (a.q_rank, d),
        "wq_b": (a.num_heads * a.head_dim, a.q_rank),
        "wkv": (a.head_dim, d),
        "wo_a": (a.o_groups * a.o_rank, a.num_heads // a.o_groups * a.head_dim),
        "wo_b": (d, a.o_groups * a.o_rank),
    }
    for key, shape in shapes.items():
        yield _Weight(f"{name}.{key}", f"{ours}.{key}.weight", "fp8", shape)
    for key, width in (("q_norm", a.q_rank), ("kv_norm", a.head_dim)):
        yield _Weight(f"{name}.{key}.weight", f"{ours}.{key}.weight", "bf16", (width,))
    yield _Weight(f"{name}.attn_sink", f"{ours}.sink", "f32", (a.num_heads,))


def _compressor(config: ModelConfig, name: str, ours: str, ratio: int) -> Iterator[_Weight]:
    c, d = config.attention.head_dim, config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"wkv": (c, d), "norm": (c,)}
    if ratio > 1:
        shapes["wgate"] = (c, d)
    for key, shape in shapes.items():
        leaf = f"compressor.{key}.weight"
        yield _Weight(f"{name}.attn.{leaf}", f"{ours}.attention.{leaf}", "bf16", shape)


def _indexer(config: ModelConfig, name: str, ours: str, *, with_keys: bool) -> Iterator[_Weight]:
    x, a = config.indexer, config.attention
    name, ours = f"{name}.attn.indexer", f"{ours}.attention.indexer"
    queries = (x.num_heads * x.head_dim, a.q_rank)
    yield _Weight(f"{name}.wq_b", f"{ours}.wq_b.weight", "fp8", queries)
    shapes: dict[str, tuple[int, ...]] = {"weights_proj": (x.num_heads, config.hidden_size)}
    if with_keys:
        shapes |= {"wk": (x.head_dim, a.head_dim), "k_norm": (x.head_dim,)}
    for key, shape in shapes.items():
        yield _Weight(f"{name}.{key}.weight", f"{ours}.{key}.weight", "bf16", shape)


def _moe(config: ModelConfig, name: str, ours: str, experts: int) -> Iterator[_Weight]:
    d, f = config.hidden_size, config.moe.expert_dim
    yield _Weight(f"{name}.gate.weight", f"{ours}.gate.weight", "bf16", (experts, d))
    for key in ("bias", "bias_vl"):
        yield _Weight(f"{name}.gate.{key}", f"{ours}.gate.{key}", "f32", (experts,))
    shapes = {"w1": (f, d), "w2": (d, f), "w3": (f, d)}
    for key, shape in shapes.items():
        shared = f"{ours}.shared.{key}.weight"
        yield _Weight(f"{name}.shared_experts.{key}", shared, "fp8", shape)
    stacks = {key: f"{ours}.experts.{key}.weight" for key in shapes}
    for expert in range(experts):
        for key, shape in shapes.items():
            yield _Weight(f"{name}.experts.{expert}.{key}", stacks[key], "fp4", shape, expert)


def _engram(config: ModelConfig, engram: EngramConfig, layer: int, rows: int) -> Iterator[_Weight]:
    d, n, width = config.hidden_size, config.mhc.num_streams, engram.head_dim
    name = f"layers.{layer}.engram"
    yield _Weight(f"{name}.embed", f"{name}.table.weight", "fp8_rows", (rows, width))
    key_value = ((n + 1) * d, engram.num_lookups * width)
    yield _Weight(f"{name}.wkv", f"{name}.wkv.weight", "fp8", key_value)
    for key in ("q_weight", "k_weight"):
        yield _Weight(f"{name}.{key}", f"{name}.{key}", "bf16", (n, d))


def _drafter_stage(config: ModelConfig, dspark: DsparkConfig, stage: int) -> Iterator[_Weight]:
    d, rank, name = config.hidden_size, dspark.markov_rank, f"mtp.{stage}"
    yield from _block(config, name, f"drafter.stages.{stage}", dspark.num_experts)
    if stage == 0:
        taps = len(dspark.target_layer_ids) * d
        yield _Weight(f"{name}.main_proj", "drafter.main_proj.weight", "fp8", (d, taps))
        yield _Weight(f"{name}.main_norm.weight", "drafter.main_norm.weight", "bf16", (d,))
    if stage == dspark.num_stages - 1:
        yield _Weight(f"{name}.norm.weight", "drafter.norm.weight", "bf16", (d,))
        for key in ("embed", "head"):
            markov, ours = (config.vocab_size, rank), f"drafter.markov.{key}.weight"
            yield _Weight(f"{name}.markov_head.{key}.weight", ours, "bf16", markov)
        confidence = f"{name}.confidence_head.proj.weight"
        yield _Weight(confidence, "drafter.confidence.weight", "bf16", (1, d + rank))


def _vision(vision: VisionConfig, d: int) -> Iterator[_Weight]:
    h, f = vision.hidden_size, vision.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "vision.patch_embed.proj.weight": (h, 3 * vision.patch_size**2),
        "vision.patch_embed.proj.bias": (h,),
    }
    for i in range(vision.num_layers):
        block = f"vision.blocks.{i}"
        shapes |= {
            f"{block}.norm1.weight": (h,),
            f"{block}.attn.wqkv.weight": (3 * h, h),
            f"{block}.attn.wqkv.bias": (3 * h,),
            f"{block}.attn.wo.weight": (h, h),
            f"{block}.attn.wo.bias": (h,),
            f"{block}.norm2.weight": (h,),
            f"{block}.mlp.w1.weight": (2 * f, h),
            f"{block}.mlp.w2.weight": (h, f),
        }
    shapes |= {
        "vision.norm.weight": (h,),
        "aligner.w1.weight": (d, h * vision.downsample_ratio**2),
        "aligner.w1.bias": (d,),
        "aligner.w2.weight": (d, d),
        "aligner.w2.bias": (d,),
    }
    shapes |= {f"image_{mark}": (d,) for mark in ("start", "newline", "end")}
    for name, shape in shapes.items():
        yield _Weight(name, _vision_parameter(name), "bf16", shape)


def _vision_parameter(released: str) -> str:
    """Our name of a tensor of the image part."""
    for theirs, ours in (
        ("vision.patch_embed.proj.", "vision.encoder.patch_embed."),
        ("vision.", "vision.encoder."),
        ("aligner.", "vision.projector."),
    ):
        if released.startswith(theirs):
            return ours + released.removeprefix(theirs)
    return "vision." + released.removeprefix("image_")


def _lay_out(weights: Sequence[_Weight], variant: Variant, shard: int) -> Iterator[TensorSpec]:
    """Weights as they stand in a file: one tensor each, or quantised codes and their scales."""
    for name, ours, kind, shape, expert in weights:
        parts: list[tuple[str, str, tuple[int, ...], Part]]
        if kind not in FORMATS or variant != "released":
            dtype = "F32" if kind == "f32" or variant == "float32" else "BF16"
            parts = [(f"{name}.weight" if kind in FORMATS else name, dtype, shape, "plain")]
        else:
            rows, cols = shape
            codes = ("I8", (rows, cols // 2)) if kind == "fp4" else ("F8_E4M3", shape)
            # one scale per 32 columns, and per 32 rows too in "fp8"
            scale = (-(-rows // BLOCK) if kind == "fp8" else rows, -(-cols // BLOCK))
            parts = [
                (f"{name}.weight", *codes, "weight"),
                (f"{name}.scale", "F8_E8M0", scale, "scale"),
            ]
        for part_name, dtype, size, part in parts:
            num_bytes = prod(size) * ITEM_BYTES[dtype]
            yield TensorSpec(
                part_name, dtype, size, ours, expert, part, FORMATS.get(kind), shard, num_bytes
            )
