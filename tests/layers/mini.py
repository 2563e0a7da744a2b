"""A mini model that does not pass by luck, and its weights under the oracle's names."""

from dataclasses import replace

import torch

from openv41.config import (
    NUMERICS,
    AttentionConfig,
    DsparkConfig,
    EngramConfig,
    IndexerConfig,
    MhcConfig,
    ModelConfig,
    MoeConfig,
    VisionConfig,
    YarnConfig,
)
from openv41.model.causal_encoder_decoder import CausalEncoderDecoder
from openv41.ngram_hash_constants import num_embeddings
from tests.oracles import backbone

VOCAB = 64
IMAGE_TOKEN = 63
VISION = VisionConfig(
    num_layers=1, hidden_size=8, num_heads=2, intermediate_size=8, patch_size=2, min_pixels=1
)


def mini_config():
    """Window, top-k and pool far below 40 tokens; every layer mode; two different RoPE bases."""
    return ModelConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        num_layers=9,
        max_position=512,
        compress_ratios=(0, 0, 2, 2, 2, 1, 1, 1, 1),
        kv_sources=(2, 5),
        index_sources=(2, 4, 5, 7),
        attention=AttentionConfig(
            num_heads=4,
            head_dim=8,
            rope_dim=4,
            q_rank=8,
            o_rank=4,
            o_groups=2,
            window_size=4,
            yarn=YarnConfig(factor=4.0, original_max_position=16),
        ),
        indexer=IndexerConfig(
            num_heads=3,
            head_dim=8,
            top_k=3,
            candidate_source=5,
            candidate_blocks=3,
            block_size=2,
        ),
        moe=MoeConfig(num_experts=5, top_k=2, expert_dim=8, swiglu_limit=1.0),
        mhc=MhcConfig(num_streams=3),
        engram=EngramConfig(
            layer_ids=(1, 4),
            num_embeddings=num_embeddings(2, 3, 2, 20),
            table_size=20,
            num_heads=2,
            head_dim=4,
            compressed_vocab_size=40,
        ),
        image_token_id=IMAGE_TOKEN,
    )


def drafting_config(**changes):
    """The mini model with a drafter of three stages that taps its last three layers."""
    dspark = DsparkConfig(
        num_stages=3,
        block_size=5,
        noise_token_id=62,
        target_layer_ids=(6, 7, 8),
        markov_rank=6,
        num_experts=4,
        top_k=3,
    )
    return replace(mini_config(), dspark=replace(dspark, **changes))


def token_map():
    """Compressed ids that merge tokens; the padding token keeps its own."""
    return [i if i < 16 else 16 + (i - 16) // 2 for i in range(VOCAB)]


def mini_model(seed, dtype=torch.float64, numerics=NUMERICS["f32"], config=None):
    """Norms away from one, biases and sinks away from zero, clamps that act."""
    generator = torch.Generator().manual_seed(seed)
    model = CausalEncoderDecoder(config or mini_config(), numerics, dtype=dtype)
    model.set_token_map(token_map())
    with torch.no_grad():
        for name, weight in model.named_parameters():
            values = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            if "norm" in name or name.endswith(("scale", "q_weight", "k_weight")):
                values = values.sigmoid() + 0.5
            elif weight.ndim > 1:
                values *= 2 * weight.shape[-1] ** -0.5
            weight.copy_(values)
    return model


def oracle_config(config):
    """The released keys that the oracle reads."""
    attention, indexer, moe, engram = config.attention, config.indexer, config.moe, config.engram
    return {
        "num_hidden_layers": config.num_layers,
        "head_dim": attention.head_dim,
        "qk_rope_head_dim": attention.rope_dim,
        "o_groups": attention.o_groups,
        "sliding_window": attention.window_size,
        "rope_theta": attention.rope_theta,
        "compress_rope_theta": attention.compress_rope_theta,
        "rope_scaling": {
            "factor": attention.yarn.factor,
            "beta_fast": attention.yarn.beta_fast,
            "beta_slow": attention.yarn.beta_slow,
            "original_max_position_embeddings": attention.yarn.original_max_position,
        },
        "rms_norm_eps": config.norm_eps,
        "compress_ratios": config.compress_ratios,
        "kv_source_layer_ids": config.kv_sources,
        "index_source_layer_ids": config.index_sources,
        "index_n_heads": indexer.num_heads,
        "index_head_dim": indexer.head_dim,
        "index_topk": indexer.top_k,
        "candidate_source_layer_id": indexer.candidate_source,
        "candidate_topk_blocks": indexer.candidate_blocks,
        "candidate_block_size": indexer.block_size,
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "routed_scaling_factor": moe.route_scale,
        "norm_topk_prob": moe.norm_top_k_prob,
        "swiglu_limit": moe.swiglu_limit,
        "hc_mult": config.mhc.num_streams,
        "hc_sinkhorn_iters": config.mhc.sinkhorn_steps,
        "hc_eps": config.mhc.eps,
        "engram_layer_ids": engram.layer_ids,
        "engram_max_ngram_size": engram.max_ngram,
        "engram_vocab_size": engram.table_size,
        "engram_n_heads": engram.num_heads,
        "engram_pad_token_id": engram.pad_token_id,
        "engram_compressed_vocab_size": engram.compressed_vocab_size,
    } | _oracle_dspark(config.dspark)


def _oracle_dspark(dspark):
    if dspark is None:
        return {}
    return {
        "num_nextn_predict_layers": dspark.num_stages,
        "dspark_block_size": dspark.block_size,
        "dspark_noise_token_id": dspark.noise_token_id,
        "dspark_target_layer_ids": dspark.target_layer_ids,
        "dspark_n_routed_experts": dspark.num_experts,
        "dspark_num_experts_per_tok": dspark.top_k,
    }


# Written out here on purpose: the oracle shares no table with the package.
PARTS = (
    ("markov.", "markov_head."),
    ("confidence.", "confidence_head.proj."),
    ("attention.sink", "attn.attn_sink"),
    ("attention.", "attn."),
    ("attn_mhc.", "hc_attn_"),
    ("ffn_mhc.", "hc_ffn_"),
    ("moe.shared.", "ffn.shared_experts."),
    ("moe.", "ffn."),
    ("engram.table.", "engram.embed."),
)


def oracle_weights(model):
    """Float64 arrays under the released names; stacked experts taken apart."""
    weights = {}
    for name, value in model.state_dict().items():
        array = value.detach().double().numpy()
        head, layer, part = ("", "", name)
        if name.startswith("layers."):
            head, layer, part = name.split(".", 2)
        elif name.startswith("drafter."):
            head, layer, part = drafter_part(name, model.config.dspark.num_stages)
        for ours, released in PARTS:
            if part.startswith(ours):
                part = released + part[len(ours) :]
                break
        if part.startswith("ffn.experts."):
            matrix = part.split(".")[2]
            for e, slice_ in enumerate(array):
                weights[f"{head}.{layer}.ffn.experts.{e}.{matrix}.weight"] = slice_
        else:
            weights[f"{head}.{layer}.{part}" if head else part] = array
    return weights


def drafter_part(name, num_stages):
    """Released module, stage and the rest of the name of a parameter of the drafter."""
    _, part = name.split(".", 1)
    if part.startswith("stages."):
        _, stage, part = part.split(".", 2)
        return "mtp", stage, part
    return "mtp", "0" if part.startswith("main_") else str(num_stages - 1), part


def run_oracle(model, ids, **options):
    """The oracle's tensors for one document."""
    return backbone.forward(
        oracle_weights(model), oracle_config(model.config), ids, token_map(), **options
    )


def random_ids(length, seed=0):
    """Tokens that repeat a little, so that n-grams do; never the image token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, IMAGE_TOKEN, (length,), generator=generator).tolist()
