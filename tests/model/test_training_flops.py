"""FLOPs of training steps: sums over single tokens, and images by hand."""

from dataclasses import replace

import pytest
import torch

from openv41.image_grid import ImageGrid
from openv41.model.causal_encoder_decoder import CausalEncoderDecoder
from openv41.model.flops import flops_per_token
from openv41.model.training_flops import (
    TrainingFlops,
    block_flops,
    encoder_flops,
    projector_flops,
)
from openv41.presets import preset, tiny
from tests.layers.mini import VISION, mini_config


def build(config):
    return CausalEncoderDecoder(config, device="meta")


@pytest.mark.parametrize("name", ["tiny", "thin", "mini"])
def test_a_step_is_three_forwards_of_its_tokens(name):
    """Each with its own context, and a head for the tokens that predict one."""
    model = build(mini_config() if name == "mini" else preset(name))
    lengths = (1, 3, 45)
    tokens = [context for length in lengths for context in range(1, length + 1)]
    each = {c: flops_per_token(model, c, prefill=False).total for c in range(1, 46)}
    forward = sum(each[context] for context in tokens)
    head = 2 * model.head.weight.numel()
    flops = TrainingFlops(model)
    assert flops.step(lengths, num_targets=len(tokens)) == 3 * forward
    assert flops.step(lengths, num_targets=9) == 3 * (forward - (len(tokens) - 9) * head)


@pytest.mark.parametrize("context", [1, 15, 16, 17, 31, 32, 33, 40, 64, 65])
def test_contexts_around_every_limit(context):
    """Window 32, 16 selected, a pool of 32; three layers of ratio 2, four of ratio 1."""
    work = flops_per_token(build(tiny()), context, prefill=False)
    selected = 3 * min(16, context // 2) + 4 * min(16, context)
    assert work.attention == 4 * 2 * 32 * (8 * min(32, context) + selected)
    scored = 2 * (context // 2) + context + min(32, context)
    assert work.indexer == 2 * 2 * (16 + 1) * scored


def test_six_flops_per_parameter_and_token():
    """The rule of thumb holds where a model is wide and its texts are short."""
    model = build(replace(tiny(), hidden_size=2048))
    from_weights = 6 * sum(
        p.numel() / (4 if "experts" in name else 1)  # 2 of 8
        for name, p in model.named_parameters()
        if p.ndim > 1 and not name.startswith(("embed", "vision")) and "table" not in name
    )
    found = TrainingFlops(model).step((8,), num_targets=8) / 8
    assert found == pytest.approx(from_weights, rel=0.1)


def test_images_by_hand():
    model = build(replace(mini_config(), vision=VISION))
    grids = [ImageGrid(2, 3, 3), ImageGrid(4, 4, 3)]  # 6 and 16 patches, 1 and 4 cells
    embedding = 2 * (3 * 2 * 2) * 8 * 22
    blocks = 2 * (3 * 64 + 64 + 2 * 64 + 64) * 22 + 4 * 8 * (6**2 + 16**2)
    assert encoder_flops(VISION, grids) == embedding + blocks
    projector = 2 * 5 * (9 * 8 * 16 + 16 * 16)
    assert projector_flops(VISION, 16, grids) == projector
    flops = TrainingFlops(model)
    text = flops.step((9,), num_targets=4)
    seen = flops.step((9,), num_targets=4, grids=grids)
    assert seen - text == 3 * (embedding + blocks + projector)
    rests = flops.step((9,), num_targets=4, grids=grids, encoder_learns=False)
    assert seen - rests == 2 * (embedding + blocks)


@torch.no_grad()
def test_the_products_of_the_encoder_are_those_that_run():
    """Weights by the matrices that the encoder holds."""
    tower = build(replace(mini_config(), vision=VISION)).vision
    weights = sum(p.numel() for p in tower.encoder.blocks.parameters() if p.ndim > 1)
    assert block_flops(VISION, [5]) == 2 * weights * 5 + 4 * 8 * 25
