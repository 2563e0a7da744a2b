"""Pure tensor functions: NAME.py holds the references, NAME_triton.py their kernels."""

from openv41.ops._dispatch import kernels
from openv41.ops.acceptance import accept_block, accept_drafts, choose_tokens, residual
from openv41.ops.cache_writers import write_latents
from openv41.ops.compressor import pool_group
from openv41.ops.cross_entropy import linear_cross_entropy
from openv41.ops.decode_rows import group_rows, ring_rows
from openv41.ops.engram import (
    DEAD,
    add_gated,
    engram_gate,
    engram_update,
    hash_ngrams,
    lookup_ngrams,
)
from openv41.ops.entry_rows import page_rows, pool_entries
from openv41.ops.expert_mixture import expert_mixture
from openv41.ops.experts import (
    choose_experts,
    expert_weights,
    router_scores,
    sequence_balance,
)
from openv41.ops.grouped_linear import grouped_linear
from openv41.ops.image_attention import image_attention, rope_angles_2d, rotate_halves
from openv41.ops.indexer import (
    block_scores,
    choose_candidates,
    index_scores,
    mask_pool,
    merge_pools,
    pool_mask,
    select_top_k,
    selected_scores,
    selection_divergence,
)
from openv41.ops.linear import linear, quantized_linear, rounded_input, wide_linear
from openv41.ops.linear_loss import LinearLoss
from openv41.ops.mhc import mega_mhc, mix_streams, predict_mix, update_streams
from openv41.ops.norm import rms_norm
from openv41.ops.packed_index import (
    pack_index_queries,
    packed_index_choice,
    packed_index_scores,
)
from openv41.ops.packed_rows import pack_rows
from openv41.ops.packed_sparse_attention import packed_sparse_attention
from openv41.ops.pairs import combine, count_ids, sort_by_expert, take_pairs
from openv41.ops.pending import pool_pending
from openv41.ops.pixel_unshuffle import pixel_unshuffle
from openv41.ops.projections import joint_linear, rotated_queries
from openv41.ops.reverse_kl import linear_reverse_kl
from openv41.ops.rope import inverse_table, rope_frequencies, rope_table, rotate, yarn_frequencies
from openv41.ops.routed import Routed
from openv41.ops.routing import order_pairs, route
from openv41.ops.sinkhorn import doubly_stochastic
from openv41.ops.sparse_attention import Keys, attention_mass, plan_keys, sparse_attention
from openv41.ops.swiglu import clamped_swiglu

__all__ = [
    "DEAD",
    "Keys",
    "LinearLoss",
    "Routed",
    "accept_block",
    "accept_drafts",
    "add_gated",
    "attention_mass",
    "block_scores",
    "choose_candidates",
    "choose_experts",
    "choose_tokens",
    "clamped_swiglu",
    "combine",
    "count_ids",
    "doubly_stochastic",
    "engram_gate",
    "engram_update",
    "expert_mixture",
    "expert_weights",
    "group_rows",
    "grouped_linear",
    "hash_ngrams",
    "image_attention",
    "index_scores",
    "inverse_table",
    "joint_linear",
    "kernels",
    "linear",
    "linear_cross_entropy",
    "linear_reverse_kl",
    "lookup_ngrams",
    "mask_pool",
    "mega_mhc",
    "merge_pools",
    "mix_streams",
    "order_pairs",
    "pack_index_queries",
    "pack_rows",
    "packed_index_choice",
    "packed_index_scores",
    "packed_sparse_attention",
    "page_rows",
    "pixel_unshuffle",
    "plan_keys",
    "pool_entries",
    "pool_group",
    "pool_mask",
    "pool_pending",
    "predict_mix",
    "quantized_linear",
    "residual",
    "ring_rows",
    "rms_norm",
    "rope_angles_2d",
    "rope_frequencies",
    "rope_table",
    "rotate",
    "rotate_halves",
    "rotated_queries",
    "rounded_input",
    "route",
    "router_scores",
    "select_top_k",
    "selected_scores",
    "selection_divergence",
    "sequence_balance",
    "sort_by_expert",
    "sparse_attention",
    "take_pairs",
    "update_streams",
    "wide_linear",
    "write_latents",
    "yarn_frequencies",
]
