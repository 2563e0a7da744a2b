"""Configuration: one frozen dataclass per component. Report §2.1.

Every class checks itself and reports all of its problems in one ConfigError. Released names of the
keys live in io/hf_config.py; ready-made sizes in presets.py.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from openv41.errors import ConfigError

Rounding = Literal["off", "fake", "exact"]
MAX_TABLE_SIZE = 2**31  # primes above it take long to find
ROUNDINGS: tuple[Rounding, ...] = ("off", "fake", "exact")


def _below(component: object, minimum: int, names: Iterable[str]) -> list[str]:
    """Say which of the named fields are smaller than ``minimum`` (NaN counts as smaller)."""
    values = {name: getattr(component, name) for name in names}
    return [
        f"{n} is {v}, must be at least {minimum}" for n, v in values.items() if not v >= minimum
    ]


def _not_positive(component: object, names: Iterable[str]) -> list[str]:
    values = {name: getattr(component, name) for name in names}
    return [f"{n} is {v}, must be above 0" for n, v in values.items() if not v > 0]


def _ascend(name: str, ids: tuple[int, ...]) -> list[str]:
    if list(ids) == sorted(set(ids)):
        return []
    return [f"{name} is {ids}, must ascend without repeats"]


def _raise_if(where: str, problems: list[str]) -> None:
    if problems:
        raise ConfigError(where, problems)


@dataclass(frozen=True, kw_only=True, slots=True)
class YarnConfig:
    """Context extension of the compressed layers' rotary frequencies."""

    factor: float = 16.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    original_max_position: int = 65536

    def __post_init__(self) -> None:
        problems = _below(self, 1, ("factor", "original_max_position"))
        if not self.beta_fast > self.beta_slow > 0:
            problems.append(
                f"beta_fast ({self.beta_fast}) must be above beta_slow ({self.beta_slow}), "
                "and both above 0"
            )
        _raise_if("yarn", problems)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionConfig:
    """Latent attention with one KV head, a sink and a sliding window. Report §2.3."""

    num_heads: int
    head_dim: int
    rope_dim: int
    q_rank: int
    o_rank: int
    o_groups: int
    window_size: int
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    yarn: YarnConfig = field(default_factory=YarnConfig)

    def __post_init__(self) -> None:
        counts = ("num_heads", "head_dim", "rope_dim", "q_rank", "o_rank", "o_groups")
        problems = _below(self, 1, (*counts, "window_size", "rope_theta", "compress_rope_theta"))
        if problems:
            raise ConfigError("attention", problems)
        if self.rope_dim % 2 or self.rope_dim > self.head_dim:
            problems.append(
                f"rope_dim is {self.rope_dim}, must be even and at most head_dim ({self.head_dim})"
            )
        if self.num_heads % self.o_groups:
            problems.append(f"o_groups ({self.o_groups}) must divide num_heads ({self.num_heads})")
        _raise_if("attention", problems)


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexerConfig:
    """Hierarchical sparse indexer. Report §2.3.2."""

    num_heads: int
    head_dim: int
    top_k: int
    candidate_source: int
    candidate_blocks: int
    block_size: int

    def __post_init__(self) -> None:
        counts = ("num_heads", "head_dim", "top_k", "candidate_blocks", "block_size")
        problems = _below(self, 1, counts) + _below(self, 0, ("candidate_source",))
        if self.head_dim % 2:
            problems.append(f"head_dim is {self.head_dim}, must be even: keys pack two per byte")
        _raise_if("indexer", problems)

    @property
    def pool_size(self) -> int:
        """Most candidates that a Reindex layer scores per query (16,384 as released)."""
        return self.candidate_blocks * self.block_size


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeConfig:
    """Mixture of experts with a text and an image routing bias. Report §2.1.1."""

    num_experts: int
    top_k: int
    expert_dim: int
    num_shared: int = 1
    route_scale: float = 1.5
    norm_top_k_prob: bool = True
    swiglu_limit: float = 10.0
    gate_temperature: float = 1.0

    def __post_init__(self) -> None:
        problems = _below(self, 1, ("num_experts", "top_k", "expert_dim"))
        if self.top_k > self.num_experts:
            problems.append(f"top_k is {self.top_k}, above num_experts ({self.num_experts})")
        if self.num_shared != 1:
            problems.append(f"num_shared is {self.num_shared}, only 1 is supported")
        if self.expert_dim % 2:
            problems.append(
                f"expert_dim is {self.expert_dim}, must be even: expert weights pack two per byte"
            )
        problems += _not_positive(self, ("route_scale", "swiglu_limit", "gate_temperature"))
        _raise_if("moe", problems)


@dataclass(frozen=True, kw_only=True, slots=True)
class MhcConfig:
    """Single-Pass manifold-constrained hyper-connections. Report §2.4.1."""

    num_streams: int = 4
    sinkhorn_steps: int = 20
    eps: float = 1e-6

    def __post_init__(self) -> None:
        problems = _below(self, 1, ("num_streams", "sinkhorn_steps"))
        problems += _not_positive(self, ("eps",))
        _raise_if("mhc", problems)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngramConfig:
    """Hashed n-gram memory. Report §2.4.2."""

    layer_ids: tuple[int, ...]
    num_embeddings: tuple[int, ...]  # table rows per layer of layer_ids: the sum of its primes
    max_ngram: int = 4
    table_size: int = 16_000_000  # primes are taken from above table_size - 1
    num_heads: int = 8
    head_dim: int = 256
    pad_token_id: int = 2
    compressed_vocab_size: int = 99092

    def __post_init__(self) -> None:
        counts = ("num_heads", "head_dim", "compressed_vocab_size")
        problems = _below(self, 1, counts) + _below(self, 2, ("max_ngram", "table_size"))
        problems += _below(self, 0, ("pad_token_id",))
        if len(self.layer_ids) != len(self.num_embeddings):
            problems.append(
                f"num_embeddings has {len(self.num_embeddings)} entries for "
                f"{len(self.layer_ids)} layer_ids; give one per layer"
            )
        if self.table_size > MAX_TABLE_SIZE:
            problems.append(f"table_size is {self.table_size}, must be at most {MAX_TABLE_SIZE}")
        if not self.layer_ids:
            problems.append("layer_ids is empty; leave the Engram out instead")
        if wrong := [i for i in self.layer_ids if i < 0]:
            problems.append(f"layer_ids holds {wrong}, layers count from 0")
        if wrong := [n for n in self.num_embeddings if n < 1]:
            problems.append(f"num_embeddings holds {wrong}, must be at least 1")
        problems += _ascend("layer_ids", self.layer_ids)
        _raise_if("engram", problems)

    @property
    def num_orders(self) -> int:
        """N-gram orders 2..max_ngram."""
        return self.max_ngram - 1

    @property
    def num_lookups(self) -> int:
        """Table rows read per token and layer (24 as released)."""
        return self.num_orders * self.num_heads


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionConfig:
    """Vision encoder and image budget. Report §2.1.1."""

    num_layers: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    patch_size: int = 14
    rope_theta: float = 10000.0
    downsample_ratio: int = 3
    max_image_tokens: int = 1024
    min_pixels: int = 295936
    max_wh_ratio: float | None = None

    def __post_init__(self) -> None:
        counts = ("num_layers", "hidden_size", "num_heads", "intermediate_size", "patch_size")
        problems = _below(self, 1, (*counts, "downsample_ratio", "min_pixels"))
        problems += _below(self, 4, ("max_image_tokens",))  # start, cell, newline, end
        problems += _not_positive(self, ("rope_theta",))
        if self.max_wh_ratio is not None:
            problems += _not_positive(self, ("max_wh_ratio",))
        if not problems and self.hidden_size % (4 * self.num_heads):
            problems.append(
                f"hidden_size is {self.hidden_size}, must be a multiple of 4 x num_heads "
                f"({self.num_heads}): a head rotates pairs for height and for width"
            )
        _raise_if("vision", problems)


@dataclass(frozen=True, kw_only=True, slots=True)
class DsparkConfig:
    """Speculative drafter. Report §2.4.3."""

    num_stages: int
    block_size: int
    noise_token_id: int
    target_layer_ids: tuple[int, ...]
    markov_rank: int
    num_experts: int
    top_k: int

    def __post_init__(self) -> None:
        counts = ("num_stages", "block_size", "markov_rank", "num_experts", "top_k")
        problems = _below(self, 1, counts)
        if self.top_k > self.num_experts:
            problems.append(f"top_k is {self.top_k}, above num_experts ({self.num_experts})")
        if not self.target_layer_ids:
            problems.append("target_layer_ids is empty; the drafter needs at least one layer")
        problems += _ascend("target_layer_ids", self.target_layer_ids)
        _raise_if("dspark", problems)

    def moe(self, backbone: MoeConfig) -> MoeConfig:
        """The drafter's experts: like the backbone's, but for their number and the choice."""
        return replace(backbone, num_experts=self.num_experts, top_k=self.top_k)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The whole model. ``vision`` and ``dspark`` are None where a model has no such part."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    max_position: int
    compress_ratios: tuple[int, ...]  # per layer: main-KV entries span 0 (none), 1 or 2 tokens
    kv_sources: tuple[int, ...]
    index_sources: tuple[int, ...]
    attention: AttentionConfig
    indexer: IndexerConfig
    moe: MoeConfig
    mhc: MhcConfig = field(default_factory=MhcConfig)
    engram: EngramConfig | None = None
    vision: VisionConfig | None = None
    dspark: DsparkConfig | None = None
    norm_eps: float = 1e-20
    bos_token_id: int = 0
    eos_token_id: int = 1
    pad_token_id: int = 2
    image_token_id: int = 129264

    def __post_init__(self) -> None:
        problems = _below(self, 1, ("vocab_size", "hidden_size", "num_layers", "max_position"))
        _raise_if("model", problems)
        problems += self._layout_problems() + self._token_problems() + self._reach_problems()
        problems += _not_positive(self, ("norm_eps",))
        if self.hidden_size % 2:
            problems.append(
                f"hidden_size is {self.hidden_size}, must be even: expert weights pack two per byte"
            )
        if self.attention.rope_dim > self.indexer.head_dim:
            problems.append(
                f"attention.rope_dim is {self.attention.rope_dim}, must be at most "
                f"indexer.head_dim ({self.indexer.head_dim})"
            )
        _raise_if("model", problems)

    def _layout_problems(self) -> list[str]:
        problems = []
        ratios = self.compress_ratios
        if len(ratios) != self.num_layers:
            problems.append(
                f"compress_ratios has {len(ratios)} entries, must have num_layers "
                f"({self.num_layers})"
            )
        if wrong := sorted({r for r in ratios if r not in (0, 1, 2)}):
            problems.append(f"compress_ratios holds {wrong}, only 0, 1 and 2 are supported")
        for name in ("kv_sources", "index_sources"):
            ids = getattr(self, name)
            problems += _ascend(name, ids)
            if outside := [i for i in ids if not 0 <= i < len(ratios)]:
                problems.append(f"{name} names layers {outside}, there are {len(ratios)}")
        if lost := [i for i in self.kv_sources if i not in self.index_sources]:
            problems.append(f"kv_sources {lost} are not in index_sources; every one must be")
        return problems + ([] if problems else self._source_problems())

    def _source_problems(self) -> list[str]:
        problems, ratios = [], self.compress_ratios
        for layer, ratio in enumerate(ratios):
            source = max((s for s in self.kv_sources if s <= layer), default=None)
            if ratio == 0 and layer in (*self.kv_sources, *self.index_sources):
                problems.append(f"layer {layer} is a source but its compress ratio is 0")
            elif ratio and source is None:
                problems.append(f"layer {layer} has ratio {ratio} but no kv source at or below it")
            elif ratio and source is not None and ratios[source] != ratio:
                problems.append(
                    f"layer {layer} has ratio {ratio}, its kv source {source} has {ratios[source]}"
                )
        candidate = self.indexer.candidate_source
        if self.kv_sources and candidate not in self.kv_sources:
            problems.append(
                f"indexer.candidate_source is {candidate}, must be one of kv_sources "
                f"{self.kv_sources}"
            )
        return problems

    def _token_problems(self) -> list[str]:
        ids = {n: getattr(self, n) for n in ("bos_token_id", "eos_token_id", "pad_token_id")}
        problems = []
        if self.vision:
            ids["image_token_id"] = self.image_token_id
        if self.dspark:
            ids["dspark.noise_token_id"] = self.dspark.noise_token_id
        if self.engram:
            ids["engram.pad_token_id"] = self.engram.pad_token_id
            if self.engram.compressed_vocab_size > self.vocab_size:
                problems.append(
                    f"engram.compressed_vocab_size is {self.engram.compressed_vocab_size}, must "
                    f"be at most vocab_size ({self.vocab_size})"
                )
        return problems + [
            f"{name} is {value}, outside the vocabulary of {self.vocab_size}"
            for name, value in ids.items()
            if not 0 <= value < self.vocab_size
        ]

    def _reach_problems(self) -> list[str]:
        problems = []
        if self.engram and (high := [i for i in self.engram.layer_ids if i >= self.num_layers]):
            problems.append(f"engram.layer_ids names layers {high}, there are {self.num_layers}")
        if self.dspark:
            targets = self.dspark.target_layer_ids
            if high := [i for i in targets if not 0 <= i < self.num_layers]:
                problems.append(
                    f"dspark.target_layer_ids names layers {high}, there are {self.num_layers}"
                )
        return problems


@dataclass(frozen=True, kw_only=True, slots=True)
class NumericsConfig:
    """Where the forward rounds. Report §2.4.4; the modes are listed in docs/numerics.md.

    Each point is "off", "fake" (rounded value, straight-through gradient) or "exact" (through the
    stored codes, as the released kernels compute; no gradient). ``compute_dtype`` is that of the
    streams between layers and of what layers compute, but for the float32 islands; "weights" means
    that of the parameters. ``deterministic`` makes results independent of batching and chunking to
    the last bit.
    """

    linear_input: Rounding = "off"
    window_kv: Rounding = "off"
    main_kv: Rounding = "off"
    index: Rounding = "off"
    expert_weights: Rounding = "off"  # of routed experts that are not stored as codes anyway
    score_dtype: Literal["float32", "bfloat16"] = "float32"
    compute_dtype: Literal["weights", "bfloat16"] = "weights"
    deterministic: bool = False

    def __post_init__(self) -> None:
        points = ("linear_input", "window_kv", "main_kv", "index", "expert_weights")
        problems = [
            f"{name} is {getattr(self, name)!r}, must be one of {ROUNDINGS}"
            for name in points
            if getattr(self, name) not in ROUNDINGS
        ]
        if self.score_dtype not in ("float32", "bfloat16"):
            problems.append(f"score_dtype is {self.score_dtype!r}, must be float32 or bfloat16")
        if self.compute_dtype not in ("weights", "bfloat16"):
            problems.append(f"compute_dtype is {self.compute_dtype!r}, must be weights or bfloat16")
        _raise_if("numerics", problems)


NUMERICS: dict[str, NumericsConfig] = {
    "f32": NumericsConfig(),
    "f32qat": NumericsConfig(window_kv="fake", main_kv="fake", index="fake"),
    "released": NumericsConfig(
        linear_input="exact", window_kv="exact", main_kv="exact", index="exact"
    ),
    "bf16qat": NumericsConfig(
        window_kv="fake", main_kv="fake", index="fake", compute_dtype="bfloat16"
    ),
}


def as_dict(component: Any) -> dict[str, Any]:  # noqa: ANN401 -- any of the dataclasses above
    """Nested plain dict of a config, tuples as lists, for JSON."""
    out: dict[str, Any] = {}
    for spec in fields(component):
        value = getattr(component, spec.name)
        if hasattr(value, "__dataclass_fields__"):
            value = as_dict(value)
        out[spec.name] = list(value) if isinstance(value, tuple) else value
    return out
