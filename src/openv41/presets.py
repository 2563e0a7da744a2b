"""Ready-made model sizes, as functions. Report §2.1.

Vocabulary sizes are stand-ins until a tokenizer is there: ``with_vocabulary`` puts in its own.
"""

from collections.abc import Callable
from dataclasses import replace

from openv41.config import (
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
from openv41.errors import ConfigError
from openv41.ngram_hash_constants import num_embeddings


def preset(name: str) -> ModelConfig:
    """Configuration of the named preset."""
    if name not in PRESETS:
        raise ConfigError("preset", [f"there is no preset {name!r}; choose one of {NAMES}"])
    return PRESETS[name]()


def with_vocabulary(
    config: ModelConfig, *, vocab_size: int, compressed_vocab_size: int
) -> ModelConfig:
    """Same model for another tokenizer: its size, and the classes of its Engram map."""
    engram = config.engram
    if engram is not None:
        engram = replace(engram, compressed_vocab_size=compressed_vocab_size)
    dspark = config.dspark
    if dspark is not None and dspark.noise_token_id >= vocab_size:
        dspark = replace(dspark, noise_token_id=config.pad_token_id)
    return replace(config, vocab_size=vocab_size, engram=engram, dspark=dspark)


def with_drafter(config: ModelConfig) -> ModelConfig:
    """The same model with a drafter, in about the released proportions where it has none.

    The noise token is the padding token, which no text holds.
    """
    if config.dspark is not None:
        return config
    last = range(max(0, config.num_layers - 3), config.num_layers)
    dspark = DsparkConfig(
        num_stages=3,
        block_size=5,
        noise_token_id=config.pad_token_id,
        target_layer_ids=tuple(last),
        markov_rank=min(256, max(16, config.hidden_size // 2)),
        num_experts=max(2, config.moe.num_experts // 3),
        top_k=max(1, config.moe.top_k // 2),
    )
    return replace(config, dspark=dspark)


def tiny() -> ModelConfig:
    """Demo size: every layer mode within 4 encoder and 4 decoder layers, fast on a CPU."""
    return ModelConfig(
        vocab_size=1024,
        hidden_size=64,
        num_layers=8,
        max_position=2048,
        compress_ratios=(0, 2, 2, 2, 1, 1, 1, 1),
        kv_sources=(1, 4),
        index_sources=(1, 3, 4, 6),
        attention=AttentionConfig(
            num_heads=2,
            head_dim=32,
            rope_dim=16,
            q_rank=32,
            o_rank=32,
            o_groups=2,
            window_size=32,
            yarn=YarnConfig(factor=4.0, original_max_position=512),
        ),
        indexer=IndexerConfig(
            num_heads=2,
            head_dim=16,
            top_k=16,
            candidate_source=4,
            candidate_blocks=8,
            block_size=4,
        ),
        moe=MoeConfig(num_experts=8, top_k=2, expert_dim=64),
        mhc=MhcConfig(sinkhorn_steps=8),
        engram=_engram((1, 2), vocab_size=1024, table_size=16384, num_heads=2, head_dim=32),
        vision=VisionConfig(
            num_layers=2,
            hidden_size=64,
            num_heads=2,
            intermediate_size=128,
            max_image_tokens=128,
            min_pixels=42 * 42,  # one cell: an icon is 4 tokens, not 184
        ),
        image_token_id=3,
    )


def bench30m() -> ModelConfig:
    """About 30 M parameters, for comparisons on a CPU."""
    return ModelConfig(
        vocab_size=4096,
        hidden_size=256,
        num_layers=8,
        max_position=4096,
        compress_ratios=(0, 2, 2, 2, 1, 1, 1, 1),
        kv_sources=(1, 4),
        index_sources=(1, 3, 4, 6),
        attention=AttentionConfig(
            num_heads=8,
            head_dim=64,
            rope_dim=32,
            q_rank=128,
            o_rank=64,
            o_groups=4,
            window_size=128,
            yarn=YarnConfig(factor=4.0, original_max_position=1024),
        ),
        indexer=IndexerConfig(
            num_heads=8,
            head_dim=64,
            top_k=128,
            candidate_source=4,
            candidate_blocks=64,
            block_size=8,
        ),
        moe=MoeConfig(num_experts=16, top_k=4, expert_dim=224),
        engram=_engram((1, 3), vocab_size=4096, table_size=4096, num_heads=4, head_dim=32),
    )


def thin() -> ModelConfig:
    """The released schedule of 20 + 20 layers, narrow in every other way."""
    wide = released()
    return replace(
        wide,
        vocab_size=1024,
        hidden_size=64,
        max_position=4096,
        attention=AttentionConfig(
            num_heads=4,
            head_dim=32,
            rope_dim=16,
            q_rank=32,
            o_rank=32,
            o_groups=2,
            window_size=16,
            yarn=YarnConfig(factor=4.0, original_max_position=1024),
        ),
        indexer=IndexerConfig(
            num_heads=4,
            head_dim=32,
            top_k=8,
            candidate_source=20,
            candidate_blocks=6,
            block_size=4,
        ),
        moe=MoeConfig(num_experts=6, top_k=2, expert_dim=32),
        engram=_engram((1, 14), vocab_size=1024, table_size=512, num_heads=2, head_dim=32),
        vision=None,
        dspark=None,
    )


def small() -> ModelConfig:
    """About 1 B parameters with the released head, rotary and indexer widths."""
    return ModelConfig(
        vocab_size=32768,
        hidden_size=1024,
        num_layers=16,
        max_position=65536,
        compress_ratios=(0, 0, *[2] * 6, *[1] * 8),
        kv_sources=(2, 5, 8),
        index_sources=(2, 5, 8, 10, 12, 14),
        attention=AttentionConfig(
            num_heads=16,
            head_dim=512,
            rope_dim=64,
            q_rank=512,
            o_rank=512,
            o_groups=4,
            window_size=128,
            yarn=YarnConfig(factor=16.0, original_max_position=4096),
        ),
        indexer=IndexerConfig(
            num_heads=32,
            head_dim=128,
            top_k=512,
            candidate_source=8,
            candidate_blocks=2048,
            block_size=8,
        ),
        moe=MoeConfig(num_experts=64, top_k=6, expert_dim=224),
        engram=_engram((1, 4), vocab_size=32768, table_size=16384, num_heads=8, head_dim=64),
    )


def released() -> ModelConfig:
    """DeepSeek-V4.1-Flash as released."""
    return ModelConfig(
        vocab_size=129280,
        hidden_size=5120,
        num_layers=40,
        max_position=1048576,
        compress_ratios=(0, 0, *[2] * 18, *[1] * 20),
        kv_sources=(2, 8, 14, 20),
        index_sources=(2, 8, 14, 20, 24, 28, 32, 36),
        attention=AttentionConfig(
            num_heads=64,
            head_dim=512,
            rope_dim=64,
            q_rank=1280,
            o_rank=1024,
            o_groups=8,
            window_size=128,
        ),
        indexer=IndexerConfig(
            num_heads=32,
            head_dim=128,
            top_k=512,
            candidate_source=20,
            candidate_blocks=2048,
            block_size=8,
        ),
        moe=MoeConfig(num_experts=384, top_k=6, expert_dim=2304),
        engram=EngramConfig(layer_ids=(1, 14), num_embeddings=(384006168, 384016682)),
        vision=VisionConfig(num_layers=32, hidden_size=1024, num_heads=16, intermediate_size=2816),
        dspark=DsparkConfig(
            num_stages=3,
            block_size=5,
            noise_token_id=128799,
            target_layer_ids=(37, 38, 39),
            markov_rank=256,
            num_experts=128,
            top_k=3,
        ),
    )


def _engram(
    layer_ids: tuple[int, ...], *, vocab_size: int, table_size: int, num_heads: int, head_dim: int
) -> EngramConfig:
    """Engram over n-grams of 2 to 4 tokens; no classes are merged until a tokenizer is there."""
    return EngramConfig(
        layer_ids=layer_ids,
        num_embeddings=num_embeddings(len(layer_ids), 3, num_heads, table_size),
        table_size=table_size,
        num_heads=num_heads,
        head_dim=head_dim,
        compressed_vocab_size=vocab_size,
    )


PRESETS: dict[str, Callable[[], ModelConfig]] = {
    "tiny": tiny,
    "bench30m": bench30m,
    "thin": thin,
    "small": small,
    "released": released,
}
NAMES = ", ".join(PRESETS)
