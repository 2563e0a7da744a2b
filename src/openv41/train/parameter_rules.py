"""Which parameter takes which update rule, as tables. Report §2.5, §2.1.1.

The report names the rule of most parameters. Rows that it leaves open are marked ``OPEN``.
"""

import re
from dataclasses import dataclass
from typing import Literal

from openv41.config import ModelConfig

Update = Literal["muon", "sinkhorn", "adamw", "load balance"]
Blocks = Literal["one", "query heads", "index heads", "query, key, value"]
Part = Literal["backbone", "tokens", "engram table", "vision encoder", "adapter", "drafter"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """Update rule of a parameter.

    ``blocks`` are the matrices that its rows hold, each orthogonalised alone; ``part`` decides the
    learning rate; ``is_open`` says that the report leaves the row to us.
    """

    update: Update
    blocks: Blocks = "one"
    decays: bool = False
    part: Part = "backbone"
    is_open: bool = False


MUON = Rule(update="muon", decays=True)
OPEN_MUON = Rule(update="muon", decays=True, is_open=True)
NORM = Rule(update="adamw", decays=True)
OPEN_NORM = Rule(update="adamw", decays=True, is_open=True)
VECTOR = Rule(update="adamw")
OPEN_VECTOR = Rule(update="adamw", is_open=True)
TOKENS = Rule(update="sinkhorn", part="tokens")
TABLE = Rule(update="sinkhorn", part="engram table")
BALANCED = Rule(update="load balance")
VISION_MUON = Rule(update="muon", decays=True, part="vision encoder")
VISION_NORM = Rule(update="adamw", decays=True, part="vision encoder")
VISION_VECTOR = Rule(update="adamw", part="vision encoder")
ADAPTER = Rule(update="adamw", part="adapter", is_open=True)  # the factors of LoRA, not a matrix

# Layer numbers are written as *.
RULES: dict[str, Rule] = {
    "embed.weight": TOKENS,
    "head.weight": TOKENS,
    "norm.weight": NORM,
    "layers.*.attn_norm.weight": NORM,
    "layers.*.ffn_norm.weight": NORM,
    "layers.*.attn_mhc.fn": OPEN_MUON,
    "layers.*.attn_mhc.base": VECTOR,
    "layers.*.attn_mhc.scale": VECTOR,
    "layers.*.ffn_mhc.fn": OPEN_MUON,
    "layers.*.ffn_mhc.base": VECTOR,
    "layers.*.ffn_mhc.scale": VECTOR,
    "layers.*.attention.wq_a.weight": MUON,
    "layers.*.attention.wq_b.weight": Rule(update="muon", blocks="query heads", decays=True),
    "layers.*.attention.wkv.weight": MUON,  # one head
    "layers.*.attention.wo_a.weight": MUON,
    "layers.*.attention.wo_b.weight": MUON,
    "layers.*.attention.q_norm.weight": NORM,
    "layers.*.attention.kv_norm.weight": NORM,
    "layers.*.attention.sink": OPEN_VECTOR,
    "layers.*.attention.compressor.wkv.weight": MUON,
    "layers.*.attention.compressor.wgate.weight": OPEN_MUON,
    "layers.*.attention.compressor.norm.weight": NORM,
    "layers.*.attention.indexer.wq_b.weight": Rule(
        update="muon", blocks="index heads", decays=True
    ),
    "layers.*.attention.indexer.weights_proj.weight": MUON,
    "layers.*.attention.indexer.wk.weight": MUON,  # one head
    "layers.*.attention.indexer.k_norm.weight": NORM,
    "layers.*.moe.gate.weight": OPEN_MUON,
    "layers.*.moe.gate.bias": BALANCED,
    "layers.*.moe.gate.bias_vl": BALANCED,
    "layers.*.moe.experts.w1.weight": MUON,
    "layers.*.moe.experts.w3.weight": MUON,
    "layers.*.moe.experts.w2.weight": MUON,
    "layers.*.moe.shared.w1.weight": MUON,
    "layers.*.moe.shared.w3.weight": MUON,
    "layers.*.moe.shared.w2.weight": MUON,
    "layers.*.engram.table.weight": TABLE,
    "layers.*.engram.wkv.weight": MUON,
    "layers.*.engram.q_weight": OPEN_NORM,
    "layers.*.engram.k_weight": OPEN_NORM,
    "vision.encoder.patch_embed.weight": VISION_MUON,
    "vision.encoder.patch_embed.bias": VISION_VECTOR,
    "vision.encoder.blocks.*.norm1.weight": VISION_NORM,
    "vision.encoder.blocks.*.attn.wqkv.weight": Rule(
        update="muon",
        blocks="query, key, value",
        decays=True,
        part="vision encoder",
        is_open=True,
    ),
    "vision.encoder.blocks.*.attn.wqkv.bias": VISION_VECTOR,
    "vision.encoder.blocks.*.attn.wo.weight": VISION_MUON,
    "vision.encoder.blocks.*.attn.wo.bias": VISION_VECTOR,
    "vision.encoder.blocks.*.norm2.weight": VISION_NORM,
    "vision.encoder.blocks.*.mlp.w1.weight": VISION_MUON,
    "vision.encoder.blocks.*.mlp.w2.weight": VISION_MUON,
    "vision.encoder.norm.weight": NORM,  # trained from the start, as the projector
    "vision.projector.w1.weight": MUON,
    "vision.projector.w1.bias": VECTOR,
    "vision.projector.w2.weight": MUON,
    "vision.projector.w2.bias": VECTOR,
    "vision.start": OPEN_VECTOR,
    "vision.newline": OPEN_VECTOR,
    "vision.end": OPEN_VECTOR,
}

# The report assigns none of the drafter's: its matrices as the backbone's, its two V x rank tables
# as embeddings, the single row of its confidence head never orthogonalised.
DRAFTER_MUON = Rule(update="muon", decays=True, part="drafter", is_open=True)
DRAFTER_NORM = Rule(update="adamw", decays=True, part="drafter", is_open=True)
DRAFTER_VECTOR = Rule(update="adamw", part="drafter", is_open=True)
DRAFTER_TABLE = Rule(update="sinkhorn", part="drafter", is_open=True)
_STAGE = "drafter.stages.*"
DRAFTER_RULES: dict[str, Rule] = {
    "drafter.main_proj.weight": DRAFTER_MUON,
    "drafter.main_norm.weight": DRAFTER_NORM,
    f"{_STAGE}.attn_norm.weight": DRAFTER_NORM,
    f"{_STAGE}.ffn_norm.weight": DRAFTER_NORM,
    f"{_STAGE}.attn_mhc.fn": DRAFTER_MUON,
    f"{_STAGE}.attn_mhc.base": DRAFTER_VECTOR,
    f"{_STAGE}.attn_mhc.scale": DRAFTER_VECTOR,
    f"{_STAGE}.ffn_mhc.fn": DRAFTER_MUON,
    f"{_STAGE}.ffn_mhc.base": DRAFTER_VECTOR,
    f"{_STAGE}.ffn_mhc.scale": DRAFTER_VECTOR,
    f"{_STAGE}.attention.wq_a.weight": DRAFTER_MUON,
    f"{_STAGE}.attention.wq_b.weight": Rule(
        update="muon", blocks="query heads", decays=True, part="drafter", is_open=True
    ),
    f"{_STAGE}.attention.wkv.weight": DRAFTER_MUON,  # one head
    f"{_STAGE}.attention.wo_a.weight": DRAFTER_MUON,
    f"{_STAGE}.attention.wo_b.weight": DRAFTER_MUON,
    f"{_STAGE}.attention.q_norm.weight": DRAFTER_NORM,
    f"{_STAGE}.attention.kv_norm.weight": DRAFTER_NORM,
    f"{_STAGE}.attention.sink": DRAFTER_VECTOR,
    f"{_STAGE}.moe.gate.weight": DRAFTER_MUON,
    f"{_STAGE}.moe.gate.bias": BALANCED,
    f"{_STAGE}.moe.gate.bias_vl": BALANCED,
    f"{_STAGE}.moe.experts.w1.weight": DRAFTER_MUON,
    f"{_STAGE}.moe.experts.w3.weight": DRAFTER_MUON,
    f"{_STAGE}.moe.experts.w2.weight": DRAFTER_MUON,
    f"{_STAGE}.moe.shared.w1.weight": DRAFTER_MUON,
    f"{_STAGE}.moe.shared.w3.weight": DRAFTER_MUON,
    f"{_STAGE}.moe.shared.w2.weight": DRAFTER_MUON,
    "drafter.norm.weight": DRAFTER_NORM,
    "drafter.markov.embed.weight": DRAFTER_TABLE,
    "drafter.markov.head.weight": DRAFTER_TABLE,
    "drafter.confidence.weight": DRAFTER_VECTOR,
}

# What the model of stage "vision" has beside the encoder; see train/contrastive.py.
CONTRASTIVE_RULES: dict[str, Rule] = {
    "vision.projection.weight": OPEN_MUON,
    "text.projection.weight": OPEN_MUON,
    "text.encoder.embed.weight": Rule(update="sinkhorn", part="tokens", is_open=True),
    "text.encoder.blocks.*.norm1.weight": OPEN_NORM,
    "text.encoder.blocks.*.attn.wqkv.weight": Rule(
        update="muon", blocks="query, key, value", decays=True, is_open=True
    ),
    "text.encoder.blocks.*.attn.wqkv.bias": OPEN_VECTOR,
    "text.encoder.blocks.*.attn.wo.weight": OPEN_MUON,
    "text.encoder.blocks.*.attn.wo.bias": OPEN_VECTOR,
    "text.encoder.blocks.*.norm2.weight": OPEN_NORM,
    "text.encoder.blocks.*.mlp.w1.weight": OPEN_MUON,
    "text.encoder.blocks.*.mlp.w2.weight": OPEN_MUON,
    "text.encoder.norm.weight": OPEN_NORM,
    "log_temperature": OPEN_VECTOR,
    "bias": OPEN_VECTOR,
}

ALL_RULES = {**RULES, **DRAFTER_RULES, **CONTRASTIVE_RULES}


def pattern_of(name: str) -> str:
    """Name of a parameter with * for the numbers of its layer or block."""
    return re.sub(r"\b(layers|blocks|stages)\.\d+\.", r"\1.*.", name)


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to a LoRA update and not to the model."""
    return name.endswith((".update.a", ".update.b"))


def is_drafter(name: str) -> bool:
    """Whether a parameter belongs to the drafter."""
    return name.startswith("drafter.")


def rule_of(name: str) -> Rule:
    """Rule of a parameter; a parameter that is not in the tables is a bug."""
    if is_adapter(name):
        return ADAPTER
    rule = ALL_RULES.get(pattern_of(name))
    assert rule is not None, f"{name} is in no row of RULES"
    return rule


def num_blocks(rule: Rule, config: ModelConfig) -> int:
    """Matrices that a parameter of this rule holds one above the other."""
    counts: dict[Blocks, int] = {
        "one": 1,
        "query heads": config.attention.num_heads,
        "index heads": config.indexer.num_heads,
        "query, key, value": 3,
    }
    return counts[rule.blocks]
