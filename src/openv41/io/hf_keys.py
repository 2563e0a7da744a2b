"""Keys of the released config.json (nested) and of the flat inference form, as tables.

Released key names stand here alone. ``KEYS`` carries values, ``FIXED`` must hold what this package
implements, ``IGNORED`` is known and has no effect, with the reason.
"""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["int", "float", "bool", "ints", "float or null"]
SECTIONS = ("text_config", "text_config.rope_scaling", "vision_config", "quantization_config")


@dataclass(frozen=True, slots=True)
class Key:
    """One value: our dotted field, its released spellings (the first is written), its type."""

    ours: str
    nested: tuple[str, ...]
    flat: tuple[str, ...]
    kind: Kind
    is_optional: bool = False  # absent: the default of our field


@dataclass(frozen=True, slots=True)
class Fixed:
    """A key with one meaning: any of ``allowed`` (the first is written)."""

    nested: tuple[str, ...]
    flat: tuple[str, ...]
    allowed: tuple[object, ...]
    is_required: bool = False


def _key(kind: Kind, ours: str, nested: str, flat: str = "", *, optional: bool = False) -> Key:
    """Spellings are separated by blanks; ``text:x`` stands for ``text_config.x``."""
    full = nested.replace("text:", "text_config.").replace("vision:", "vision_config.")
    full = full.replace("rope:", "text_config.rope_scaling.")
    return Key(ours, tuple(full.split()), tuple(flat.split()), kind, optional)


KEYS: tuple[Key, ...] = (
    _key("int", "vocab_size", "text:vocab_size", "vocab_size"),
    _key("int", "hidden_size", "text:hidden_size", "dim"),
    _key("int", "num_layers", "text:num_hidden_layers", "n_layers"),
    _key("int", "max_position", "text:max_position_embeddings"),
    _key("ints", "compress_ratios", "text:compress_ratios", "compress_ratios"),
    _key("ints", "kv_sources", "text:kv_source_layer_ids", "kv_source_layers"),
    _key("ints", "index_sources", "text:index_source_layer_ids", "index_source_layers"),
    _key("float", "norm_eps", "text:rms_norm_eps", "norm_eps"),
    _key("int", "bos_token_id", "bos_token_id text:bos_token_id", optional=True),
    _key("int", "eos_token_id", "eos_token_id text:eos_token_id", optional=True),
    _key("int", "pad_token_id", "pad_token_id text:pad_token_id", optional=True),
    _key(
        "int",
        "image_token_id",
        "image_token_id text:image_token_id",
        "image_token_id",
        optional=True,
    ),
    _key("int", "attention.num_heads", "text:num_attention_heads", "n_heads"),
    _key("int", "attention.head_dim", "text:head_dim", "head_dim"),
    _key("int", "attention.rope_dim", "text:qk_rope_head_dim", "rope_head_dim"),
    _key("int", "attention.q_rank", "text:q_lora_rank", "q_lora_rank"),
    _key("int", "attention.o_rank", "text:o_lora_rank", "o_lora_rank"),
    _key("int", "attention.o_groups", "text:o_groups", "o_groups"),
    _key("int", "attention.window_size", "text:sliding_window", "window_size"),
    _key("float", "attention.rope_theta", "text:rope_theta", "rope_theta"),
    _key(
        "float",
        "attention.compress_rope_theta",
        "text:compress_rope_theta",
        "compress_rope_theta",
    ),
    _key("float", "attention.yarn.factor", "rope:factor", "rope_factor"),
    _key("float", "attention.yarn.beta_fast", "rope:beta_fast", "beta_fast"),
    _key("float", "attention.yarn.beta_slow", "rope:beta_slow", "beta_slow"),
    _key(
        "int",
        "attention.yarn.original_max_position",
        "rope:original_max_position_embeddings",
        "original_seq_len",
    ),
    _key("int", "indexer.num_heads", "text:index_n_heads", "index_n_heads"),
    _key("int", "indexer.head_dim", "text:index_head_dim", "index_head_dim"),
    _key("int", "indexer.top_k", "text:index_topk", "index_topk"),
    _key(
        "int",
        "indexer.candidate_source",
        "text:candidate_source_layer_id",
        "candidate_source_layer",
        optional=True,  # then the last kv source
    ),
    _key(
        "int",
        "indexer.candidate_blocks",
        "text:candidate_topk_blocks",
        "candidate_topk_blocks",
    ),
    _key("int", "indexer.block_size", "text:candidate_block_size", "candidate_block_size"),
    _key("int", "moe.num_experts", "text:n_routed_experts", "n_routed_experts"),
    _key("int", "moe.top_k", "text:num_experts_per_tok", "n_activated_experts"),
    _key("int", "moe.expert_dim", "text:moe_intermediate_size", "moe_inter_dim"),
    _key("int", "moe.num_shared", "text:n_shared_experts", "n_shared_experts"),
    _key("float", "moe.route_scale", "text:routed_scaling_factor", "route_scale"),
    _key("bool", "moe.norm_top_k_prob", "text:norm_topk_prob", "norm_topk_prob", optional=True),
    _key("float", "moe.swiglu_limit", "text:swiglu_limit", "swiglu_limit"),
    _key("float", "moe.gate_temperature", "text:gate_temp", "gate_temp", optional=True),
    _key("int", "mhc.num_streams", "text:hc_mult", "hc_mult"),
    _key("int", "mhc.sinkhorn_steps", "text:hc_sinkhorn_iters", "hc_sinkhorn_iters"),
    _key("float", "mhc.eps", "text:hc_eps", "hc_eps"),
    _key("ints", "engram.layer_ids", "text:engram_layer_ids", "engram_layer_ids"),
    _key("ints", "engram.num_embeddings", "text:engram_num_embeddings", "engram_num_embeddings"),
    _key("int", "engram.max_ngram", "text:engram_max_ngram_size", "engram_max_ngram_size"),
    _key("int", "engram.table_size", "text:engram_vocab_size", "engram_vocab_size"),
    _key("int", "engram.num_heads", "text:engram_n_heads", "engram_n_heads"),
    _key("int", "engram.head_dim", "text:engram_head_dim", "engram_head_dim"),
    _key(
        "int",
        "engram.pad_token_id",
        "text:engram_pad_token_id text:engram_pad_id",
        "engram_pad_id engram_pad_token_id",
    ),
    _key(
        "int",
        "engram.compressed_vocab_size",
        "text:engram_compressed_vocab_size",
        "engram_compressed_vocab_size",
    ),
    _key("int", "vision.num_layers", "vision:num_hidden_layers", "vision_n_layers"),
    _key("int", "vision.hidden_size", "vision:hidden_size", "vision_dim"),
    _key("int", "vision.num_heads", "vision:num_attention_heads", "vision_n_heads"),
    _key("int", "vision.intermediate_size", "vision:intermediate_size", "vision_inter_dim"),
    _key("int", "vision.patch_size", "vision:patch_size", "vision_patch_size"),
    _key("float", "vision.rope_theta", "vision:rope_theta", "vision_rope_theta"),
    _key("int", "vision.downsample_ratio", "vision:downsample_ratio", "vision_downsample_ratio"),
    _key("int", "vision.max_image_tokens", "vision:max_image_tokens", "vision_max_n_token"),
    _key("int", "vision.min_pixels", "vision:min_pixels", "vision_min_pixels"),
    _key(
        "float or null",
        "vision.max_wh_ratio",
        "vision:max_wh_ratio",
        "vision_max_wh_ratio",
        optional=True,
    ),
    _key("int", "dspark.num_stages", "text:num_nextn_predict_layers", "n_mtp_layers"),
    _key("int", "dspark.block_size", "text:dspark_block_size", "dspark_block_size"),
    _key("int", "dspark.noise_token_id", "text:dspark_noise_token_id", "dspark_noise_token_id"),
    _key(
        "ints",
        "dspark.target_layer_ids",
        "text:dspark_target_layer_ids",
        "dspark_target_layer_ids",
    ),
    _key("int", "dspark.markov_rank", "text:dspark_markov_rank", "dspark_markov_rank"),
    _key("int", "dspark.num_experts", "text:dspark_n_routed_experts", "dspark_n_routed_experts"),
    _key("int", "dspark.top_k", "text:dspark_num_experts_per_tok", "dspark_n_activated_experts"),
)

# A part is off where this field is 0, empty or absent together with the rest of the part.
SWITCHES = {
    "engram": "engram.layer_ids",
    "vision": "vision.num_layers",
    "dspark": "dspark.num_stages",
}


def _fixed(nested: str, flat: str, *allowed: object, required: bool = False) -> Fixed:
    return Fixed(tuple(nested.split()), tuple(flat.split()), allowed, required)


FIXED: tuple[Fixed, ...] = (
    _fixed("model_type", "model_type", "deepseek_v41", required=True),
    _fixed("text_config.model_type", "", "deepseek_v41_text"),
    _fixed("vision_config.model_type", "", "deepseek_v41_vision"),
    _fixed("tie_word_embeddings text_config.tie_word_embeddings", "", False),
    _fixed("text_config.num_key_value_heads", "", 1),
    _fixed("text_config.attention_bias", "", False),
    _fixed("text_config.hidden_act", "", "silu"),
    _fixed("text_config.scoring_func", "score_func", "sqrtsoftplus"),
    _fixed("text_config.topk_method", "", "noaux_tc"),
    _fixed("text_config.rope_scaling.rope_type", "", "yarn"),
)

# Required where a quantization_config stands.
QUANTIZATION: tuple[Fixed, ...] = (
    _fixed("quantization_config.quant_method", "", "fp8", required=True),
    _fixed("quantization_config.activation_scheme", "", "dynamic"),
    _fixed("quantization_config.weight_block_size", "", [32, 32], required=True),
    _fixed("quantization_config.scale_fmt", "scale_fmt", "ue8m0", required=True),
    _fixed("quantization_config.expert_dtype", "expert_dtype", "fp4", required=True),
)

# What plain numbers are stored in; the flat form says "fp8" where weights are quantised.
DTYPE_NESTED = _fixed("dtype text_config.dtype", "", "bfloat16", "float32")
DTYPE_FLAT = _fixed("", "dtype", "fp8", "bf16", "fp32")

IGNORED: dict[str, str] = {
    "architectures": "names a class of another library; model_type decides",
    "transformers_version": "the library that wrote the file",
    "torch_dtype": "older spelling of dtype",
    "quantization_config.fmt": "FP8 weights are e4m3 always; tensor dtypes say so too",
    "text_config.rope_scaling.type": "older spelling of rope_type",
    "text_config.attention_dropout": "a training setting of other models; this one has no dropout",
    "text_config.initializer_range": "weights are read, not drawn",
    "text_config.use_cache": "a run-time choice, no property of the weights",
    "max_batch_size": "sizes the buffers of the reference program",
    "max_seq_len": "sizes the buffers of the reference program",
}
