"""Which parameter is trained how: one table, and AdamW over its groups. Report §2.5."""

import re
from collections import defaultdict
from typing import Literal

import torch
from torch import nn

from openv41.model.causal_encoder_decoder import CausalEncoderDecoder
from openv41.train.config import OptimizerConfig

Group = Literal["matrix", "vector", "embedding", "engram table", "balanced", "frozen"]

# Layer numbers are written as *. Only a "matrix" decays. "balanced" parameters follow the load
# rule (train/balance.py) and no gradient; "frozen" ones stay as initialised: selecting entries has
# no gradient, so the indexer needs an objective of its own.
PARAMETER_GROUPS: dict[str, Group] = {
    "embed.weight": "embedding",
    "head.weight": "embedding",
    "norm.weight": "vector",
    "layers.*.attn_norm.weight": "vector",
    "layers.*.ffn_norm.weight": "vector",
    "layers.*.attn_mhc.fn": "matrix",
    "layers.*.attn_mhc.base": "vector",
    "layers.*.attn_mhc.scale": "vector",
    "layers.*.ffn_mhc.fn": "matrix",
    "layers.*.ffn_mhc.base": "vector",
    "layers.*.ffn_mhc.scale": "vector",
    "layers.*.attention.wq_a.weight": "matrix",
    "layers.*.attention.wq_b.weight": "matrix",
    "layers.*.attention.wkv.weight": "matrix",
    "layers.*.attention.wo_a.weight": "matrix",
    "layers.*.attention.wo_b.weight": "matrix",
    "layers.*.attention.q_norm.weight": "vector",
    "layers.*.attention.kv_norm.weight": "vector",
    "layers.*.attention.sink": "vector",
    "layers.*.attention.compressor.wkv.weight": "matrix",
    "layers.*.attention.compressor.wgate.weight": "matrix",
    "layers.*.attention.compressor.norm.weight": "vector",
    "layers.*.attention.indexer.wq_b.weight": "frozen",
    "layers.*.attention.indexer.weights_proj.weight": "frozen",
    "layers.*.attention.indexer.wk.weight": "frozen",
    "layers.*.attention.indexer.k_norm.weight": "frozen",
    "layers.*.moe.gate.weight": "matrix",
    "layers.*.moe.gate.bias": "balanced",
    "layers.*.moe.gate.bias_vl": "balanced",
    "layers.*.moe.experts.w1.weight": "matrix",
    "layers.*.moe.experts.w3.weight": "matrix",
    "layers.*.moe.experts.w2.weight": "matrix",
    "layers.*.moe.shared.w1.weight": "matrix",
    "layers.*.moe.shared.w3.weight": "matrix",
    "layers.*.moe.shared.w2.weight": "matrix",
    "vision.encoder.patch_embed.weight": "matrix",
    "vision.encoder.patch_embed.bias": "vector",
    "vision.encoder.blocks.*.norm1.weight": "vector",
    "vision.encoder.blocks.*.attn.wqkv.weight": "matrix",
    "vision.encoder.blocks.*.attn.wqkv.bias": "vector",
    "vision.encoder.blocks.*.attn.wo.weight": "matrix",
    "vision.encoder.blocks.*.attn.wo.bias": "vector",
    "vision.encoder.blocks.*.norm2.weight": "vector",
    "vision.encoder.blocks.*.mlp.w1.weight": "matrix",
    "vision.encoder.blocks.*.mlp.w2.weight": "matrix",
    "vision.encoder.norm.weight": "vector",
    "vision.projector.w1.weight": "matrix",
    "vision.projector.w1.bias": "vector",
    "vision.projector.w2.weight": "matrix",
    "vision.projector.w2.bias": "vector",
    "vision.start": "vector",
    "vision.newline": "vector",
    "vision.end": "vector",
    "layers.*.engram.table.weight": "engram table",
    "layers.*.engram.wkv.weight": "matrix",
    "layers.*.engram.q_weight": "vector",
    "layers.*.engram.k_weight": "vector",
}
WITHOUT_OPTIMIZER: tuple[Group, ...] = ("balanced", "frozen")


def group_of(name: str) -> Group:
    """Group of a parameter; a parameter that is not in the table is a bug."""
    pattern = re.sub(r"\b(layers|blocks)\.\d+\.", r"\1.*.", name)
    assert pattern in PARAMETER_GROUPS, f"{name} is in no row of PARAMETER_GROUPS"
    return PARAMETER_GROUPS[pattern]


def make_optimizer(model: CausalEncoderDecoder, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over the trained groups; parameters of the others stop asking for gradients.

    Each group carries its ``name`` and ``lr_factor``.
    """
    members: dict[Group, list[nn.Parameter]] = defaultdict(list)
    for name, parameter in model.named_parameters():
        group = group_of(name)
        parameter.requires_grad_(group not in WITHOUT_OPTIMIZER)
        members[group].append(parameter)
    factors = {
        "embedding": config.embedding_lr_factor,
        "engram table": config.engram_table_lr_factor,
    }
    groups = [
        {
            "name": group,
            "params": parameters,
            "lr_factor": factors.get(group, 1.0),
            "weight_decay": config.weight_decay if group == "matrix" else 0.0,
        }
        for group, parameters in sorted(members.items())
        if group not in WITHOUT_OPTIMIZER
    ]
    return torch.optim.AdamW(
        groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True
    )


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every group to ``lr`` times the group's factor."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_factor"]
