"""How an image becomes a grid of patches and a span of tokens. Report §2.1.1.

Pure Python, in float64 and in this order of operations: some results that look off by one patch
are those of the released model, which exact arithmetic would not give.
"""

import math
from dataclasses import dataclass
from enum import IntEnum

from openv41.config import VisionConfig

TEXT = -1  # in lists of token types, a position outside every span
DELIMITERS = 2  # one token before an image's first cell, one behind its last newline


class SpanToken(IntEnum):
    """What a position of an image's span is."""

    START = 0
    IMAGE = 1
    NEWLINE = 2
    END = 3


@dataclass(frozen=True, slots=True)
class ImageGrid:
    """Patches of a resized image; ``ratio`` x ``ratio`` of them merge into a cell."""

    rows: int
    cols: int
    ratio: int

    @property
    def num_patches(self) -> int:
        """Patches of the image."""
        return self.rows * self.cols

    @property
    def cell_rows(self) -> int:
        """Rows of cells; the last one may be partly empty."""
        return -(-self.rows // self.ratio)

    @property
    def cell_cols(self) -> int:
        """Cells in a row."""
        return -(-self.cols // self.ratio)

    @property
    def span_length(self) -> int:
        """Tokens of the image: its cells, a newline behind each row, a start and an end."""
        return self.cell_rows * (self.cell_cols + 1) + DELIMITERS

    def layout(self) -> list[SpanToken]:
        """What each token of the span is."""
        row = [SpanToken.IMAGE] * self.cell_cols + [SpanToken.NEWLINE]
        return [SpanToken.START, *row * self.cell_rows, SpanToken.END]


def grid_of(width: int, height: int, vision: VisionConfig) -> ImageGrid:
    """Patch grid that an image of this many pixels is fitted into.

    Small images grow to ``min_pixels``; large ones shrink until their span, newlines included, has
    at most ``max_image_tokens`` tokens.
    """
    assert min(width, height) > 0, f"an image of {width} x {height} pixels"
    patch = vision.patch_size
    w: float = width
    h: float = height
    if vision.max_wh_ratio is not None and is_squeezed(width, height, vision):
        w = h * vision.max_wh_ratio
    if 0 < w * h < vision.min_pixels:
        scale = math.sqrt(vision.min_pixels / (w * h))
        w, h = int(w * scale), int(h * scale)
    grid = ImageGrid(math.ceil(h / patch), math.ceil(w / patch), vision.downsample_ratio)
    if grid.span_length > vision.max_image_tokens:
        grid = _shrunk(float(w), float(h), vision)
    assert min(grid.rows, grid.cols) > 0, f"{width} x {height} pixels give {grid}"
    assert grid.span_length <= vision.max_image_tokens, f"{width} x {height} pixels give {grid}"
    return grid


def padded_size(width: int, height: int, vision: VisionConfig) -> tuple[int, int]:
    """Width and height in pixels of an image's grid."""
    grid = grid_of(width, height, vision)
    return grid.cols * vision.patch_size, grid.rows * vision.patch_size


def is_squeezed(width: int, height: int, vision: VisionConfig) -> bool:
    """Whether an image is so wide that its aspect is not kept."""
    return vision.max_wh_ratio is not None and width > height * vision.max_wh_ratio


def _shrunk(w: float, h: float, vision: VisionConfig) -> ImageGrid:
    """The largest grid of this aspect whose span keeps to the budget."""
    patch, ratio, most = vision.patch_size, vision.downsample_ratio, vision.max_image_tokens
    most -= DELIMITERS
    aspect = h / w
    cols = math.sqrt(most / aspect + 0.25) - 0.5  # of cells, as are the rows
    rows = cols * aspect
    if cols < 1:
        return ImageGrid(most // 2 * ratio, ratio, ratio)
    if rows < 1:
        return ImageGrid(ratio, (most - 1) * ratio, ratio)
    cell = patch * ratio
    scale = min(math.floor(cols) * cell / w, math.floor(rows) * cell / h)
    fitted = [math.floor(side * scale / patch) for side in (h, w)]
    return ImageGrid(max(1, fitted[0]), max(1, fitted[1]), ratio)  # 0 only without merging
