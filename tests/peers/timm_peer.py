"""timm's DeepSeek-ViT and projector beside ours: random weights, images of random sizes.

Both get the same pixels. Where a side is no multiple of the patch, timm fills up with zeros, while
the released processor resizes; so zeros are added before ours cuts an image into patches.
"""

import random
from dataclasses import dataclass
from importlib.metadata import version

import torch
from timm.models.deepseek_vit import DeepseekVitEncoder, checkpoint_filter_fn_encoder
from torch.nn import functional as F  # noqa: N812

from openv41.config import NUMERICS, VisionConfig
from openv41.image_grid import ImageGrid
from openv41.model.image_tower import ImageTower

NAME = "timm"
VERSION = version(NAME)
SEED = 0
SIZES = 50
LONGEST = 420  # side of an image in pixels, 30 patches
BOUND = 1e-4  # max abs of float32 outputs over their largest
PACKED = 10  # images in one call of ours


@dataclass(frozen=True)
class Shape:
    """Sizes of a vision encoder and of the model behind it."""

    name: str
    vision: VisionConfig
    hidden_size: int


def _vision(layers, width, heads, inner):
    return VisionConfig(
        num_layers=layers, hidden_size=width, num_heads=heads, intermediate_size=inner
    )


SHAPES = (
    Shape("small", _vision(4, 64, 4, 88), 96),
    Shape("released width, 2 blocks", _vision(2, 1024, 16, 2816), 5120),
)


def lines():
    """Yield one line per shape."""
    for shape in SHAPES:
        yield {"peer": NAME, "version": VERSION} | _compare(shape)


@torch.inference_mode()
def _compare(shape):
    tower, peer = _models(shape)
    images = _images(shape.vision.patch_size)
    cases = []
    for start in range(0, SIZES, PACKED):
        packed = images[start : start + PACKED]
        patches, grids = zip(*(_patches(image, shape.vision) for image in packed), strict=True)
        encoded = tower.encoder(torch.cat(patches), grids)
        cells = tower.projector(encoded, grids)
        ours = zip(
            encoded.split([grid.num_patches for grid in grids]),
            cells.split([grid.cell_rows * grid.cell_cols for grid in grids]),
            strict=True,
        )
        for image, grid, (own_patches, own_cells) in zip(packed, grids, ours, strict=True):
            case = {"pixels": list(image.shape[1:]), "patches": [grid.rows, grid.cols]}
            theirs = peer.forward_features(image[None])[0].flatten(0, 1)
            cases.append(case | _errors("encoder", own_patches, theirs))
            cases[-1] |= _errors("projector", own_cells, peer(image[None])[0])
    kinds = ("encoder", "projector")
    worst = {kind: max(case[f"{kind}_relative"] for case in cases) for kind in kinds}
    return {
        "what": "vision encoder and projector",
        "shape": shape.name,
        "sizes": len(cases),
        "grids_not_multiples_of_a_cell": sum(
            any(side % shape.vision.downsample_ratio for side in case["patches"]) for case in cases
        ),
        "pixels_not_multiples_of_a_patch": sum(
            any(side % shape.vision.patch_size for side in case["pixels"]) for case in cases
        ),
        **{f"{kind}_max_abs": max(case[f"{kind}_max_abs"] for case in cases) for kind in kinds},
        **{f"{kind}_max_relative": worst[kind] for kind in kinds},
        "bound": BOUND,
        "documented_differences": ["sides that are no multiple of a patch: timm adds zeros"],
        "cases": cases,
        "agrees": max(worst.values()) <= BOUND,
    }


def _models(shape):
    """Return ours and timm's with the same weights, by their released names."""
    vision, patch = shape.vision, shape.vision.patch_size
    tower = ImageTower(vision, shape.hidden_size, NUMERICS["f32"], dtype=torch.float32)
    generator = torch.Generator().manual_seed(SEED)
    for name, weight in tower.named_parameters():
        values = torch.randn(weight.shape, generator=generator)
        if weight.ndim > 1:
            values *= weight.shape[-1] ** -0.5
        weight.copy_(values.sigmoid() + 0.5 if "norm" in name else values)
    peer = DeepseekVitEncoder(
        patch_size=patch,
        out_features=shape.hidden_size,
        embed_dim=vision.hidden_size,
        depth=vision.num_layers,
        num_heads=vision.num_heads,
        mlp_ratio=vision.intermediate_size / vision.hidden_size,
        dynamic_img_pad=True,
    )
    released = {_released_name(name): weight for name, weight in tower.named_parameters()}
    peer.load_state_dict(checkpoint_filter_fn_encoder(released, peer))
    return tower.eval(), peer.eval()


def _released_name(name):
    for ours, theirs in (
        ("encoder.patch_embed.", "vision.patch_embed.proj."),
        ("encoder.", "vision."),
        ("projector.", "aligner."),
    ):
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return f"image_{name}"


def _images(patch):
    """Every size at random, the first of a single patch, every fifth of whole patches."""
    draw = random.Random(SEED)
    sizes = [[draw.randint(1, LONGEST) for _ in range(2)] for _ in range(SIZES)]
    sizes[0] = [patch, patch]
    sizes[::5] = [[-(-side // patch) * patch for side in size] for size in sizes[::5]]
    generator = torch.Generator().manual_seed(SEED)
    return [torch.rand(3, *size, generator=generator) * 2 - 1 for size in sizes]


def _patches(image, vision):
    """Return patches and grid of an image, filled up with zeros at the right and the bottom."""
    patch = vision.patch_size
    height, width = image.shape[1:]
    whole = F.pad(image, (0, -width % patch, 0, -height % patch))
    cut = whole.unflatten(2, (-1, patch)).unflatten(1, (-1, patch))  # [3, rows, y, cols, x]
    grid = ImageGrid(cut.shape[1], cut.shape[3], vision.downsample_ratio)
    return cut.permute(1, 3, 0, 2, 4).flatten(0, 1), grid


def _errors(kind, ours, theirs):
    error = (ours - theirs).abs().max().item()
    return {f"{kind}_max_abs": error, f"{kind}_relative": error / ours.abs().max().item()}
