"""The vision encoder and the projector against loops in float64; packing; eps; gradients."""

import math

import pytest
import torch

from openv41.config import NUMERICS, VisionConfig
from openv41.image_grid import ImageGrid
from openv41.layers.projector import Projector
from openv41.layers.vision_encoder import VisionEncoder
from tests.close import assert_close
from tests.oracles import vision as oracle

VISION = VisionConfig(
    num_layers=2,
    hidden_size=24,
    num_heads=3,
    intermediate_size=20,
    patch_size=2,
    rope_theta=50.0,
    downsample_ratio=3,
)
WIDTH = 10  # of the language model
GRIDS = [ImageGrid(4, 5, 3), ImageGrid(1, 1, 3), ImageGrid(2, 7, 3)]


def filled(module):
    """Norms away from one, biases away from zero."""
    with torch.no_grad():
        for name, weight in module.named_parameters():
            values = torch.randn(weight.shape, dtype=torch.float64)
            if "norm" in name:
                values = values.sigmoid() + 0.5
            elif weight.ndim > 1:
                values *= 1.5 * weight.shape[1] ** -0.5
            weight.copy_(values)
    return module


def encoder(dtype=torch.float64, numerics=NUMERICS["f32"]):
    return filled(VisionEncoder(VISION, numerics, dtype=dtype))


def projector(dtype=torch.float64, numerics=NUMERICS["f32"]):
    return filled(Projector(VISION, WIDTH, numerics, dtype=dtype))


def patches_of(grids, dtype=torch.float64):
    return torch.randn(sum(g.num_patches for g in grids), 3, 2, 2, dtype=dtype)


def arrays(module):
    return {name: p.detach().double().numpy() for name, p in module.named_parameters()}


def split(rows, grids):
    return rows.split([grid.num_patches for grid in grids])


@torch.no_grad()
@pytest.mark.parametrize("grid", [ImageGrid(4, 5, 3), ImageGrid(1, 1, 3), ImageGrid(3, 6, 3)])
def test_against_loops(grid):
    model, project, patches = encoder(), projector(), patches_of([grid])
    shape = {"layers": 2, "heads": 3, "theta": 50.0}
    want = oracle.encode(patches.numpy(), grid.rows, grid.cols, arrays(model), **shape)
    got = model(patches, [grid])
    assert_close("features", got, want, rtol=1e-5, atol=1e-5)  # rotary angles are float32
    cells = oracle.project(got.numpy(), grid.rows, grid.cols, arrays(project), ratio=3)
    assert_close("cells", project(got, [grid]), cells, rtol=1e-12, atol=1e-12)
    assert len(cells) == grid.cell_rows * grid.cell_cols


@torch.no_grad()
def test_packed_images_are_alone():
    model, project, patches = encoder(), projector(), patches_of(GRIDS)
    features = model(patches, GRIDS)
    cells, first = project(features, GRIDS), 0
    for own, grid, part in zip(split(features, GRIDS), GRIDS, split(patches, GRIDS), strict=True):
        assert_close("alone", own, model(part, [grid]), atol=1e-12)
        count = grid.cell_rows * grid.cell_cols
        alone = project(own, [grid])
        assert_close("cells alone", cells[first : first + count], alone, atol=1e-12)
        first += count
    assert first == len(cells)


@torch.no_grad()
def test_the_order_of_images_changes_nothing():
    model, patches = encoder(), patches_of(GRIDS)
    got = split(model(patches, GRIDS), GRIDS)
    order = [2, 0, 1]
    parts = split(patches, GRIDS)
    grids = [GRIDS[i] for i in order]
    turned = split(model(torch.cat([parts[i] for i in order]), grids), grids)
    for place, i in enumerate(order):
        assert_close(f"image {i}", turned[place], got[i], atol=1e-12)


@torch.no_grad()
def test_other_images_are_not_seen_and_own_patches_are():
    model, patches = encoder(), patches_of(GRIDS)
    before = split(model(patches, GRIDS), GRIDS)
    patches[19] += 1  # the last patch of the first image
    after = split(model(patches, GRIDS), GRIDS)
    assert (after[0] != before[0]).any(dim=1).all()
    assert torch.equal(after[1], before[1])
    assert torch.equal(after[2], before[2])


@torch.no_grad()
def test_rows_and_columns_are_told_apart():
    model = encoder()
    patches = patches_of([ImageGrid(2, 3, 3)])
    one, other = (model(patches, [ImageGrid(*size, 3)]) for size in ((2, 3), (3, 2)))
    assert (one[0] - other[0]).abs().max() > 1e-3


@torch.no_grad()
def test_positions_are_relative_within_an_image_alone():
    """A constant image: all patches see the same, so that none differs from another."""
    model = encoder()
    same = torch.ones(1, 3, 2, 2, dtype=torch.float64).expand(12, -1, -1, -1)
    out = model(same, [ImageGrid(3, 4, 3)])
    assert_close("patches", out, out[:1].expand(12, -1), atol=1e-12)


@torch.no_grad()
def test_eps_is_the_encoders_own():
    """Tiny patches: with the language model's 1e-20 their size would not matter."""
    model, project = encoder(), projector()
    assert {m.eps for m in model.modules() if hasattr(m, "eps")} == {1e-6}
    assert not [m for m in project.modules() if hasattr(m, "eps")]
    x = torch.full((1, 24), 1e-3, dtype=torch.float64)
    want = model.norm.weight * 1e-3 / math.sqrt(2e-6)
    assert_close("norm", model.norm(x)[0], want, rtol=1e-12)


@torch.no_grad()
def test_mlp_does_not_clamp():
    mlp = encoder().blocks[0].mlp
    mlp.w1.weight.fill_(1.0)
    mlp.w2.weight.fill_(1.0)
    x = torch.full((1, 24), 2.0, dtype=torch.float64)  # gate and up are 48
    assert_close("mlp", mlp(x), torch.full((1, 24), 48.0 * 48.0 * 20), rtol=1e-12)


@torch.no_grad()
def test_gelu_is_exact():
    project = projector()
    project.w1.weight.zero_()
    project.w1.bias.fill_(1.0)
    project.w2.weight.fill_(1.0 / WIDTH)
    project.w2.bias.zero_()
    out = project(torch.zeros(9, 24, dtype=torch.float64), [ImageGrid(3, 3, 3)])
    want = 0.5 * (1 + math.erf(1 / math.sqrt(2)))
    assert_close("gelu", out, torch.full((1, WIDTH), want, dtype=torch.float64), rtol=1e-14)


@torch.no_grad()
def test_bfloat16_stays_bfloat16_and_is_near():
    numerics = NUMERICS["released"]
    model = encoder(torch.bfloat16, numerics)
    wide = VisionEncoder(VISION, NUMERICS["f32"], dtype=torch.float64)
    wide.load_state_dict({name: t.double() for name, t in model.state_dict().items()})
    patches = patches_of(GRIDS, torch.bfloat16)
    got = model(patches, GRIDS)
    assert got.dtype == torch.bfloat16
    want = wide(patches, GRIDS)
    assert (got.double() - want).abs().mean() < 0.02 * want.std()


def test_no_images():
    model, project = encoder(), projector()
    none = model(torch.zeros(0, 3, 2, 2), [])
    assert none.shape == (0, 24)
    assert project(none, []).shape == (0, WIDTH)


def test_patches_must_fit_the_grids():
    with pytest.raises(AssertionError, match=r"21 patches for grids of \[20\]"):
        encoder()(torch.zeros(21, 3, 2, 2), GRIDS[:1])


def test_gradient_of_patches():
    tiny = VisionConfig(
        num_layers=1, hidden_size=4, num_heads=1, intermediate_size=3, patch_size=1, rope_theta=9.0
    )
    model = filled(VisionEncoder(tiny, NUMERICS["f32"], dtype=torch.float64))
    project = filled(Projector(tiny, 3, NUMERICS["f32"], dtype=torch.float64))
    grids = [ImageGrid(2, 2, 3), ImageGrid(1, 3, 3)]
    patches = torch.randn(7, 3, 1, 1, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda p: project(model(p, grids), grids), [patches])


def test_every_weight_has_a_gradient():
    model, project = encoder(), projector()
    loss = project(model(patches_of(GRIDS), GRIDS), GRIDS).square().sum()
    loss.backward()
    for name, weight in [*model.named_parameters(), *project.named_parameters()]:
        assert weight.grad.abs().max() > 0, name
